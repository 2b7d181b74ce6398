"""round_robin: every request to the next replica in turn. No session, no load."""

from __future__ import annotations

from tidegate.policy.base import PerRequest
from tidegate.policy.entities import Replica, Request


class RoundRobin(PerRequest):
    name = "round_robin"

    def route(self, request: Request) -> Replica | None:
        usable = self.candidates(request)
        return self.ledger.at(self.turn.pick(usable)) if usable else None
