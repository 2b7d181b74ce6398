"""aimd: CONCUR's congestion window over active agents (arXiv 2601.22705).

An agent is a session, active from its entry until it ends or is paused, tool calls included. Each replica has a window
W of active sessions; each `interval_s`, with U the KV usage and H the prefix hit rate of the replica:

    U < 0.2                  W += 2          the cache is idle
    U > 0.5 and H < 0.2      W *= 0.5        it is full and what it holds is not used again: thrashing
    else                     W stays

A session of a replica with more than W active ones is paused when it next reaches a turn boundary (its request ends, or
its next one arrives); a generation is never stopped. Paused sessions go on in the order in which their requests came,
all of them before a new session enters.

U is the engine's gauge, as the authors read it (kv_usage.py): 0.2 and 0.5 of blocks that RUNNING requests hold. Of the
ledger's occupancy, which counts sessions in tool calls too, 0.5 would be half of a safe load. H is cached over prompt
tokens of the last seconds; while either is unknown W stays.

Left open by the paper and chosen here: one window per replica, because each has its own cache, with sessions pinned to
the replica of fewest live ones; the first W and the interval; W grows only while it binds, or it would mean nothing
after a quiet hour; W >= 1; a session paused for `pause_limit_s` goes on; one that must leave a lost replica goes on at
once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tidegate.policy.base import NO_REPLICA, Choice, Sticky
from tidegate.policy.baselines.kv_usage import used_fraction
from tidegate.policy.entities import LIVE, Replica, Request, Session
from tidegate.policy.ledger import Ledger
from tidegate.policy.params import CoreParams
from tidegate.policy.placement import members
from tidegate.types import ReplicaSample, RequestEnded, RequestId


class Window:
    """Of one replica."""

    __slots__ = ("active", "paused", "sample", "size")

    def __init__(self, size: float) -> None:
        self.size = size
        self.active = 0
        self.paused: OrderedDict[RequestId, Request] = OrderedDict()
        self.sample: ReplicaSample | None = None


class Aimd(Sticky):
    name = "aimd"

    def __init__(self, ledger: Ledger, params: CoreParams, seed: int) -> None:
        super().__init__(ledger, params, seed)
        self.own = params.aimd
        self.windows: list[Window] = []  # by replica slot
        self._active_on: dict[Session, int] = {}  # active sessions, by slot
        self._open = 0  # slots with fewer live sessions, paused ones included, than their window
        self._freed = 0  # slots where a paused session may now fit
        self._due_s = 0.0

    def enter(self, request: Request) -> Choice:
        usable = self.candidates(request)
        if not usable:
            return NO_REPLICA
        ledger = self.ledger
        room = usable & self._open
        if not room:
            return Choice(None, "replica_cap", {"window": sum(int(self.windows[s].size) for s in members(usable))})
        slot = self.turn.pick(ledger.by_requests.least(ledger.by_sessions.least(room)))
        return Choice(ledger.at(slot), "admitted", {"window": self.windows[slot].size})

    def proceed(self, request: Request) -> Replica | str:
        session = request.session
        replica = session.replica
        if session.state != LIVE or replica is None or not replica.usable or request.failed & replica.bit:
            return super().proceed(request)
        window = self.windows[replica.slot]
        if session.running or self._goes_on(request, window):
            return replica
        window.paused.setdefault(request.id, request)
        return "paused"

    def _goes_on(self, request: Request, window: Window) -> bool:
        session = request.session
        if session in self._active_on:
            if window.active <= int(window.size):
                return True
            self._leave(session)
        elif self.ledger.now_s - request.arrived_s >= self.own.pause_limit_s:
            return True
        if window.active >= int(window.size):
            return False
        first = self._first_paused(window)
        return first is None or first.session is session

    def _first_paused(self, window: Window) -> Request | None:
        while window.paused:
            request = next(iter(window.paused.values()))
            if request.held and self.ledger.requests.get(request.id) is request and request.session.state == LIVE:
                return request
            del window.paused[request.id]
        return None

    def resumable(self) -> Iterator[Request]:
        slots, self._freed = self._freed, 0
        for slot in members(slots):
            while (request := self._first_paused(self.windows[slot])) is not None:
                yield request
                if request.held:
                    break

    # --- what happened -----------------------------------------------------------------------------------------
    def placed(self, request: Request, replica: Replica) -> None:
        session = request.session
        self.windows[replica.slot].paused.pop(request.id, None)
        if session.state != LIVE:
            return
        old = self._active_on.get(session)
        if old != replica.slot:
            if old is not None:
                self._leave(session)
                self._look(old)
            self._active_on[session] = replica.slot
            self.windows[replica.slot].active += 1
        self._look(replica.slot)

    def answered(self, request: Request, event: RequestEnded) -> None:
        session = request.session
        slot = self._active_on.get(session)
        if slot is not None and not session.running and self.windows[slot].active > int(self.windows[slot].size):
            self._leave(session)

    def ended(self, session: Session) -> None:
        if session in self._active_on:
            self._leave(session)
        if session.replica is not None:
            self._look(session.replica.slot)

    def _leave(self, session: Session) -> None:
        slot = self._active_on.pop(session)
        self.windows[slot].active -= 1
        self._freed |= 1 << slot

    def _look(self, slot: int) -> None:
        """Whether there is room for a new session."""
        bit = 1 << slot
        has_room = self.ledger.by_sessions.loads[slot] < int(self.windows[slot].size)
        self._open = self._open | bit if has_room else self._open & ~bit

    def replica_added(self, replica: Replica) -> None:
        while len(self.windows) <= replica.slot:
            self.windows.append(Window(self.own.initial_window))
        window = self.windows[replica.slot]
        window.size, window.sample = self.own.initial_window, None
        self._freed |= replica.bit
        self._look(replica.slot)

    def sampled(self, replica: Replica, sample: ReplicaSample) -> None:
        self.windows[replica.slot].sample = sample

    # --- the control step --------------------------------------------------------------------------------------
    def tick(self) -> None:
        now_s = self.ledger.now_s
        if now_s < self._due_s or self.ledger.paused:
            return
        self._due_s = now_s + self.own.interval_s
        for slot in members(self.ledger.usable):
            self._steer(self.ledger.at(slot))
            self._look(slot)
            self._freed |= 1 << slot

    def _steer(self, replica: Replica) -> None:
        own = self.own
        window = self.windows[replica.slot]
        used = used_fraction(self.ledger, replica, window.sample)
        hit_rate = replica.signals.hit_rate
        if used is None:
            return
        if used < own.usage_low:
            if len(replica.live) >= int(window.size):
                window.size += own.increase
        elif used > own.usage_high and hit_rate is not None and hit_rate < own.hit_rate_low:
            window.size = max(1.0, window.size * own.decrease)

    def session_limit(self) -> int | None:
        return sum(int(self.windows[slot].size) for slot in members(self.ledger.usable))

    # --- views -------------------------------------------------------------------------------------------------
    def estimates(self) -> dict[str, object]:
        return {self.ledger.at(slot).url: self._replica_estimates(slot) for slot in members(self.ledger.usable)}

    def _replica_estimates(self, slot: int) -> dict[str, object]:
        replica, window = self.ledger.at(slot), self.windows[slot]
        return {
            "window": window.size,
            "active": window.active,
            "paused": len(replica.live) - window.active,
            "kv_used_fraction": used_fraction(self.ledger, replica, window.sample),
            "hit_rate": replica.signals.hit_rate,
        }
