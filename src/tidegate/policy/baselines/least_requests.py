"""least_requests: every request to the replica with the fewest in flight, ties rotated."""

from __future__ import annotations

from tidegate.policy.base import PerRequest
from tidegate.policy.entities import Replica, Request


class LeastRequests(PerRequest):
    name = "least_requests"

    def route(self, request: Request) -> Replica | None:
        usable = self.candidates(request)
        return self.ledger.at(self.turn.pick(self.ledger.by_requests.least(usable))) if usable else None
