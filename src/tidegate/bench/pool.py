"""Replicas that one measurement after the other uses: cold at the start of each, behind a gate of its own."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

import aiohttp

from tidegate.bench.processes import Server, Servers, free_ports
from tidegate.bench.scrape import engine_totals

IDLE_S = 300.0  # for the engines to finish what a run left behind
GATE_START_S = 60.0


async def make_cold(engines: Sequence[str]) -> None:
    """Wait until the engines are idle, then empty their prefix caches: a reset is refused while a request runs."""
    deadline_s = time.monotonic() + IDLE_S
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < deadline_s:
            totals = await engine_totals(http, engines)
            if totals.running == 0 and totals.waiting == 0 and await _reset(http, engines):
                return
            await asyncio.sleep(0.5)
    raise RuntimeError(f"the engines were not idle after {IDLE_S:.0f} s")


async def _reset(http: aiohttp.ClientSession, engines: Sequence[str]) -> bool:
    for url in engines:
        async with http.post(f"{url}/reset_prefix_cache") as response:
            body = await response.read()
            if response.status != 200 or b"false" in body:
                return False
    return True


async def start_gate(servers: Servers, policy: str, engines: Sequence[str], flags: Sequence[str] = ()) -> Server:
    """`tidegate serve` with this interpreter, so that it works wherever this package is importable."""
    (port,) = free_ports(1)
    command = [sys.executable, "-c", "from tidegate.cli.main import main; main()", "serve", "--policy", policy]
    command += ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *engines, *flags]
    gate = servers.start(f"tidegate-{policy}", command, f"http://127.0.0.1:{port}")
    await gate.ready("/v1/models", GATE_START_S)
    return gate
