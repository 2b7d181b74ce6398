"""random: every request to a replica drawn at random. power_of_two: the less loaded, by requests in flight, of two."""

from __future__ import annotations

from tidegate.policy.base import PerRequest
from tidegate.policy.entities import Replica, Request
from tidegate.policy.ledger import Ledger
from tidegate.policy.params import CoreParams
from tidegate.policy.placement import members
from tidegate.policy.rng import SplitMix64


class Random(PerRequest):
    name = "random"

    def __init__(self, ledger: Ledger, params: CoreParams, seed: int) -> None:
        super().__init__(ledger, params, seed)
        self._lots = SplitMix64(seed)
        self._mask = 0
        self._slots: list[int] = []

    def slots_of(self, mask: int) -> list[int]:
        """Members of a set, remembered while the set is the same."""
        if mask != self._mask:
            self._mask = mask
            self._slots = list(members(mask))
        return self._slots

    def route(self, request: Request) -> Replica | None:
        usable = self.candidates(request)
        if not usable:
            return None
        slots = self.slots_of(usable)
        return self.ledger.at(slots[self._lots.below(len(slots))])


class PowerOfTwo(Random):
    name = "power_of_two"

    def route(self, request: Request) -> Replica | None:
        usable = self.candidates(request)
        if not usable:
            return None
        slots = self.slots_of(usable)
        first = self._lots.below(len(slots))
        if len(slots) == 1:
            return self.ledger.at(slots[0])
        second = self._lots.below(len(slots) - 1)  # another one than the first
        a, b = slots[first], slots[second + (second >= first)]
        loads = self.ledger.by_requests.loads
        return self.ledger.at(b if loads[b] < loads[a] else a)
