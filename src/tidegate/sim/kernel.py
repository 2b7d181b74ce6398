"""Model time: a heap of (time, sequence) and one random stream for each source of chance.

Events of one instant run in the order in which they were asked for, so a run is the same on every machine. A source
(the jitter of one replica's scrapes, say) draws from its own stream, named and seeded by (seed, name): another source
more or less changes nothing for it, and two policies meet the same chances.

An event is a call with its arguments. None is ever taken back: an action that may be overtaken by events looks
whether it still holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeAlias

Action: TypeAlias = Callable[..., object]


class Kernel:
    def __init__(self, seed: int = 0) -> None:
        self.now_s = 0.0
        self.events = 0  # that have run
        self._seed = seed
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._asked = 0

    def stream(self, source: str) -> random.Random:
        return random.Random(f"{self._seed}/{source}")

    @property
    def next_s(self) -> float | None:
        """When the next event is due; None: nothing will happen any more."""
        return self._heap[0][0] if self._heap else None

    def at(self, at_s: float, action: Action, *args: Any) -> None:
        if at_s < self.now_s:
            raise ValueError(f"{at_s} s is past: it is {self.now_s} s")
        self._asked += 1
        heappush(self._heap, (at_s, self._asked, action, args))

    def after(self, delay_s: float, action: Action, *args: Any) -> None:
        if delay_s < 0.0:
            raise ValueError(f"{-delay_s} s ago is past")
        self._asked += 1
        heappush(self._heap, (self.now_s + delay_s, self._asked, action, args))

    def every(self, period_s: float, action: Action) -> None:
        """First after one period, and for ever."""
        self.after(period_s, self._again, period_s, action)

    def _again(self, period_s: float, action: Action) -> None:
        action()
        self.after(period_s, self._again, period_s, action)

    def run(self, until_s: float) -> None:
        """Everything that happens up to and at this time."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, action, args = heappop(heap)
            self.events += 1
            action(*args)
        self.now_s = max(self.now_s, until_s)
