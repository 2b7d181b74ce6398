"""`tidegate serve` as a process, and what its admin routes say."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from tests.e2e.process import Process, free_ports
from tests.e2e.waiting import until

TIDEGATE = Path(sys.executable).with_name("tidegate")
START_S = 60.0

# Watching at a tenth of the usual periods: a test waits for what the gate learns.
QUICK = {
    "TIDEGATE_CORE_TICK_S": "0.1",
    "TIDEGATE_ENGINES_SCRAPE_PERIOD_S": "0.1",
    "TIDEGATE_ENGINES_HEALTH_PERIOD_S": "0.2",
    "TIDEGATE_ENGINES_EJECT_S": "0.2",
    "TIDEGATE_ENGINES_EJECT_MAX_S": "1",
    "TIDEGATE_ENGINES_DRAIN_S": "1",
    "TIDEGATE_ENGINES_LOST_AFTER_S": "1",
    "TIDEGATE_ENGINES_RESIDENCY_PERIOD_S": "0.1",
    "TIDEGATE_SERVER_DRAIN_TIMEOUT_S": "1",
    "TIDEGATE_RECORD_FLUSH_S": "0.05",
}


class Gate:
    def __init__(
        self,
        worker_urls: Sequence[str],
        log: Path,
        *,
        policy: str,
        settings: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        command: list[str | Path] = [TIDEGATE, "serve", "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
        if worker_urls:
            command += ["--worker-urls", *worker_urls]
        self.process = Process([*command, *flags], log, {**QUICK, **(settings or {})})

    def start(self) -> None:
        self.process.start()
        self.process.wait_healthy(f"{self.url}/state", START_S)

    async def state(self, client: aiohttp.ClientSession) -> Any:
        async with client.get(f"{self.url}/state") as reply:
            assert reply.status == 200
            return await reply.json()

    async def ready(self, client: aiohttp.ClientSession, replicas: int) -> Any:
        """Until that many replicas can take requests and their capacity is known."""

        def all_known(state: Any) -> bool:
            usable = [r for r in state["replicas"] if r["ready"] and r["kv_capacity_tokens"] and not r["stale"]]
            return len(usable) == replicas

        return await until(lambda: self.state(client), all_known)

    async def idle(self, client: aiohttp.ClientSession) -> Any:
        """Until nothing is in flight and no session lives."""
        return await until(lambda: self.state(client), is_idle)


def is_idle(state: Any) -> bool:
    return not (
        any(state["sessions"][kind] for kind in ("live", "held", "paused"))
        or state["requests"]["in_flight"]
        or any(replica["sessions"] or replica["requests"] for replica in state["replicas"])
    )


def replica_of(state: Any, url: str) -> Any:
    (replica,) = [replica for replica in state["replicas"] if replica["url"] == url]
    return replica
