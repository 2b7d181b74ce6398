"""What a scheduler has done so far: numbers to log, to plot, or to decide by."""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.client.feed import Source
from tidegate.client.slots import Label


@dataclass(frozen=True)
class ClassStats:
    """Sessions of one class."""

    started: int = 0
    completed: int = 0  # their `async with` ended without an exception
    failed: int = 0  # with one, a cancellation included
    in_flight: int = 0
    waiting: int = 0  # for a slot of this class
    limit: int | None = None  # None: only the total counts


@dataclass(frozen=True)
class Stats:
    source: Source  # of the limit
    limit: int
    in_flight: int
    paused: bool
    unfinished: int  # sessions whose end the gate has not been told yet
    classes: dict[Label, ClassStats] = field(default_factory=dict)
    # Total variation, 0 to 1, of the completed sessions from the mixture; None: there is no mixture, or nothing yet.
    tv_distance: float | None = None

    @property
    def completed(self) -> int:
        return sum(one.completed for one in self.classes.values())
