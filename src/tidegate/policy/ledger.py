"""The ledger: sessions, requests, replicas, classes and groups. The one mutable state of the decision core.

It does the books and decides nothing. Two clocks: `now_s`, the shell's; and `now_r`, the residency clock, which stands
still while the pool is paused, so that a weight update ages nobody. Time in our own queue is no residency either: a
session's residency starts with its admission.

Life of a session: OPENED (announced) -> HELD (its requests wait) -> LIVE (admitted and pinned) -> ENDED. Footprint =
prompt + completion of its last answered request, plus what running requests add. Rules that past routers broke:
- a counter is only changed by the request object that it was raised for, once: no double release, no negative load;
- a replica that leaves keeps its load and its sessions until they end, and gets both back when it is listed again;
- an expiry is checked before activity renews it; a session with a request running or waiting never expires;
- the table of ids is bounded and evicts idle sessions only; sessions of one request are not in it.
"""

from __future__ import annotations

from collections import OrderedDict

from tidegate.policy.check import check
from tidegate.policy.entities import ENDED, HELD, LIVE, OPENED, ClassLedger, Group, Replica, Request, Session
from tidegate.policy.params import CoreParams
from tidegate.policy.replica_books import ReplicaBooks
from tidegate.types import (
    UNLABELLED,
    Ended,
    ReplicaResidency,
    RequestArrived,
    RequestEnded,
    RequestId,
    SessionId,
    WorkloadClass,
)

OVERFLOW_CLASS: WorkloadClass = "other"


class Ledger(ReplicaBooks):
    def __init__(self, params: CoreParams) -> None:
        super().__init__(params)
        self.epoch = 0
        self.mixture: dict[WorkloadClass, float] = {}  # the trainer's target; empty: learned from arrivals
        self.next_step = -1  # class that the last control step ended with
        self.sessions: dict[SessionId, Session] = {}
        self.requests: dict[RequestId, Request] = {}
        self.draining: dict[Session, None] = {}  # ended, with requests left
        self.groups: dict[str, Group] = {}
        self._class_by_name: dict[WorkloadClass, ClassLedger] = {}
        self._remembered: OrderedDict[SessionId, tuple[int, float | None]] = OrderedDict()  # (generation, expired_r)

    def check(self) -> None:
        """Recompute everything naively; AssertionError if any count is off."""
        check(self)

    # --- classes and groups ------------------------------------------------------------------------------------
    def klass(self, label: WorkloadClass | None) -> ClassLedger:
        name = UNLABELLED if label is None else label
        klass = self._class_by_name.get(name)
        if klass is None:
            if len(self.classes) >= self.params.ledger.max_classes - 1 and name != OVERFLOW_CLASS:
                return self.klass(OVERFLOW_CLASS)
            klass = ClassLedger(name, len(self.classes), self.params)
            self.classes.append(klass)
            self._class_by_name[name] = klass
            for replica in self.replicas.values():
                replica.class_live.append(0)
                replica.class_tokens.append(0)
        return klass

    def _join_group(self, name: str | None) -> Group | None:
        if name is None:
            return None
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = Group(name)
        group.sessions += 1
        return group

    # --- sessions ----------------------------------------------------------------------------------------------
    def open(self, id: SessionId, label: WorkloadClass | None, group: str | None, *, listed: bool = True) -> Session:
        klass = self.klass(label)
        generation = 0
        if listed and (past := self._remembered.pop(id, None)) is not None:
            generation = past[0] + 1
            if past[1] is not None:  # it had not ended after all
                klass.gaps.record(self.now_r - past[1])
        session = Session(id, klass, self._join_group(group), generation, self.now_r)
        klass.opened += 1
        klass.started += 1
        klass.recent += 1.0
        if listed:
            self.sessions[id] = session
            klass.idle[id] = session
        else:
            session.listed = False
            session.one_shot = True
        return session

    def relabel(self, session: Session, label: WorkloadClass) -> None:
        """A session announced without a class learns it from its first request."""
        klass = self.klass(label)
        old = session.klass
        if session.state != OPENED or klass is old:
            return
        old.opened -= 1
        old.started -= 1
        old.recent = max(0.0, old.recent - 1.0)
        klass.opened += 1
        klass.started += 1
        klass.recent += 1.0
        if old.idle.pop(session.id, None) is not None:
            klass.idle[session.id] = session
        session.klass = klass

    def expired(self, session: Session) -> bool:
        if session.running or session.waiting or session.state == ENDED:
            return False
        klass = session.klass
        return self.now_r - session.last_active_r >= klass.gaps.ttl_s(len(klass.idle))

    def longest_idle(self) -> Session | None:
        best: Session | None = None
        for klass in self.classes:
            if klass.idle:
                head = next(iter(klass.idle.values()))
                if best is None or head.last_active_r < best.last_active_r:
                    best = head
        return best

    def end_session(self, session: Session, cause: str) -> Ended | None:
        """Idempotent. Requests that it left running stay counted until their own end, its footprint with them."""
        state = session.state
        if state == ENDED:
            return None
        klass = session.klass
        replica = session.replica
        if state == LIVE:
            assert replica is not None
            klass.live -= 1
            klass.tokens -= session.tokens
            klass.profile.leave(session, self.now_r)
            self._unpin(session, replica)
        elif state == HELD:
            klass.held -= 1
            klass.queue.pop(session, None)
        else:
            klass.opened -= 1
        session.state = ENDED
        klass.ended += 1
        completed = self._completed(session, state, cause)
        klass.completed += completed
        klass.gaps.expired += cause == "expired"
        if session.listed:
            klass.idle.pop(session.id, None)
            del self.sessions[session.id]
            self._remember(session, cause)
        if session.group is not None:
            session.group.sessions -= 1
            if not session.group.sessions:
                del self.groups[session.group.name]
        if session.running or session.waiting:
            self.draining[session] = None
        elif state == LIVE:
            self._release_tokens(session)
        return Ended(
            session=session.id,
            replica=None if replica is None else replica.url,
            workload=klass.name,
            cause=cause,
            completed=completed,
        )

    @staticmethod
    def _completed(session: Session, state: int, cause: str) -> bool:
        """A finish counts if the session was ever admitted; an end that nobody announced, if its last request
        succeeded."""
        return state == LIVE and (cause == "finished" or session.last_ok)

    def _remember(self, session: Session, cause: str) -> None:
        limit = self.params.ledger.max_remembered
        self._remembered[session.id] = (session.generation, session.last_active_r if cause == "expired" else None)
        if len(self._remembered) > limit:
            self._remembered.popitem(last=False)

    def _pin(self, session: Session, replica: Replica) -> None:
        session.replica = replica
        replica.live[session] = None
        replica.tokens += session.tokens
        replica.class_live[session.klass.index] += 1
        replica.class_tokens[session.klass.index] += session.tokens
        self.by_sessions.shift(replica.slot, 1)
        if session.group is not None:
            session.group.on[replica.slot] = session.group.on.get(replica.slot, 0) + 1

    def _unpin(self, session: Session, replica: Replica) -> None:
        """All but its tokens, which may outlive the pin."""
        del replica.live[session]
        replica.class_live[session.klass.index] -= 1
        replica.class_tokens[session.klass.index] -= session.tokens
        self.by_sessions.shift(replica.slot, -1)
        if session.group is not None:
            left = session.group.on[replica.slot] - 1
            if left:
                session.group.on[replica.slot] = left
            else:
                del session.group.on[replica.slot]

    def _release_tokens(self, session: Session) -> None:
        replica = session.replica
        if replica is not None:
            replica.tokens -= session.tokens
            self._forget_if_empty(replica)

    def _set_tokens(self, session: Session, tokens: int) -> None:
        delta = tokens - session.tokens
        if not delta:
            return
        session.tokens = tokens
        replica = session.replica
        if replica is not None:
            replica.tokens += delta
        if session.state == LIVE:
            klass = session.klass
            klass.tokens += delta
            klass.profile.grow(session, delta, self.now_r)
            assert replica is not None
            replica.class_tokens[klass.index] += delta

    def reside(self, replica: Replica, residency: ReplicaResidency) -> None:
        """How much of the footprints of its idle live sessions is still there. Running ones are left out: theirs is
        pinned, and still growing."""
        replica.resident_tokens = residency.resident_tokens
        footprint = resident = 0
        for session_id, tokens in residency.session_tokens.items():
            session = self.sessions.get(session_id)
            if session is not None and session.replica is replica and not session.running and session.resident_tokens:
                footprint += session.base_tokens
                resident += min(tokens, session.base_tokens)
        replica.signals.resident_share = resident / footprint if footprint else None

    # --- requests ----------------------------------------------------------------------------------------------
    def arrive(self, event: RequestArrived, session: Session) -> Request:
        if event.request in self.requests:
            raise ValueError(f"request {event.request} arrived twice")
        prompt_tokens = event.prompt_tokens if event.prompt_tokens <= self.largest_tokens else 0
        request = Request(event.request, session, prompt_tokens, event.max_tokens, event.prefix, self.now_s)
        self.requests[event.request] = request
        if not session.running and not session.waiting and session.listed:
            klass = session.klass
            klass.idle.pop(session.id, None)
            if session.turns:
                klass.gaps.record(self.now_r - session.last_active_r)
        group = session.group
        if group is not None and not session.turns:
            group.prefix_tokens = min(group.prefix_tokens or prompt_tokens, prompt_tokens)
        session.turns += 1
        return request

    def hold(self, request: Request) -> None:
        """It waits: for the admission of its session, or, with its session admitted, to go on."""
        session = request.session
        request.held = True
        session.waiting += 1
        if session.state == OPENED:
            session.state = HELD
            session.klass.opened -= 1
            session.klass.held += 1
            session.klass.queue[session] = None

    def unhold(self, session: Session) -> None:
        """Its waiting requests left; announced sessions stay open."""
        session.state = OPENED
        session.klass.held -= 1
        session.klass.opened += 1
        session.klass.queue.pop(session, None)

    def place(self, request: Request, replica: Replica) -> None:
        session = request.session
        if request.held:
            request.held = False
            session.waiting -= 1
        self.charge_prefill(request, session, replica)
        extra = max(0, request.prompt_tokens + request.completion_tokens - session.base_tokens)
        request.extra_tokens = extra
        state = session.state
        if state == LIVE:
            if session.replica is not replica:
                self._move(session, replica)
            session.klass.profile.turn(extra)
            self._set_tokens(session, session.tokens + extra)
        elif state == ENDED:
            self._set_tokens(session, session.tokens + extra)
        else:
            session.tokens += extra
            self._admit(session, replica)
        session.cache_epoch = replica.cache_epoch
        session.running += 1
        session.heard_r = self.now_r
        replica.requests += 1
        self.by_requests.shift(replica.slot, 1)
        request.replica = replica

    def _admit(self, session: Session, replica: Replica) -> None:
        klass = session.klass
        if session.state == HELD:
            klass.held -= 1
            klass.queue.pop(session, None)
        else:
            klass.opened -= 1
        session.state = LIVE
        session.admitted_r = klass.entered_r = self.now_r
        klass.live += 1
        klass.tokens += session.tokens
        klass.profile.enter(session, self.now_r)
        self._pin(session, replica)

    def _move(self, session: Session, replica: Replica) -> None:
        old = session.replica
        assert old is not None
        self._unpin(session, old)
        old.tokens -= session.tokens
        self._pin(session, replica)
        session.cache_epoch = -1
        self._forget_if_empty(old)

    def progress(self, request: Request, completion_tokens: int) -> None:
        replica = request.replica
        if replica is None or completion_tokens <= request.completion_tokens:
            return
        self.release_prefill(request, replica)
        request.completion_tokens = completion_tokens
        request.session.heard_r = self.now_r
        self._regrow(request)

    def _regrow(self, request: Request) -> None:
        session = request.session
        extra = max(0, request.prompt_tokens + request.completion_tokens - session.base_tokens)
        if extra != request.extra_tokens:
            tokens = session.tokens + extra - request.extra_tokens
            request.extra_tokens = extra
            self._set_tokens(session, tokens)

    def take_back(self, request: Request) -> None:
        """It runs nowhere any more; it is still wanted."""
        replica = request.replica
        if replica is None:
            return
        session = request.session
        self.release_prefill(request, replica)
        if request.extra_tokens:
            self._set_tokens(session, session.tokens - request.extra_tokens)
            request.extra_tokens = 0
        request.completion_tokens = 0  # elsewhere it starts over
        request.replica = None
        session.running -= 1
        replica.requests -= 1
        self.by_requests.shift(replica.slot, -1)
        if replica.removed:
            self._forget_if_empty(replica)

    def _learn(self, request: Request, event: RequestEnded, replica: Replica) -> int | None:
        """The session's footprint after this request, or None: nothing learned."""
        prompt, completion = event.prompt_tokens, event.completion_tokens
        if prompt is None:
            if event.outcome != "ok":
                return None
            prompt = request.prompt_tokens
        elif event.cached_tokens is not None:
            replica.signals.answered(prompt, event.cached_tokens, request.expected_hit_tokens)
        return prompt + (request.completion_tokens if completion is None else completion)

    def end_request(self, request: Request, event: RequestEnded | None) -> None:
        """None: it was refused while it waited."""
        session = request.session
        del self.requests[request.id]
        replica = request.replica
        if replica is not None:
            assert event is not None
            learned = self._learn(request, event, replica)
            self.take_back(request)
            if learned is not None:
                delta = learned - session.base_tokens
                session.base_tokens = learned
                self._set_tokens(session, session.tokens + delta)
            session.last_ok = event.outcome == "ok"
        elif request.held:
            request.held = False  # whoever still knows it must not place it
            session.waiting -= 1
        session.last_active_r = session.heard_r = self.now_r
        if session.running or session.waiting:
            return
        if session.state == ENDED:
            del self.draining[session]
            self._release_tokens(session)
        elif session.listed:
            session.klass.idle[session.id] = session
