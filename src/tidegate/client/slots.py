"""How many sessions may be in flight, and of which class the next one is. No tasks, no clock: a state machine.

    total       never more than `Limits.sessions` in flight
    mixture     of the classes with a share rho that somebody waits for, the one that is owed most goes next:
                rho_b (n + 1) - started_b, n sessions started of them all. So what was started is never more than about
                a session a class away from the mixture
    by class    `Limits.classes` shape what is in flight: a class at its limit waits while others are below theirs,
                until it is owed a whole session. Limits that are wrong cost a session of mixture, not the mixture.
                `hard` limits, those that the user wrote down, are never passed
    no rollouts a class for which nobody waits is owed no more than its limit: it does not take the pool when it is
                back

Without a mixture only the total (and hard limits) count, first come first served. A class without a share is outside
the contract: it takes its turn by the time it has waited, and counts against the total.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import TypeAlias

Label: TypeAlias = str | None  # of a class; None: unlabelled

WHOLE_SESSION = 1.0 - 1e-9  # owed; shares are floats


@dataclass(frozen=True)
class Limits:
    """Sessions in flight."""

    sessions: int
    classes: Mapping[Label, int] = field(default_factory=dict)
    hard: bool = False


class Slots:
    def __init__(self, limits: Limits, mixture: Mapping[str, float] | None = None) -> None:
        self.limits = limits
        self.in_flight: dict[Label, int] = {}
        self.shares: dict[str, float] = {}
        self._counted: dict[str, float] = {}  # started under this mixture
        self._picked: dict[str, int] = {}  # told to somebody, not yet started
        self._retired: frozenset[str] = frozenset()
        if mixture:
            self.set_mixture(mixture)

    @property
    def total(self) -> int:
        return sum(self.in_flight.values())

    # --- the mixture -------------------------------------------------------------------------------------------
    def set_mixture(self, mixture: Mapping[str, float]) -> None:
        """A new contract: it counts from here."""
        self.shares = scaled(mixture)
        self._counted = dict.fromkeys(self.shares, 0.0)
        self._picked = {}

    def retire(self, classes: Collection[str]) -> None:
        """These have no more rollouts: the others share their part."""
        self._retired = frozenset(classes)

    def owed(self, workload: str) -> float:
        """Sessions that the mixture is short of."""
        return self._owed().get(workload, 0.0)

    def _owed(self) -> dict[str, float]:
        active = {name: share for name, share in self.shares.items() if name not in self._retired}
        counted = {name: self._counted[name] + self._picked.get(name, 0) for name in active}
        scale = (sum(counted.values()) + 1.0) / sum(active.values()) if active else 0.0
        return {name: share * scale - counted[name] for name, share in active.items()}

    def pick(self) -> str:
        """The class that is owed most; it counts as started, and the next `start` of it counts no second time."""
        owed = self._owed()
        if not owed:
            raise ValueError("no mixture was given: there is no next class")
        workload = max(owed, key=owed.__getitem__)
        self._picked[workload] = self._picked.get(workload, 0) + 1
        return workload

    # --- who may start -----------------------------------------------------------------------------------------
    def room(self, workload: Label) -> bool:
        """Whether a session of the class may start now, if it is the only one that wants to."""
        if self.total >= self.limits.sessions:
            return False
        limit = self.limits.classes.get(workload)
        if limit is None or self.in_flight.get(workload, 0) < limit:
            return True
        if self.limits.hard:
            return False
        if not isinstance(workload, str) or workload not in self.shares or self._retired:
            return True
        return self.owed(workload) >= WHOLE_SESSION

    def next_of(self, wanted: Collection[str]) -> str | None:
        """Of classes with a share, the one to start now."""
        owed = self._owed()
        fitting = [workload for workload in wanted if self.room(workload)]
        return max(fitting, key=lambda workload: owed.get(workload, 0.0), default=None)

    # --- what happens ------------------------------------------------------------------------------------------
    def start(self, workload: Label) -> None:
        self.in_flight[workload] = self.in_flight.get(workload, 0) + 1
        if isinstance(workload, str) and workload in self._counted:
            self._counted[workload] += 1.0
            if self._picked.get(workload):
                self._picked[workload] -= 1
            self._forgive()

    def end(self, workload: Label) -> None:
        self.in_flight[workload] -= 1

    def take_back(self, workload: Label) -> None:
        """It never started after all."""
        self.end(workload)
        if isinstance(workload, str) and workload in self._counted:
            self._counted[workload] -= 1.0

    def _forgive(self) -> None:
        """More than a class waiting for its turn can be owed, and than may be in flight of it."""
        least = len(self.shares) + 1.0
        for workload, owed in self._owed().items():
            excess = owed - max(least, float(self.limits.classes.get(workload, self.limits.sessions)))
            if excess > 0.0:  # counting one more also raises what all are owed, by its share
                self._counted[workload] += excess / max(WHOLE_SESSION - self.shares[workload], 1e-9)


def scaled(mixture: Mapping[str, float]) -> dict[str, float]:
    """Shares that sum to 1, of the classes that have one. ValueError: a share that is none, or none above 0."""
    for workload, share in mixture.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not isfinite(share) or share < 0:
            raise ValueError(f"the share of {workload!r} is not a number from 0 on: {share!r}")
    total = sum(mixture.values())
    if total <= 0:
        raise ValueError("a mixture needs a share above 0")
    return {workload: share / total for workload, share in mixture.items() if share > 0}
