"""How long an idle session's KV is worth keeping: the idle discount of working_set.

Keeping k tokens through a tool gap of g seconds costs block-time k g. Giving them up costs their prefill when the
session comes back, k / r seconds of an engine whose C tokens stand still the while: block-time k C / r. So the size
cancels, and one number decides: D = C / r, the time in which the replica computes its whole cache. Gaps are known as
a histogram per class, heavy-tailed as a rule; the patience x that costs least over it is

    argmin_x  E[min(G, x)] + D P(G > x)

which is longer than they take for short tools, at once for tools that always take longer than D, and in between where
the tail begins. (The rent-or-buy problem, Karlin et al. 1988: against an unknown distribution x = D is at most twice
the optimum, so that is what an unknown class gets, and one that has been idle for longer than any of its class that
came back: whoever does not say that a session is over leaves many of those.)
"""

from __future__ import annotations

from math import inf

from tidegate.policy.entities import ClassLedger, Replica
from tidegate.policy.estimators import IdleGaps

GAPS_KNOWN = 32  # returns seen before the histogram is believed: a tail of a tenth shows in three of them


def patience_s(gaps: IdleGaps, refill_s: float) -> float:
    """The idle time after which a session's claim is given up; `refill_s` is D."""
    total = gaps.samples
    if total < GAPS_KNOWN:
        return refill_s
    best_s, best_cost = 0.0, refill_s  # x = 0: every return is a prefill
    waited = 0.0  # E[min(G, x)], up to the upper edge of the bin
    longer = float(total)
    lower_s = 0.0
    for upper_s, count in gaps.bins():
        # gaps of this bin end in its middle on average; longer ones are waited for through all of it
        waited += (count * 0.5 + longer - count) * (upper_s - lower_s) / total
        longer -= count
        lower_s = upper_s
        if longer <= 0.0:
            return upper_s + refill_s if waited <= best_cost else best_s  # idle for longer than any gap that was seen
        cost = waited + refill_s * longer / total
        if cost < best_cost:
            best_s, best_cost = upper_s, cost
    return best_s


class Patience:
    """By class, worked out once a control step for replicas of about one refill time."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], float] = {}

    def step(self) -> None:
        self._known.clear()

    def of(self, klass: ClassLedger, replica: Replica) -> float:
        capacity = replica.capacity_tokens
        if not capacity or not replica.prefill_rate:
            return inf  # D is not known
        refill_s = capacity / replica.prefill_rate
        key = (klass.index, int(refill_s * 4.0))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = patience_s(klass.gaps, refill_s)
        return known
