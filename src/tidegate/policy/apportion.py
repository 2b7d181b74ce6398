"""How a replica's protected capacity is divided among workload classes (Eqs 8-13).

    demand weight    S_b = N_b kbar_b (misa)      R_b = N_b kbar_b That_b (misa_t)
    share            M_b = C R_b / sum R          cap K_b = M_b / kbar_b sessions

`paper_caps` rounds as the paper does, max(1, floor(K_b)), which can exceed C. `Apportioner` keeps
sum_b K_b kbar_b <= C on every replica with integers:

- no class gets more than its demand while another wants more; what is left over all is given out in proportion, as
  room for arrivals (work-conserving);
- the fraction lost by rounding is carried to the next replica, so that the pool's sum follows the pool's share;
- a class that is served below its share while it waits earns a deficit over time, and a class with a whole session in
  carry and deficit is rounded first, before the others take the memory. So a class whose session is larger than its
  share of any replica has its turn, and keeps the slot until it is filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

CARRY_LIMIT: Final = 8.0  # sessions; more of one class in a row would starve the others of a replica


def paper_caps(capacity: float, weights: Sequence[float], footprints: Sequence[float]) -> list[int]:
    """Eqs (10) and (13); classes without demand have none."""
    total = sum(weights)
    return [
        max(1, int(capacity * weight / total / footprint)) if weight > 0.0 else 0
        for weight, footprint in zip(weights, footprints, strict=True)
    ]


def fractional_caps(
    capacity: float, weights: Sequence[float], footprints: Sequence[float], demand: Sequence[float]
) -> list[float]:
    """Shares in sessions, filled up to the demand first, the rest in proportion to the weights. They sum to the
    capacity when there is any demand."""
    caps = [0.0] * len(weights)
    hungry = [b for b, weight in enumerate(weights) if weight > 0.0]
    left = capacity
    while hungry:
        total = sum(weights[b] for b in hungry)
        sated = [b for b in hungry if left * weights[b] / total >= demand[b] * footprints[b]]
        if not sated:
            for b in hungry:
                caps[b] = left * weights[b] / total / footprints[b]
            return caps
        for b in sated:
            caps[b] = demand[b]
            left -= demand[b] * footprints[b]
        hungry = [b for b in hungry if b not in sated]
    total = sum(weights)
    if total > 0.0 and left > 0.0:
        for b, weight in enumerate(weights):
            if weight > 0.0:
                caps[b] += left * weight / total / footprints[b]
    return caps


class Apportioner:
    """Rounds fractional caps, replica after replica; the carry lasts over one pass, the deficits over time."""

    def __init__(self) -> None:
        self.deficit: list[float] = []  # sessions, by class; at most about one, so that a long wait is no flood
        self.carry: list[float] = []

    def _grow(self, classes: int) -> None:
        missing = classes - len(self.deficit)
        if missing > 0:
            self.deficit += [0.0] * missing
            self.carry += [0.0] * missing

    def serve(self, b: int, entitled: float, live: int, waiting: bool, turns: float) -> None:
        """`turns` is the time passed, in units of the time after which one session of deficit is a slot."""
        self._grow(b + 1)
        deficit = self.deficit[b] + (entitled - live) * turns if waiting else 0.0
        self.deficit[b] = min(max(deficit, -1.0), 1.0)

    def deficit_of(self, b: int) -> float:
        return self.deficit[b] if b < len(self.deficit) else 0.0

    def start_pass(self) -> None:
        self.carry = list(self.deficit)

    def round(self, capacity: float, caps: Sequence[float], footprints: Sequence[float]) -> list[int]:
        """Integers with sum K_b footprint_b <= capacity; what is over or under goes to the carry."""
        self._grow(len(caps))
        carry = self.carry
        whole = [0] * len(caps)
        wanting = [b for b, cap in enumerate(caps) if cap > 0.0]
        left = capacity
        for b in sorted(wanting, key=lambda b: (-carry[b], b)):
            whole[b] = max(0, min(int(caps[b] + max(0.0, carry[b])), int(left / footprints[b])))
            left -= whole[b] * footprints[b]
        for most in (1, None):  # one more session each, then whatever still fits
            for b in sorted(wanting, key=lambda b: (whole[b] - caps[b] - carry[b], b)):
                fitting = int(left / footprints[b])
                more = fitting if most is None else min(most, fitting)
                whole[b] += more
                left -= more * footprints[b]
        for b in wanting:
            carry[b] = min(max(carry[b] + caps[b] - whole[b], -CARRY_LIMIT), CARRY_LIMIT)
        return whole
