"""sticky_least_loaded: a new session to the replica with the fewest live sessions, ties rotated; it stays there.

Fewest live sessions, then fewest requests in flight, so that requests without a session spread too.
"""

from __future__ import annotations

from tidegate.policy.base import NO_REPLICA, Choice, Sticky
from tidegate.policy.entities import Request


class StickyLeastLoaded(Sticky):
    name = "sticky_least_loaded"

    def enter(self, request: Request) -> Choice:
        usable = self.candidates(request)
        return self.enter_among(usable) if usable else NO_REPLICA

    def enter_among(self, usable: int) -> Choice:
        ledger = self.ledger
        fewest = ledger.by_requests.least(ledger.by_sessions.least(usable))
        slot = self.turn.pick(fewest)
        return Choice(ledger.at(slot), "admitted", {"sessions": ledger.by_sessions.loads[slot]})
