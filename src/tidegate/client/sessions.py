"""The sessions of one scheduler: their slots, their counts, and what the gate is told of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from tidegate.client.courier import Courier
from tidegate.client.limiter import Limiter
from tidegate.client.session import Session
from tidegate.client.slots import Label
from tidegate.client.stats import ClassStats


class Sessions:
    """Implements `session.Host`."""

    def __init__(
        self, limiter: Limiter, courier: Courier | None, base_url: str | None, changed: Callable[[], None]
    ) -> None:
        self.base_url = base_url
        self._limiter = limiter
        self._courier = courier
        self._changed = changed
        self._started = Counter[Label]()
        self._completed = Counter[Label]()
        self._failed = Counter[Label]()

    async def enter(self, workload: Label, among: frozenset[str] | None) -> Label:
        chosen = await self._limiter.acquire(workload, among)
        self._started[chosen] += 1
        self._changed()
        return chosen

    def announce(self, session: Session, id: str) -> asyncio.Task[None] | None:
        if self._courier is None:
            return None
        return self._courier.announce(
            id, workload=session.workload, group=session.group, expected_tokens=session.expected_tokens
        )

    def leave(self, workload: Label, ids: list[str], *, failed: bool, played: bool) -> None:
        if played:
            (self._failed if failed else self._completed)[workload] += 1
            self._limiter.release(workload)
        else:
            self._started[workload] -= 1
            self._limiter.take_back(workload)
        if self._courier is not None:
            for id in ids:
                self._courier.finish(id)
        self._changed()

    def by_class(self) -> dict[Label, ClassStats]:
        slots = self._limiter.slots
        known = dict.fromkeys((*slots.shares, *self._limiter.labels, *self._started))
        return {
            label: ClassStats(
                started=self._started[label],
                completed=self._completed[label],
                failed=self._failed[label],
                in_flight=slots.in_flight.get(label, 0),
                waiting=self._limiter.waiting(label),
                limit=slots.limits.classes.get(label),
            )
            for label in known
        }

    def tv_distance(self) -> float | None:
        shares = self._limiter.slots.shares
        completed = {label: self._completed[label] for label in shares}
        total = sum(completed.values())
        if not total:
            return None
        return 0.5 * sum(abs(completed[label] / total - share) for label, share in shares.items())
