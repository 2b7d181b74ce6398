"""`tidegate serve`: from the configuration to the end of the process."""

from __future__ import annotations

import asyncio
import signal

import structlog
from msgspec.structs import replace

from tidegate import __version__
from tidegate.config.tree import Config
from tidegate.open_files import ensure_open_files
from tidegate.server.gate import Gate

log: structlog.stdlib.BoundLogger = structlog.get_logger("tidegate")


async def run(config: Config) -> None:
    """Until SIGTERM or SIGINT, then drains; a second signal ends it at once. SIGHUP reopens the decision log."""
    fit = ensure_open_files(config.http.max_connections, len(config.server.worker_urls))
    config = replace(config, http=replace(config.http, max_connections=fit))  # more would be cut without an answer
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with Gate(config) as gate:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        if config.record.path is not None:
            loop.add_signal_handler(signal.SIGHUP, gate.reopen_record)
        log.info("listening", url=gate.url, version=__version__, policy=config.policy, loop=type(loop).__module__)
        summary = asyncio.create_task(summarise(gate))
        await stop.wait()
        summary.cancel()
        stop.clear()
        draining = asyncio.create_task(gate.drain(config.server.drain_timeout_s))
        again = asyncio.create_task(stop.wait())
        await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, again):
            task.cancel()
        await asyncio.gather(draining, again, return_exceptions=True)


async def summarise(gate: Gate) -> None:
    """Once each replica was asked: which of them answer, and what is known."""
    await gate.replicas.wait_probed()
    views = gate.replicas.views()
    if not views:
        log.warning("no replicas are listed: add some with POST /workers", usable=0)
        return
    for view in views:
        if not view.state.usable:
            log.warning("replica is not usable", replica=view.url, state=str(view.state), error=view.last_error)
        elif view.kv_capacity_tokens is None:
            log.warning(
                "KV capacity is unknown: new sessions enter narrowly",
                replica=view.url,
                remedy="let the gate reach its /metrics, or set engines.kv_capacity_tokens",
            )
    usable = [view for view in views if view.state.usable]
    capacity = sum(view.kv_capacity_tokens or 0 for view in usable)
    say = log.info if len(usable) == len(views) else log.warning
    say("pool", replicas=len(views), usable=len(usable), kv_capacity_tokens=capacity)
