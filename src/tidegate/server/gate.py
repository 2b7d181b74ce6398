"""The gate as one object: puts the parts together, starts and stops them in order.

    async with Gate(config) as gate:
        print(gate.url)

Stopping: `drain` refuses what is held and whatever still comes, lets running requests end for a while, then closes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from tidegate import __version__
from tidegate.clock import Clock, SystemClock
from tidegate.config.tree import Config, HttpConfig
from tidegate.engines import orca
from tidegate.engines.control import control_session
from tidegate.engines.discovery import by_replica, normalise_all
from tidegate.errors import ConfigError
from tidegate.observe.metrics import Inferred, Snapshot, registry
from tidegate.observe.recorder import Recorder, log_header
from tidegate.policy.advice import Advisor
from tidegate.policy.scheduler import Scheduler
from tidegate.proxy.framing import VIA_HEADER
from tidegate.proxy.identity import Identifier
from tidegate.proxy.pool import Pool
from tidegate.proxy.relay import Listener, serve
from tidegate.proxy.seam import Handler
from tidegate.server import state
from tidegate.server.app import Routes, StatusApi
from tidegate.server.control import ControlApi
from tidegate.server.driver import Driver
from tidegate.server.engine_sessions import EngineSessions
from tidegate.server.inferring import InferringIdentifier, identifier_of
from tidegate.server.lineage import Lineage
from tidegate.server.metrics_port import MetricsOnly
from tidegate.server.mixture import MixtureApi
from tidegate.server.passing import Passing
from tidegate.server.pausing import Pausing
from tidegate.server.replicas import Replicas
from tidegate.server.retention import Retention, plugin_headers
from tidegate.server.sessions import SessionsApi
from tidegate.server.workers import WorkersApi
from tidegate.types import AnyDecision, AnyEvent

log: structlog.stdlib.BoundLogger = structlog.get_logger("tidegate")


class Gate:
    def __init__(self, config: Config, clock: Clock | None = None) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self.listener: Listener
        self.driver: Driver
        self.replicas: Replicas
        self.retention: Retention
        self.engine_sessions: EngineSessions
        self.pausing: Pausing
        self.advisor: Advisor
        self.registry: CollectorRegistry
        self._recorder: Recorder | None = None
        self._lineage: Lineage | None = None
        self.metrics_listener: Listener | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._stack = contextlib.AsyncExitStack()

    @property
    def url(self) -> str:
        host, port = self.listener.addresses[0]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    # --- life --------------------------------------------------------------------------------------------------------
    async def __aenter__(self) -> Gate:
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        config = self.config
        urls = normalise_all(config.server.worker_urls)
        scheduler = Scheduler(config.policy, config.core, config.seed)
        self.advisor = Advisor(scheduler)
        self._recorder = self._open_recorder()
        if self._recorder is not None:
            stack.callback(self._recorder.close)
        identifier = identifier_of(config.identity)
        self._lineage = identifier.lineage if isinstance(identifier, InferringIdentifier) else None
        driver = self.driver = Driver(
            scheduler,
            self.clock,
            identifier,
            max_attempts=config.server.max_attempts,
            recorder=self._recorder,
        )
        engines = msgspec.structs.replace(
            config.engines,
            kv_capacity_tokens_by_url=by_replica(config.engines.kv_capacity_tokens_by_url),
            kv_event_endpoints=by_replica(config.engines.kv_event_endpoints),
        )
        driver.names_sessions = engines.name_sessions
        client = control_session(engines, VIA_HEADER)  # a gate that is its own replica is seen by its probes
        stack.push_async_callback(client.close)
        self.replicas = driver.replicas = Replicas(engines, driver.observed, self.clock, client)
        stack.push_async_callback(self.replicas.close)
        driver.passing = Passing(self.replicas.answering, driver.home, driver.counters, config.server.max_attempts)
        self.retention = Retention(engines, client, plugin_headers(engines))
        self.engine_sessions = EngineSessions(self.replicas, plugin_headers(engines))
        stack.push_async_callback(self.engine_sessions.close)
        stack.push_async_callback(self.retention.close)
        driver.told = self._told
        self.pausing = Pausing(self.replicas, driver.handle, self.clock)
        self.registry = registry(self.snapshot)
        routes = self._routes(scheduler, identifier)
        driver.router = routes
        header = orca.request_header(config.engines.orca)
        pool = Pool(config.http, [header] if header is not None else [])
        self.replicas.on_removed = pool.forget
        self.listener = await listen(driver, config.http, config.server.host, config.server.port, pool)
        stack.push_async_callback(self.listener.close)
        if config.server.prometheus_port is not None:
            self.metrics_listener = await listen(
                MetricsOnly(routes), config.http, config.server.prometheus_host, config.server.prometheus_port
            )
            stack.push_async_callback(self.metrics_listener.close)
        for url in urls:
            self.replicas.add(url)
        self._ticker = asyncio.create_task(self._tick_forever(scheduler.tick_s), name="tick")
        stack.push_async_callback(self._stop_ticking)

    def _routes(self, scheduler: Scheduler, identifier: Identifier) -> Routes:
        driver, clock = self.driver, self.clock
        known = scheduler.ledger.sessions
        sessions = SessionsApi(driver.handle, lambda session: session in known, identifier, clock)
        control = ControlApi(
            self.replicas,
            self.pausing,
            driver.handle,
            driver.aborts_called,
            driver.abort_held,
            clock,
            max_body_bytes=self.config.http.max_body_bytes,
        )
        status = StatusApi(self.registry, self.readiness, self.state, self.advisor.look)
        workers = WorkersApi(self.replicas, self.retention, scheduler, clock)
        mixture = MixtureApi(driver.handle, lambda: scheduler.view(clock.now_s()), clock)
        apis = (status, sessions, workers, mixture, control, self.engine_sessions)
        return Routes([route for api in apis for route in api.routes()], driver.count_fault)

    def _told(self, event: AnyEvent, decisions: Sequence[AnyDecision]) -> None:
        self.retention.told(event, decisions)
        self.engine_sessions.told(event, decisions)

    def _open_recorder(self) -> Recorder | None:
        config = self.config
        record = config.record
        if record.path is None:
            return None
        header = log_header(config.policy, config.seed, config.core)
        try:
            return Recorder(Path(record.path), header, queue_lines=record.queue_lines, flush_s=record.flush_s)
        except OSError as exc:
            raise ConfigError(f"record.path {record.path!r} cannot be written: {exc.strerror or exc}") from exc

    def reopen_record(self) -> None:
        """The decision log was moved away, or somebody wants it looked after."""
        if self._recorder is not None:
            self._recorder.reopen()

    async def _tick_forever(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            try:
                self.driver.tick()
                self.pausing.look()
                self.driver.failed_ticks = 0
            except Exception:  # without ticks held requests would wait for ever
                self.driver.failed_ticks += 1
                self.driver.counters.faults += 1
                log.exception("internal fault", where="tick")

    async def _stop_ticking(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)

    async def drain(self, timeout_s: float) -> int:
        """The number of requests that were cut."""
        refused = self.driver.refuse_all()
        running = self.driver.under_way
        log.info("draining", running=running, refused=refused, timeout_s=timeout_s)
        cut = 0

        async def count_at_the_end() -> None:
            nonlocal cut
            await asyncio.sleep(timeout_s)
            cut = self.driver.under_way

        counting = asyncio.create_task(count_at_the_end())
        await self.listener.drain(timeout_s + 0.01)
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)
        (log.warning if cut else log.info)("stopped", cut=cut)
        return cut

    # --- what it shows -----------------------------------------------------------------------------------------------
    def snapshot(self) -> Snapshot:
        driver, now_s = self.driver, self.clock.now_s()
        return Snapshot(
            version=__version__,
            policy=self.config.policy,
            uptime_s=now_s - driver.started_s,
            view=driver.scheduler.view(now_s),
            advice=self.advisor.look(),
            counters=driver.counters,
            failed_ticks=driver.failed_ticks,
            monitors=self.replicas.views(),
            plugins=self.retention.views(),
            plugin_tally=self.retention.tally,
            recorder=self._recorder,
            listener=self.listener,
            passing=driver.passing.under_way,
            inferred=self._inferred(),
        )

    def _inferred(self) -> Inferred | None:
        table = self._lineage
        if table is None:
            return None
        return Inferred(sessions=len(table), opened=table.opened, continued=table.continued)

    def readiness(self) -> dict[str, Any]:
        return state.readiness(self.driver.scheduler.view(self.clock.now_s()), self.driver.failed_ticks)

    def state(self) -> dict[str, Any]:
        now_s = self.clock.now_s()
        holds = [
            {
                "session": entry.identity.session,
                "workload": entry.counters.label,
                "reason": entry.hold_reason,
                "waited_s": round(now_s - entry.arrived_s, 3),
            }
            for entry in self.driver.held()
        ]
        return state.document(self.snapshot(), self.driver.scheduler.estimates(now_s), holds)


async def listen(handler: Handler, config: HttpConfig, host: str, port: int, pool: Pool | None = None) -> Listener:
    try:
        return await serve(handler, config, host, port, pool=pool)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
