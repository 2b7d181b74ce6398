"""How large the sessions of a class become: survival as a function of footprint, not of time.

A session's footprint is its own clock: when the pool slows down, sessions live longer and grow more slowly, but end at
the same sizes. So the forecast of occupancy (forecast.py) asks for the chance that a session which holds k will pass
k + g, by the product-limit (Kaplan-Meier) estimator over bins of footprint:

    passed_j   sessions that grew beyond bin j, running ones included (they are censored where they are now)
    ended_j    sessions that ended in it
    S          product of passed_j / (passed_j + ended_j)

Sessions enter at the size of their first prompt (left truncation: they count for no bin below). Counts fade with the
class's window. Where nobody has been, a bin of 10 % growth is passed with `UNSEEN_PASS`, a heavy tail.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise, repeat
from math import inf
from operator import mul
from typing import Final

FIRST_EDGE_TOKENS: Final = 64
EDGE_RATIO: Final = 1.1
BINS: Final = 140  # up to 33M tokens; the last bin is open
EDGES_TOKENS: Final = (0.0, *(FIRST_EDGE_TOKENS * EDGE_RATIO**j for j in range(BINS - 1)), inf)
WIDTHS_TOKENS: Final = tuple(high - low for low, high in pairwise(EDGES_TOKENS))
UNSEEN_PASS: Final = 0.9
UNSEEN_WEIGHT: Final = 0.5  # sessions: outweighed by the first one seen
UNSEEN_PASSED: Final = UNSEEN_WEIGHT * UNSEEN_PASS
LEAST_SURVIVAL: Final = 1e-12


def size_bin(tokens: float) -> int:
    return bisect_right(EDGES_TOKENS, tokens) - 1


def _products(first: float, factors: Iterable[float]) -> list[float]:
    products = list(accumulate(factors, mul, initial=first))
    if products[-1] < LEAST_SURVIVAL:
        return [max(LEAST_SURVIVAL, product) for product in products]
    return products


class Sizes:
    __slots__ = ("_survival", "ended", "passed")

    def __init__(self) -> None:
        self.passed: list[float] = []  # up to the largest bin that anybody reached
        self.ended: list[float] = []
        self._survival = [1.0]  # to the lower edge of each bin, as far as it was asked for

    def _reach(self, bins: int) -> None:
        missing = bins - len(self.passed)
        if missing > 0:
            self.passed += [0.0] * missing
            self.ended += [0.0] * missing

    def grew(self, old_bin: int, new_bin: int) -> None:
        self._reach(new_bin)
        for j in range(old_bin, new_bin):
            self.passed[j] += 1.0

    def end(self, at_bin: int) -> None:
        self._reach(at_bin + 1)
        self.ended[at_bin] += 1.0

    def fade(self, keep: float) -> None:
        self.passed = [count * keep for count in self.passed]
        self.ended = [count * keep for count in self.ended]

    def solve(self) -> None:
        passing = [
            (passed + UNSEEN_PASSED) / (passed + ended + UNSEEN_WEIGHT)
            for passed, ended in zip(self.passed, self.ended, strict=True)
        ]
        self._survival = _products(1.0, passing)

    def _solved(self, bins: int) -> list[float]:
        """Survival to the lower edges of so many bins at least."""
        survival = self._survival
        missing = bins - len(survival)
        if missing > 0:
            survival[-1:] = _products(survival[-1], repeat(UNSEEN_PASS, missing))
        return survival

    def survival(self, tokens: float) -> float:
        """Up to a constant factor, the chance to become this large: only ratios mean something."""
        j = bisect_right(EDGES_TOKENS, tokens) - 1
        survival = self._solved(j + 2)
        low = survival[j]
        if j + 1 >= BINS:
            return low
        edge, upper = EDGES_TOKENS[j], EDGES_TOKENS[j + 1]
        return low + (survival[j + 1] - low) * (tokens - edge) / (upper - edge)

    def survivals(self, tokens: float, further: Sequence[float]) -> list[float]:
        """`survival` of this size, and of what it is after each further growth; these ascend."""
        edges = EDGES_TOKENS
        survival = self._solved(bisect_right(edges, tokens + further[-1]) + 1)
        found = []
        j = 0
        for growth in (0.0, *further):
            size = tokens + growth
            j = bisect_right(edges, size, j) - 1
            low = survival[j]
            if j + 1 < BINS:
                edge = edges[j]
                low += (survival[j + 1] - low) * (size - edge) / (edges[j + 1] - edge)
            found.append(low)
        return found

    def growth_left(self, tokens: float) -> float:
        """Expected further growth of a session that holds this much."""
        survival = self._solved(BINS)
        low = self.survival(tokens)
        least = 1e-3 * low
        start = low
        left, j = 0.0, size_bin(tokens)
        width = EDGES_TOKENS[j + 1] - tokens
        while j + 1 < BINS and low > least:
            high = survival[j + 1]
            left += (low + high) / 2.0 * width
            low = high
            j += 1
            width = WIDTHS_TOKENS[j]
        return left / start
