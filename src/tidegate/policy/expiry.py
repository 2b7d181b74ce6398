"""Which sessions end by themselves: clients that never say that they are done, and clients that died.

By TTL: idle for longer than its class's gaps explain (estimators.IdleGaps). Before a class has taught its gaps the TTL
is long, and a small pool filled with sessions that are over would stand still for it. So also, to keep the pool at
work: while new sessions wait, a replica that runs nothing gives up its longest idle session, if that is idle for at
least the TTL's floor; one per replica and control step. An id that comes back after all is a new generation, costs one
prefill, and teaches the gap.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidegate.policy.entities import Replica, Session
from tidegate.policy.ledger import Ledger
from tidegate.policy.placement import members


def expired(ledger: Ledger) -> Iterator[Session]:
    """To be ended one by one as they are drawn: each look is at the books as they are then."""
    now_r = ledger.now_r
    for klass in ledger.classes:
        idle = klass.idle
        while idle:
            session = next(iter(idle.values()))
            if now_r - session.last_active_r < klass.gaps.ttl_s(len(idle)):
                break
            yield session
    if any(klass.queue for klass in ledger.classes):
        floor_s = ledger.params.ledger.idle_ttl_floor_s
        for slot in members(ledger.usable):
            replica = ledger.at(slot)
            if not replica.requests:
                longest = _longest_idle(replica)
                if longest is not None and now_r - longest.last_active_r >= floor_s:
                    yield longest


def _longest_idle(replica: Replica) -> Session | None:
    idle = [session for session in replica.live if not session.running and not session.waiting]
    return min(idle, key=lambda session: session.last_active_r, default=None)
