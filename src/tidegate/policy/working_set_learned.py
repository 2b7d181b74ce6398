"""What working_set learns of classes beyond their sizes: the prompt that all share, and what a session claims."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Final

from tidegate.policy.control import prior_footprint_tokens
from tidegate.policy.entities import ClassLedger
from tidegate.policy.ledger import Ledger
from tidegate.policy.params import CoreParams

# First prompts of a class remembered for what they found cached: the least of them is what all share.
SHARED_SAMPLES: Final = 8
SHARES_KEPT: Final = 1.0 - 1.0 / 32.0  # of what first prompts share, on average: the last fifty sessions or so


class LearnedClaims:
    __slots__ = ("_found", "_ledger", "_params", "_shared", "mean_tokens")

    def __init__(self, ledger: Ledger, params: CoreParams) -> None:
        self._ledger = ledger
        self._params = params
        self._found: dict[Hashable, deque[int]] = {}  # by class: cached tokens of first prompts
        self._shared: dict[int, float] = {}  # by class: tokens that others hold of a session, on average
        self.mean_tokens = 1.0  # of an unfinished session; 1: nothing known

    def shared_tokens(self, key: Hashable, cached: int) -> int:
        """One more first prompt of a class found this much cached: what all of them share."""
        found = self._found.setdefault(key, deque(maxlen=SHARED_SAMPLES))
        found.append(cached)
        return min(found)

    def shares(self, klass: ClassLedger, tokens: int) -> None:
        """One more session of the class, and what others hold of it: 0, if it is the one that holds it for others."""
        self._shared[klass.index] = self._shared.get(klass.index, 0.0) * SHARES_KEPT + tokens * (1.0 - SHARES_KEPT)

    def step(self) -> None:
        """The mean claim: kbar less what is shared, averaged over the unfinished sessions."""
        doubted = prior_footprint_tokens(self._ledger)  # what kbar was blended with, in doubt
        prior_tokens = self.prior_tokens()
        sessions = tokens = 0.0
        for klass in self._ledger.classes:
            if klass.demand:
                doubt = klass.profile.doubt
                observed = klass.profile.footprint_tokens - doubt * doubted
                kbar = observed + doubt * prior_tokens
                sessions += klass.demand
                tokens += klass.demand * max(1.0, kbar - self._shared.get(klass.index, 0.0))
        self.mean_tokens = tokens / sessions if sessions else 1.0

    def prior_tokens(self) -> float:
        """Of a class of which nothing is known."""
        replicas = self._ledger.replicas.values()
        known = [r.capacity_tokens for r in replicas if r.capacity_tokens and not r.removed]
        most = float(self._params.estimators.footprint_prior_tokens)
        return min(most, self._params.working_set.prior_fraction * sum(known) / len(known)) if known else most
