"""The working set of one replica: what its sessions hold, oldest admission first, and who waits for room.

A session's claim is its context less what it shares with others of its group or class, plus what its running requests
have generated unseen. Claims of idle sessions stand still; those of running ones grow by the replica's decode clock, so
a row of the order is (idle claim, running claim less its clock at the start, running requests), and a sum at time t is
idle + running + requests V(t).

Shared prefixes are measured, not declared: prompt tokens that the first request of a session found cached are held by
someone else. They are charged once: by a live session that found none, or, if all found some, as a copy.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable

from tidegate.policy.decode_clock import DecodeClock
from tidegate.policy.entities import Request, Session
from tidegate.policy.working_set_order import ZERO, AdmissionOrder, Row


class Claim:
    """What one session holds on its replica."""

    __slots__ = ("asked", "dormant", "growing", "key", "rank", "shared", "slot")

    def __init__(self, rank: int, slot: int, key: Hashable) -> None:
        self.rank = rank
        self.slot = slot
        self.key = key  # whom it shares a prefix with
        self.shared = 0
        self.dormant = False  # idle for so long that it claims nothing
        self.asked = 0  # the prompt that it wants to go on with
        self.growing: dict[int, int] = {}  # running request -> the clock when its tokens were last known


class Prefix:
    """One shared prefix on one replica."""

    __slots__ = ("payers", "sharers", "tokens")

    def __init__(self) -> None:
        self.payers = 0  # live sessions charged in full
        self.sharers = 0  # live sessions charged for the rest only
        self.tokens = 0

    @property
    def copy_tokens(self) -> int:
        return self.tokens if self.sharers and not self.payers else 0


class WorkingSet:
    __slots__ = ("_copies_tokens", "_prefixes", "clock", "dormant", "freed", "order", "paused")

    def __init__(self, now_s: float) -> None:
        self.order = AdmissionOrder()
        self.clock = DecodeClock(now_s)
        self.dormant = 0  # sessions
        self.freed = False  # a paused session may fit since the last look
        self.paused: list[tuple[int, int, Request]] = []  # heap by rank; may hold requests that wait no more
        self._prefixes: dict[Hashable, Prefix] = {}
        self._copies_tokens = 0

    # --- sums --------------------------------------------------------------------------------------------------
    def claimed_tokens(self, now_s: float) -> int:
        """By all of its sessions."""
        return self._sum(self.order.total, now_s)

    def claimed_up_to(self, session: Session, now_s: float) -> int:
        """By the session and those admitted before it."""
        return self._sum(self.order.older(session), now_s)

    def claims_first(self, session: Session) -> bool:
        """Nobody admitted before it claims anything."""
        return self.order.older(session) == self.order.row(session)

    def pinned_after(self, session: Session, now_s: float) -> int:
        """By running requests of sessions admitted after it."""
        total, older = self.order.total, self.order.older(session)
        return int(total[1] - older[1] + (total[2] - older[2]) * self.clock.at(now_s))

    def _sum(self, row: Row, now_s: float) -> int:
        return row[0] + row[1] + int(row[2] * self.clock.at(now_s)) + self._copies_tokens

    def claim_tokens(self, session: Session, claim: Claim, now_s: float) -> tuple[float, float]:
        """Its context, and its charge."""
        context = max(session.tokens, claim.asked) + len(claim.growing) * self.clock.at(now_s)
        context -= sum(claim.growing.values())
        return context, context - claim.shared

    # --- what happens ------------------------------------------------------------------------------------------
    def add(self, session: Session, claim: Claim) -> None:
        self._charge_prefix(claim, 1)
        self.order.add(session, claim.rank, _row(session, claim))

    def update(self, session: Session, claim: Claim) -> None:
        self.order.set(session, _row(session, claim))

    def remove(self, session: Session, claim: Claim) -> None:
        self.order.remove(session)
        self.wake(claim)
        self._charge_prefix(claim, -1)
        self.freed = True

    def doze(self, session: Session, claim: Claim) -> None:
        claim.dormant = True
        self.dormant += 1
        self.update(session, claim)
        self.freed = True

    def wake(self, claim: Claim) -> None:
        """To be updated after."""
        if claim.dormant:
            claim.dormant = False
            self.dormant -= 1

    def share(self, session: Session, claim: Claim, tokens: int) -> None:
        """Its first prompt found this much of somebody else's."""
        self._charge_prefix(claim, -1)
        claim.shared = tokens
        self._charge_prefix(claim, 1)
        self.update(session, claim)

    def _charge_prefix(self, claim: Claim, by: int) -> None:
        prefix = self._prefixes.setdefault(claim.key, Prefix())
        self._copies_tokens -= prefix.copy_tokens
        if claim.shared:
            prefix.sharers += by
            prefix.tokens = max(prefix.tokens, claim.shared)
        else:
            prefix.payers += by
        self._copies_tokens += prefix.copy_tokens
        if not prefix.payers and not prefix.sharers:
            del self._prefixes[claim.key]

    def shared_tokens(self, key: Hashable) -> int:
        """Of a newcomer's first prompt, what is here already."""
        prefix = self._prefixes.get(key)
        return 0 if prefix is None else prefix.tokens

    # --- who waits ---------------------------------------------------------------------------------------------
    def pause(self, request: Request, rank: int) -> None:
        heapq.heappush(self.paused, (rank, request.id, request))

    def longest_admitted(self) -> Request | None:
        """The paused request whose session is the oldest."""
        paused = self.paused
        while paused:
            request = paused[0][2]
            if request.held:
                return request
            heapq.heappop(paused)
        return None


def _row(session: Session, claim: Claim) -> Row:
    tokens = max(session.tokens, claim.asked) - claim.shared
    growing = claim.growing
    if claim.dormant:
        return ZERO
    return (0, tokens - sum(growing.values()), len(growing)) if growing else (tokens, 0, 0)
