"""static_cap: sticky_least_loaded with a fixed cap of live sessions per replica: the baseline that is swept."""

from __future__ import annotations

from tidegate.policy.base import NO_REPLICA, Choice
from tidegate.policy.baselines.sticky_least_loaded import StickyLeastLoaded
from tidegate.policy.entities import Request


class StaticCap(StickyLeastLoaded):
    name = "static_cap"

    def enter(self, request: Request) -> Choice:
        usable = self.candidates(request)
        if not usable:
            return NO_REPLICA
        cap = self.params.static_cap.cap
        below = self.ledger.by_sessions.below(usable, cap)
        return self.enter_among(below) if below else Choice(None, "replica_cap", {"cap": cap})

    def session_limit(self) -> int | None:
        return self.params.static_cap.cap * self.ledger.usable.bit_count()
