"""What the driver counts as it runs: plain numbers, read at scrape time. Nothing here locks or allocates per request.

Class labels come from clients, so their number is bounded here: beyond MAX_CLASSES a class counts as `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from tidegate.types import UNLABELLED, Outcome, WorkloadClass

MAX_CLASSES = 64  # series stay readable, and a client that sends an id as its class does no harm
OTHER_CLASSES = "other"

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


class Counters:
    """Keys of each counter are its labels, in the order of the metrics table."""

    def __init__(self) -> None:
        self._classes: set[WorkloadClass] = set()
        self.requests: Counter[tuple[str, WorkloadClass, Outcome]] = Counter()  # path, class, outcome
        self.passed: Counter[str] = Counter()  # relayed without admission, by outcome
        self.refused: Counter[str] = Counter()  # by reason: bad requests and the gate's own refusals
        self.placed: Counter[str] = Counter()  # Place decisions by reason
        self.held: Counter[str] = Counter()  # Hold decisions by reason
        self.ended: Counter[str] = Counter()  # sessions by cause
        self.retried: Counter[str] = Counter()  # requests that left a replica, by the error's reason
        self.replica_errors: Counter[tuple[str, str]] = Counter()  # replica, reason
        self.empty_aborts: Counter[str] = Counter()  # replica
        self.aborted_replies: Counter[str] = Counter()  # replica: with text, passed on, not counted as completed
        self.prompt_tokens: Counter[WorkloadClass] = Counter()
        self.cached_tokens: Counter[WorkloadClass] = Counter()
        self.completion_tokens: Counter[WorkloadClass] = Counter()
        self.estimated_usages: Counter[str] = Counter()  # path
        self.resets: Counter[tuple[str, str]] = Counter()  # replica, reason
        self.faults = 0  # exceptions in our own callbacks
        self.held_s: dict[WorkloadClass, Histogram] = {}
        self.first_byte_s: dict[WorkloadClass, Histogram] = {}
        self.duration_s: dict[WorkloadClass, Histogram] = {}

    def label(self, workload: WorkloadClass | None) -> WorkloadClass:
        if workload is None:
            return UNLABELLED
        if workload not in self._classes:
            if len(self._classes) >= MAX_CLASSES:
                return OTHER_CLASSES
            self._classes.add(workload)
        return workload


def observe(histograms: dict[WorkloadClass, Histogram], label: WorkloadClass, value_s: float) -> None:
    histogram = histograms.get(label)
    if histogram is None:
        histogram = histograms[label] = Histogram()
    histogram.observe(value_s)
