"""Whether the pool is paused: by a call through the gate, or because every replica was paused at the engine itself.

    through the gate    /pause or /pause_generation; from before the call goes out, so that no request slips in, until
                        /resume, or until the replicas that were seen paused all say that they run again
    at the engines      every replica says so (the monitors probe it); until the first says that it runs

While paused, requests are held, residency clocks stand still, and nothing counts against a replica's health.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from tidegate.clock import Clock
from tidegate.server.replicas import Replicas
from tidegate.types import AnyEvent, PoolPaused, PoolResumed, ReplicaId

log: structlog.stdlib.BoundLogger = structlog.get_logger("tidegate.pause")


class Pausing:
    def __init__(self, replicas: Replicas, handle: Callable[[AnyEvent], None], clock: Clock) -> None:
        self.by_gate = False
        self.by_engines = False
        self._replicas = replicas
        self._handle = handle
        self._clock = clock
        self._confirmed = False  # the pause call has returned
        self._epoch_started = False  # during this pause
        self._seen_paused: set[ReplicaId] = set()

    @property
    def paused(self) -> bool:
        return self.by_gate or self.by_engines

    def pause(self) -> None:
        if not self.by_gate:
            before = self.paused
            self.by_gate = True
            self._confirmed = self._epoch_started = False
            self._seen_paused.clear()
            self._replicas.suspend()
            self._tell(before)

    def confirm(self) -> None:
        """The replicas have answered the pause."""
        self._confirmed = True

    def resume(self) -> None:
        if self.by_gate:
            before = self.paused
            self.by_gate = self.by_engines = False
            self._replicas.resume()
            self._tell(before)

    def starts_epoch(self) -> bool:
        """Whether this call that changes weights is the first of its pause: bucketed updates are many calls."""
        first = not (self.paused and self._epoch_started)
        self._epoch_started = self.paused
        return first

    def look(self) -> None:
        """At each tick."""
        before = self.paused
        if self.by_gate:
            self._look_for_resume_at_engines()
        else:
            self.by_engines = self._replicas.all_paused_at_engine()
            self._epoch_started = self._epoch_started and self.by_engines
            self._tell(before)

    def _look_for_resume_at_engines(self) -> None:
        if not self._confirmed:
            return
        states = {monitor.url: monitor.engine_paused for monitor in self._replicas.monitors()}
        self._seen_paused.update(url for url, paused in states.items() if paused)
        self._seen_paused.intersection_update(states)
        if self._seen_paused and all(states[url] is False for url in self._seen_paused):
            log.warning("the replicas were resumed, though not through the gate", replicas=sorted(self._seen_paused))
            self.resume()

    def _tell(self, before: bool) -> None:
        if self.paused == before:
            return
        log.info("pool paused" if self.paused else "pool resumed", through_gate=self.by_gate)
        now_s = self._clock.now_s()
        self._handle(PoolPaused(at_s=now_s) if self.paused else PoolResumed(at_s=now_s))
