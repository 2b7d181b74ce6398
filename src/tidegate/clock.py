"""Where time comes from: the system's monotonic clock, or one that tests and the simulator move by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds, monotonic; the origin means nothing."""
        ...


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """Moves only when told. Moving backwards is refused: every consumer relies on monotonic time."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> None:
        self.set(self._now_s + by_s)

    def set(self, to_s: float) -> None:
        if to_s < self._now_s:
            raise ValueError(f"clock moved backwards: {self._now_s} -> {to_s}")
        self._now_s = to_s
