"""Distributions known by a few percentiles.

Publications give p50/p95/p99 and rarely more. A `QuantileFunction` passes through exactly these points and
interpolates log-linearly between them, so that sampled percentiles are the published ones and the tail is as heavy
as they say. Nothing is fitted, so nothing can fit badly. Only the two ends are chosen, see `through`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise


class QuantileFunction:
    """value(u), u in [0, 1]: log-linear between (probability, value) points; the points span [0, 1]."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        probabilities = [p for p, _ in points]
        values = [v for _, v in points]
        if len(points) < 2 or probabilities[0] != 0.0 or probabilities[-1] != 1.0:
            raise ValueError("the points must span the probabilities 0 to 1")
        if any(a >= b for a, b in pairwise(probabilities)):
            raise ValueError("probabilities must increase")
        if values[0] <= 0 or any(a > b for a, b in pairwise(values)):
            raise ValueError("values must be positive and must not decrease")
        self._probabilities = probabilities
        self._logs = [math.log(v) for v in values]

    @classmethod
    def through(cls, p50: float, p95: float, p99: float, *, limit: float = math.inf) -> QuantileFunction:
        """Through the three percentiles. The lower end mirrors the upper one (p50^2 / p95, symmetric in the log); the
        upper end repeats the last known step (p99^2 / p95), at most `limit`, as a context length would cut it."""
        low = p50 * p50 / p95
        high = max(p99, min(limit, p99 * p99 / p95))
        return cls([(0.0, low), (0.5, p50), (0.95, p95), (0.99, p99), (1.0, high)])

    @classmethod
    def uniform_log(cls, low: float, high: float) -> QuantileFunction:
        return cls([(0.0, low), (1.0, high)])

    def value(self, u: float) -> float:
        right = min(bisect_right(self._probabilities, u), len(self._probabilities) - 1)
        left = right - 1
        p0, p1 = self._probabilities[left], self._probabilities[right]
        return math.exp(self._logs[left] + (self._logs[right] - self._logs[left]) * (u - p0) / (p1 - p0))

    def mean(self) -> float:
        """Exact: the mean of a log-linear piece from a to b is (b - a) / ln(b / a)."""
        total = 0.0
        for (p0, l0), (p1, l1) in pairwise(zip(self._probabilities, self._logs, strict=True)):
            a, b = math.exp(l0), math.exp(l1)
            total += (p1 - p0) * (a if l1 == l0 else (b - a) / (l1 - l0))
        return total


def percentile(values: Sequence[float], p: float) -> float:
    """Linear between order statistics; `values` need not be sorted. Empty: not a number."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = p * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
