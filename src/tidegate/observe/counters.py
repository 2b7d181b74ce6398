"""What the driver counts as it runs: plain numbers, read at scrape time. Nothing here locks or allocates per request.

Class labels come from clients, so their number is bounded here: beyond MAX_CLASSES a class counts as `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Final

from tidegate.types import UNLABELLED, Outcome, WorkloadClass

MAX_CLASSES: Final = 64  # series stay readable, and a client that sends an id as its class does no harm
OTHER_CLASSES: Final = "other"

# From a relay's own cost (well under a millisecond) to a rollout's longest generation or hold (hours).
SECONDS_BOUNDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 7200.0)


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS_BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class ClassCounters:
    """Of one workload class: looked up once per request."""

    def __init__(self, label: WorkloadClass) -> None:
        self.label = label
        self.requests: Counter[tuple[str, Outcome]] = Counter()  # path, outcome
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.held_s = Histogram()
        self.first_byte_s = Histogram()
        self.duration_s = Histogram()


class Counters:
    """Keys of each counter are its labels, in the order of the metrics table."""

    def __init__(self) -> None:
        self.classes: dict[WorkloadClass, ClassCounters] = {}
        self.passed: Counter[str] = Counter()  # relayed without admission, by outcome
        self.refused: Counter[str] = Counter()  # by reason: bad requests and the gate's own refusals
        self.placed: Counter[str] = Counter()  # Place decisions by reason
        self.held: Counter[str] = Counter()  # Hold decisions by reason
        self.ended: Counter[str] = Counter()  # sessions by cause
        self.retried: Counter[str] = Counter()  # requests that left a replica, by the error's reason
        self.replica_errors: Counter[tuple[str, str]] = Counter()  # replica, reason
        self.empty_aborts: Counter[str] = Counter()  # replica
        self.aborted_replies: Counter[str] = Counter()  # replica: with text, passed on, not counted as completed
        self.implausible_usages: Counter[str] = Counter()  # replica
        self.estimated_usages: Counter[str] = Counter()  # path
        self.resets: Counter[tuple[str, str]] = Counter()  # replica, reason
        self.faults = 0  # exceptions in our own callbacks

    def of_class(self, workload: WorkloadClass | None) -> ClassCounters:
        label = workload or UNLABELLED
        known = self.classes.get(label)
        if known is None:
            if len(self.classes) >= MAX_CLASSES and label != OTHER_CLASSES:
                return self.of_class(OTHER_CLASSES)
            known = self.classes[label] = ClassCounters(label)
        return known
