"""The replicas of the pool: one monitor each, and what the rest of the gate asks and tells about them.

A replica is its URL. Adding one that is listed changes nothing; one that was removed and comes back gets a fresh
monitor, while the ledger still knows its load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import structlog

from tidegate.clock import Clock
from tidegate.config.engines import EnginesConfig
from tidegate.engines import orca
from tidegate.engines.health import State
from tidegate.engines.monitor import MonitorView, ReplicaMonitor
from tidegate.types import AnyEvent, ReplicaAdded, ReplicaHealth, ReplicaId, ReplicaRemoved

log: structlog.stdlib.BoundLogger = structlog.get_logger("tidegate.replicas")

FIRST_PROBE_S = 5.0  # how long an add waits to say whether the replica answers


class Replicas:
    def __init__(
        self, config: EnginesConfig, sink: Callable[[AnyEvent], None], clock: Clock, client: aiohttp.ClientSession
    ) -> None:
        self.client = client
        self.config = config
        self.on_removed: Callable[[ReplicaId], None] = lambda url: None  # the data path lets its connections go
        self._sink = sink
        self._clock = clock
        self._monitors: dict[ReplicaId, ReplicaMonitor] = {}
        self._tasks: dict[ReplicaId, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._suspended = False
        self._answering: list[ReplicaId] | None = None  # until a state changes

    # --- the list ----------------------------------------------------------------------------------------------------
    @property
    def urls(self) -> list[ReplicaId]:
        return list(self._monitors)

    def __contains__(self, url: ReplicaId) -> bool:
        return url in self._monitors

    def monitor(self, url: ReplicaId) -> ReplicaMonitor | None:
        return self._monitors.get(url)

    def monitors(self) -> list[ReplicaMonitor]:
        return list(self._monitors.values())

    def views(self) -> tuple[MonitorView, ...]:
        return tuple(monitor.view() for monitor in self._monitors.values())

    def add(self, url: ReplicaId) -> bool:
        """Whether it was not listed before."""
        if url in self._monitors:
            return False
        config = self.config
        capacity = config.kv_capacity_tokens_by_url.get(url, config.kv_capacity_tokens)
        self._sink(ReplicaAdded(at_s=self._clock.now_s(), replica=url, kv_capacity_tokens=capacity))
        self._sink(ReplicaHealth(at_s=self._clock.now_s(), replica=url, usable=False, reason="starting"))
        monitor = ReplicaMonitor(
            url, config, self._observed, self._clock, self.client, last_usable=lambda: self._is_last_usable(url)
        )
        if self._suspended:
            monitor.suspend()
        self._monitors[url] = monitor
        self._answering = None
        task = asyncio.get_running_loop().create_task(monitor.run(), name=f"monitor {url}")
        task.add_done_callback(lambda done: self._stopped(url, done))
        self._tasks[url] = task
        return True

    def remove(self, url: ReplicaId) -> bool:
        """Whether it was listed. Its running requests go on to their end."""
        if self._monitors.pop(url, None) is None:
            return False
        self._answering = None
        self._stop(url)
        self.on_removed(url)
        self._sink(ReplicaRemoved(at_s=self._clock.now_s(), replica=url))
        return True

    async def wait_probed(self, timeout_s: float = FIRST_PROBE_S) -> None:
        """Until each listed replica was asked once."""
        await asyncio.gather(*(monitor.wait_probed(timeout_s) for monitor in self.monitors()))

    async def close(self) -> None:
        for url in list(self._tasks):
            self._stop(url)
        await asyncio.gather(*self._closing, return_exceptions=True)

    # --- what is asked -----------------------------------------------------------------------------------------------
    def usable(self) -> list[ReplicaId]:
        return [url for url, monitor in self._monitors.items() if monitor.state.usable]

    def answering(self) -> list[ReplicaId]:
        """Those that can answer what costs no KV: usable ones, else those that are paused."""
        if self._answering is None:
            paused = [url for url, monitor in self._monitors.items() if monitor.state is State.PAUSED]
            self._answering = self.usable() or paused
        return self._answering

    def all_paused_at_engine(self) -> bool:
        return bool(self._monitors) and all(m.state is State.PAUSED for m in self._monitors.values())

    def lost_before_s(self) -> dict[ReplicaId, float]:
        """Of replicas that lost requests: those sent before that time, and not answered yet."""
        lost = {url: monitor.lost_before_s() for url, monitor in self._monitors.items()}
        return {url: before_s for url, before_s in lost.items() if before_s is not None}

    def _is_last_usable(self, url: ReplicaId) -> bool:
        return not any(m.state.usable for other, m in self._monitors.items() if other != url)

    # --- what is told ------------------------------------------------------------------------------------------------
    def response_ok(self, url: ReplicaId) -> None:
        monitor = self._monitors.get(url)
        if monitor is not None:
            monitor.response_ok()

    def connect_failed(self, url: ReplicaId, error: str) -> None:
        monitor = self._monitors.get(url)
        if monitor is not None:
            monitor.connect_failed(error)

    def saw_empty_abort(self, url: ReplicaId) -> None:
        monitor = self._monitors.get(url)
        if monitor is not None:
            monitor.saw_empty_abort()

    def load_report(self, url: ReplicaId, header: bytes) -> None:
        sample = orca.sample(url, self._clock.now_s(), header) if url in self._monitors else None
        if sample is not None:
            self._sink(sample)

    def suspend(self) -> None:
        """The gate pauses the pool: nothing that happens now counts against a replica."""
        self._suspended = True
        for monitor in self._monitors.values():
            monitor.suspend()

    def resume(self) -> None:
        self._suspended = False
        for monitor in self._monitors.values():
            monitor.resume()

    # --- inside ------------------------------------------------------------------------------------------------------
    def _observed(self, event: AnyEvent) -> None:
        if isinstance(event, ReplicaHealth):
            self._answering = None
            monitor = self._monitors.get(event.replica)
            error = monitor.view().last_error if monitor is not None and not event.usable else None
            say = log.info if event.usable else log.warning
            say("replica health", replica=event.replica, usable=event.usable, reason=event.reason, error=error)
        self._sink(event)

    def _stop(self, url: ReplicaId) -> None:
        task = self._tasks.pop(url, None)
        if task is not None:
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            task.cancel()

    def _stopped(self, url: ReplicaId, task: asyncio.Task[None]) -> None:
        """A monitor runs until it is cancelled; anything else is a bug, and its replica must not stay usable unseen."""
        if task.cancelled() or task.exception() is None:
            return
        log.error("monitor stopped", replica=url, exc_info=task.exception())
        if self._tasks.get(url) is task:
            self._sink(ReplicaHealth(at_s=self._clock.now_s(), replica=url, usable=False, reason="unwatched"))
