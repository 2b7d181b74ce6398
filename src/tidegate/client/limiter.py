"""Waiting for a slot: first come first served within a class, safe under cancellation.

A waiter that is cancelled leaves the queue; if it had just been given its slot, the slot goes to the next one. Whoever
was given a slot gives it back exactly once, by `release`.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TypeAlias

from tidegate.client.errors import SchedulerClosed
from tidegate.client.slots import Label, Limits, Slots


class _Waiter:
    __slots__ = ("among", "granted", "number", "workload")

    def __init__(self, number: int, workload: Label, among: frozenset[str] | None) -> None:
        self.number = number
        self.workload = workload
        self.among = among  # any class of these; None: the one above
        self.granted: asyncio.Future[Label] = asyncio.get_running_loop().create_future()


_Queue: TypeAlias = dict[int, _Waiter]  # by number: first come first


class Limiter:
    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.paused = False
        self._closed = False
        self._queues: dict[Label, _Queue] = {}
        self._choosers: _Queue = {}  # that take one of several classes
        self._numbers = count()

    @property
    def labels(self) -> list[Label]:
        """Of which somebody has waited for a slot."""
        return list(self._queues)

    def waiting(self, workload: Label) -> int:
        return len(self._queues.get(workload, ()))

    async def acquire(self, workload: Label = None, among: frozenset[str] | None = None) -> Label:
        """A slot of the class, or of one `among` several, which is chosen when there is room. Gives the class."""
        if self._closed:
            raise SchedulerClosed("the scheduler is closed")
        waiter = _Waiter(next(self._numbers), workload, among)
        queue = self._queues.setdefault(workload, {}) if among is None else self._choosers
        queue[waiter.number] = waiter
        self.grant()
        try:
            return await waiter.granted
        except BaseException:
            granted = waiter.granted
            queue.pop(waiter.number, None)
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.take_back(granted.result())  # cancelled in the moment in which it was its turn
            raise

    def release(self, workload: Label) -> None:
        self.slots.end(workload)
        self.grant()

    def take_back(self, workload: Label) -> None:
        """As release, of a session that never started."""
        self.slots.take_back(workload)
        self.grant()

    def set_limits(self, limits: Limits) -> None:
        self.slots.limits = limits
        self.grant()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.grant()

    def close(self) -> None:
        """Whoever waits gets SchedulerClosed."""
        self._closed = True
        for queue in (*self._queues.values(), self._choosers):
            for waiter in queue.values():
                if not waiter.granted.done():
                    waiter.granted.set_exception(SchedulerClosed("the scheduler is closed"))
            queue.clear()

    # --- who goes next -----------------------------------------------------------------------------------------
    def grant(self) -> None:
        """Give out what room there is: after anything that may have made some."""
        while not self.paused and self.slots.total < self.slots.limits.sessions:
            chosen = self._next()
            if chosen is None:
                return
            waiter, workload = chosen
            queue = self._queues[workload] if waiter.among is None else self._choosers
            del queue[waiter.number]
            if not waiter.granted.done():  # else it was cancelled, and has not yet been told so
                self.slots.start(workload)
                waiter.granted.set_result(workload)

    def _next(self) -> tuple[_Waiter, Label] | None:
        heads = self._heads()
        shares = self.slots.shares
        inside = self.slots.next_of([workload for workload in heads if workload is not None and workload in shares])
        fitting = [workload for workload in heads if workload not in shares and self.slots.room(workload)]
        if inside is not None:
            fitting.append(inside)
        if not fitting:
            return None
        workload = min(fitting, key=lambda workload: heads[workload].number)
        return heads[workload], workload

    def _heads(self) -> dict[Label, _Waiter]:
        """Who has waited longest for each class."""
        heads = {workload: next(iter(queue.values())) for workload, queue in self._queues.items() if queue}
        for waiter in self._choosers.values():
            for workload in sorted(waiter.among or ()):
                known = heads.get(workload)
                if known is None or waiter.number < known.number:
                    heads[workload] = waiter
        return heads
