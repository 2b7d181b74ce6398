"""What the admitted sessions of a replica are expected to hold later: the mean only.

As in forecast.py, at a few horizons h: a session of class b that holds k is there still with the chance that a session
of its size passes k + g, and then holds k + g. But no deviations: what comes above the mean is met by pausing the
newest sessions at their turn boundaries, not by memory kept free for it. Two corrections of k: what running requests
have generated unseen (decode_clock.py), and less the part of the prompt that other sessions share and that is
in memory once. While little is known of a class, a session is expected to grow to the prior footprint.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tidegate.policy.entities import ClassLedger
from tidegate.policy.forecast import HORIZONS, POINTS
from tidegate.policy.sizes import BINS, size_bin


class Held(NamedTuple):
    """One live session, as it is now."""

    klass: ClassLedger
    tokens: float  # its context
    charge: float  # of it, not shared with others
    expected_tokens: int | None


class ClassOutlook:
    """How sessions of a class go on, as of the last control step."""

    __slots__ = ("_klass", "_growth", "_sure")

    def __init__(self, klass: ClassLedger, horizon_s: float) -> None:
        profile = klass.profile
        self._klass = klass
        self._sure = 1.0 - profile.doubt
        self._growth = [profile.growth_per_s * part * horizon_s for part in HORIZONS]

    def add(self, means: list[float], sessions: float, tokens: float, charge: float, prior_tokens: float) -> None:
        """`tokens` and `charge` are the sums of sessions of about one size."""
        profile = self._klass.profile
        sizes, turn_tokens = profile.sizes, profile.turn_tokens
        each = tokens / sessions
        sure = self._sure
        lacking = (1.0 - sure) * max(0.0, prior_tokens - each)
        now = sizes.survival(each)
        means[0] += charge
        for m in range(1, POINTS):
            growth = self._growth[m]
            gone = growth - turn_tokens
            p = sure * (sizes.survival(each + gone) / now if gone > 0.0 else 1.0) + 1.0 - sure
            means[m] += p * (charge + sessions * (sure * growth + lacking * HORIZONS[m]))


class Outlook:
    def __init__(self, classes: list[ClassLedger]) -> None:
        """`classes` is the ledger's list, which grows."""
        self.prior_tokens = 1.0
        self._known = classes
        self._classes: list[ClassOutlook] = []
        self._means: list[list[float]] = []  # by replica slot

    def step(self) -> None:
        classes = self._known
        wanted = [klass for klass in classes if klass.demand] or classes
        horizon_s = max((klass.profile.growing_s for klass in wanted), default=0.0)
        self._classes = [ClassOutlook(klass, horizon_s) for klass in classes]

    def _of(self, index: int) -> ClassOutlook:
        while len(self._classes) <= index:  # a class that came since the last step
            self._classes.append(ClassOutlook(self._known[len(self._classes)], 0.0))
        return self._classes[index]

    def means(self, slot: int) -> list[float]:
        while len(self._means) <= slot:
            self._means.append([0.0] * POINTS)
        return self._means[slot]

    def one(self, session: Held) -> list[float]:
        """A session by itself."""
        means = [0.0] * POINTS
        tokens = max(1.0, session.tokens)
        if session.expected_tokens is None:
            self._of(session.klass.index).add(means, 1.0, tokens, session.charge, self.prior_tokens)
            return means
        growth = max(0.0, session.expected_tokens - tokens)
        return [session.charge + growth * part for part in HORIZONS]

    def add(self, slot: int, means: list[float]) -> None:
        mine = self.means(slot)
        for m, tokens in enumerate(means):
            mine[m] += tokens

    def scale(self, slot: int, by: float) -> None:
        self._means[slot] = [tokens * by for tokens in self.means(slot)]

    def rebuild(self, slot: int, sessions: Iterable[Held]) -> None:
        means = [0.0] * POINTS
        cells: dict[int, list[float]] = {}
        for held in sessions:
            if held.expected_tokens is not None:
                means = [a + b for a, b in zip(means, self.one(held), strict=True)]
                continue
            tokens = max(1.0, held.tokens)
            key = held.klass.index * BINS + size_bin(tokens)
            cell = cells.setdefault(key, [0.0, 0.0, 0.0])
            cell[0] += 1.0
            cell[1] += tokens
            cell[2] += held.charge
        for key, (count, tokens, charge) in cells.items():
            self._of(key // BINS).add(means, count, tokens, charge, self.prior_tokens)
        self.means(slot)
        self._means[slot] = means
