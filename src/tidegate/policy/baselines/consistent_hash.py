"""consistent_hash: the session id's place on a ring of replicas, 160 points each (BLAKE2b, so alike everywhere).

Where a replica is not usable, its sessions go to the next point of another one; all others stay. A request without a
session is hashed by its own id.
"""

from __future__ import annotations

from bisect import bisect_left
from hashlib import blake2b

from tidegate.policy.base import PerRequest
from tidegate.policy.entities import Replica, Request
from tidegate.policy.ledger import Ledger
from tidegate.policy.params import CoreParams


def ring_point(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")


class ConsistentHash(PerRequest):
    name = "consistent_hash"

    def __init__(self, ledger: Ledger, params: CoreParams, seed: int) -> None:
        super().__init__(ledger, params, seed)
        self._points: list[int] = []
        self._slots: list[int] = []

    def replica_added(self, replica: Replica) -> None:
        self._rebuild()

    def replica_removed(self, replica: Replica) -> None:
        self._rebuild()

    def _rebuild(self) -> None:
        count = self.params.consistent_hash.virtual_nodes
        ring = sorted(
            (ring_point(f"{replica.url}#{i}"), replica.slot)
            for replica in self.ledger.replicas.values()
            if not replica.removed
            for i in range(count)
        )
        self._points = [point for point, _ in ring]
        self._slots = [slot for _, slot in ring]

    def route(self, request: Request) -> Replica | None:
        usable = self.candidates(request)
        if not usable:
            return None
        slots = self._slots
        start = bisect_left(self._points, ring_point(request.session.id))
        for i in range(start, start + len(slots)):
            slot = slots[i % len(slots)]
            if usable >> slot & 1:
                return self.ledger.at(slot)
        return None
