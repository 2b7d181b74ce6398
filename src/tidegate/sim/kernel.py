"""Model time: a heap of (time, sequence) and one random stream for each source of chance.

Events of one instant run in the order in which they were asked for, so a run is the same on every machine. A source
(the jitter of one replica's scrapes, say) draws from its own stream, named and seeded by (seed, name): another source
more or less changes nothing for it, and two policies meet the same chances.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from typing import TypeAlias

Action: TypeAlias = Callable[[], None]


class Event:
    """Something that will happen; `cancel` is O(1), the heap drops it when its time comes."""

    __slots__ = ("action", "at_s")

    def __init__(self, at_s: float, action: Action) -> None:
        self.at_s = at_s
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class Kernel:
    def __init__(self, seed: int = 0) -> None:
        self.now_s = 0.0
        self.events = 0  # that have run
        self._seed = seed
        self._heap: list[tuple[float, int, Event]] = []
        self._sequence = count()

    def stream(self, source: str) -> random.Random:
        return random.Random(f"{self._seed}/{source}")

    def at(self, at_s: float, action: Action) -> Event:
        if at_s < self.now_s:
            raise ValueError(f"{at_s} s is past: it is {self.now_s} s")
        event = Event(at_s, action)
        heapq.heappush(self._heap, (at_s, next(self._sequence), event))
        return event

    def after(self, delay_s: float, action: Action) -> Event:
        return self.at(self.now_s + delay_s, action)

    def every(self, period_s: float, action: Action) -> None:
        """First after one period, and for ever."""

        def again() -> None:
            action()
            self.after(period_s, again)

        self.after(period_s, again)

    def run(self, until_s: float) -> None:
        """Everything that happens up to and at this time."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            at_s, _, event = heapq.heappop(heap)
            action = event.action
            if action is not None:
                self.now_s = at_s
                self.events += 1
                action()
        self.now_s = max(self.now_s, until_s)

    @property
    def pending(self) -> int:
        return sum(event.action is not None for _, _, event in self._heap)
