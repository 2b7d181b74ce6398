"""Events in, decisions out: the only entry to the decision core.

    request arrives -> its session is admitted?  yes: Policy.proceed -> Place, or Hold until it may go on (never Reject)
                                                 no:  Policy.enter   -> Place (admitted), Hold in its class's queue, or
                                                      Reject by admission.overload, max_waiting, hold_timeout_s
    room appears    -> the queues are rechecked: Policy.next_class says whose head is tried, until none fits

Room appears when a session ends, a replica is added, usable again or sampled, the pool resumes, or time passes. A
class with a queue is full by the last recheck, so an arrival behind others joins the queue without a look; a recheck
costs one try per class with a queue, plus one per session admitted. Same events, same decisions, on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidegate import types as t
from tidegate.policy import policies
from tidegate.policy.control import control_step
from tidegate.policy.entities import HELD, LIVE, OPENED, ClassLedger, Request, Session
from tidegate.policy.expiry import expired
from tidegate.policy.holds import Holds
from tidegate.policy.ledger import Ledger
from tidegate.policy.params import CoreParams
from tidegate.policy.views import estimates, pool_view


class Scheduler:
    def __init__(self, policy: str, params: CoreParams = CoreParams(), seed: int = 0) -> None:  # noqa: B008 - frozen
        self.params = params
        self.ledger = Ledger(params)
        self.policy = policies()[policy](self.ledger, params, seed)
        self.holds = Holds()
        self._out: list[t.AnyDecision] = []
        self._room = False  # something changed that may let a held session in
        self._go_on = False  # something changed that may let a held continuation run
        self._freed = False  # memory came free: the policy knows which continuations that may let run
        self._on: dict[type, Callable[[Any], None]] = {
            t.RequestArrived: self._arrived,
            t.RequestEnded: self._ended,
            t.RequestProgress: self._progressed,
            t.RequestReturned: self._returned,
            t.SessionOpened: self._opened,
            t.SessionFinished: self._finished,
            t.ReplicaAdded: self._replica_added,
            t.ReplicaRemoved: self._replica_removed,
            t.ReplicaHealth: self._replica_health,
            t.ReplicaSample: self._replica_sample,
            t.ReplicaResidency: self._replica_residency,
            t.ReplicaReset: self._replica_reset,
            t.PoolPaused: self._paused,
            t.PoolResumed: self._resumed,
            t.EpochStarted: self._epoch_started,
            t.MixtureSet: self._mixture_set,
            t.Tick: self._tick,
        }

    # --- the surface -------------------------------------------------------------------------------------------
    @property
    def tick_s(self) -> float:
        return self.params.tick_s

    @property
    def wants_prefix(self) -> bool:
        return self.policy.wants_prefix

    @property
    def prefix_chunk_tokens(self) -> int:
        return self.policy.prefix_chunk_tokens

    def handle(self, event: t.AnyEvent) -> list[t.AnyDecision]:
        self.ledger.advance(event.at_s)
        out: list[t.AnyDecision] = []
        self._out = out
        self._on[type(event)](event)
        if self._room or self._go_on or self._freed:
            if len(self.holds):
                self._recheck()
            else:
                self._room = self._go_on = self._freed = False
        return out

    def view(self, now_s: float) -> t.PoolView:
        return pool_view(self, now_s)

    def estimates(self, now_s: float) -> dict[str, object]:
        return estimates(self, now_s)

    # --- requests ----------------------------------------------------------------------------------------------
    def _arrived(self, event: t.RequestArrived) -> None:
        session = self._session_of(event)
        if session is None:
            self._out.append(self._reject(event.request, "session_table_full"))
            return
        request = self.ledger.arrive(event, session)
        if self.policy.wants_prefix:
            self.policy.arrived(request)
        if session.state == LIVE:
            self._proceed(request)
        else:
            self._enter(request)

    def _session_of(self, event: t.RequestArrived) -> Session | None:
        ledger = self.ledger
        if event.session is None:
            return ledger.open(f"request:{event.request}", event.workload, event.group, listed=False)
        session = ledger.sessions.get(event.session)
        if session is not None:
            if ledger.expired(session):
                self._end(session, "expired")
            else:
                if session.state == OPENED and event.workload is not None:
                    ledger.relabel(session, event.workload)
                return session
        if not self._make_room_in_table():
            return None
        return ledger.open(event.session, event.workload, event.group)

    def _make_room_in_table(self) -> bool:
        if len(self.ledger.sessions) < self.params.ledger.max_sessions:
            return True
        idle = self.ledger.longest_idle()
        if idle is None:
            return False
        self._end(idle, "evicted")
        return True

    def _enter(self, request: Request) -> None:
        """The first request of a session, or a further one of a session that waits."""
        session = request.session
        if self.ledger.paused:
            self._hold_new(request, "pool_paused", {})
            return
        if session.state == HELD or session.klass.queue:
            self._hold_new(request, "queued", {})
            return
        replica, reason, inputs = self.policy.enter(request)
        if replica is None:
            self._hold_new(request, reason, inputs)
        else:
            self._place(request, replica, reason, inputs)

    def _hold_new(self, request: Request, reason: str, inputs: dict[str, float]) -> None:
        admission = self.params.admission
        if admission.overload == "reject" and reason != "pool_paused":
            self._refuse(request, "no_replica" if reason == "no_replica" else "overloaded")
        elif len(self.holds.new) >= admission.max_waiting:
            self._refuse(request, "queue_full")
        else:
            self.ledger.hold(request)
            self.holds.add_new(request)
            self._out.append(t.Hold(request=request.id, session=request.session.id, reason=reason, inputs=inputs))

    def _proceed(self, request: Request) -> None:
        """A request of an admitted session: it runs, or waits; it is never refused."""
        session = request.session
        if self.ledger.paused:
            self._hold_continuation(request, "pool_paused")
            return
        target = self.policy.proceed(request)
        if isinstance(target, str):
            self._hold_continuation(request, target)
            return
        pinned = session.replica
        if request.moved:
            reason = "retried"
        elif target is pinned:
            reason = "continuation"
        else:
            reason = "routed" if pinned is not None and pinned.usable else "repinned"
        self._place(request, target, reason, {})

    def _hold_continuation(self, request: Request, reason: str) -> None:
        request.failed = 0  # it may go anywhere when it is asked for again
        if not request.held:
            self.ledger.hold(request)
            self.holds.add_continuation(request)
            self._out.append(t.Hold(request=request.id, session=request.session.id, reason=reason))

    def _place(self, request: Request, replica: Any, reason: str, inputs: dict[str, float]) -> None:
        if request.held:
            self.holds.remove(request)
        self.ledger.place(request, replica)
        self.policy.placed(request, replica)
        self._out.append(
            t.Place(request=request.id, replica=replica.url, session=request.session.id, reason=reason, inputs=inputs)
        )

    def _progressed(self, event: t.RequestProgress) -> None:
        request = self.ledger.requests.get(event.request)
        if request is not None:
            self.ledger.progress(request, event.completion_tokens)
            if self.policy.progressed(request):
                self._freed = True

    def _returned(self, event: t.RequestReturned) -> None:
        request = self.ledger.requests.get(event.request)
        if request is None or request.replica is None:
            return
        request.failed |= request.replica.bit
        request.moved = True
        self.ledger.take_back(request)
        self._proceed(request)

    def _ended(self, event: t.RequestEnded) -> None:
        request = self.ledger.requests.get(event.request)
        if request is None:
            return
        self.holds.remove(request)
        ran = request.replica is not None
        self.ledger.end_request(request, event)
        session = request.session
        if ran:
            self.policy.answered(request, event)
        elif session.state == LIVE:
            self.policy.withdrawn(request)
        self._freed = bool(self.holds.continuations)
        if event.final and session.state == LIVE and session.listed:
            self._end(session, "finished")
        elif session.one_shot or session.state == HELD:
            self._end_if_over(session)

    def _end_if_over(self, session: Session) -> None:
        if session.running or session.waiting:
            return
        if session.state == HELD:
            if session.announced and not session.one_shot:
                self.ledger.unhold(session)
            else:
                self._end(session, "abandoned")
        elif session.one_shot:
            self._end(session, "abandoned" if session.state == OPENED else "single_request")

    # --- refusals ----------------------------------------------------------------------------------------------
    def _reject(self, request_id: int, reason: str) -> t.Reject:
        return t.Reject(request=request_id, reason=reason, retry_after_s=self.params.admission.retry_after_s)

    def _refuse(self, request: Request, reason: str) -> None:
        """A request of a session that was never admitted."""
        session = request.session
        self.holds.remove(request)
        self.ledger.end_request(request, None)
        self._out.append(self._reject(request.id, reason))
        if session.state == OPENED and not session.announced:
            self._end(session, "abandoned")
        else:
            self._end_if_over(session)

    def _time_out(self) -> None:
        timeout_s = self.params.admission.hold_timeout_s
        if timeout_s is None:
            return
        new = self.holds.new
        while new:
            request = next(iter(new.values()))
            if self.ledger.now_s - request.arrived_s < timeout_s:
                break
            self._refuse(request, "hold_timeout")

    # --- sessions ----------------------------------------------------------------------------------------------
    def _opened(self, event: t.SessionOpened) -> None:
        ledger = self.ledger
        session = ledger.sessions.get(event.session)
        if session is not None and ledger.expired(session):
            self._end(session, "expired")
            session = None
        if session is None:
            if not self._make_room_in_table():
                return  # it opens with its first request, if there is room then
            session = ledger.open(event.session, event.workload, event.group)
            session.announced = True
        elif event.workload is not None:
            ledger.relabel(session, event.workload)
        if event.expected_tokens is not None and event.expected_tokens <= ledger.largest_tokens:
            session.expected_tokens = event.expected_tokens

    def _finished(self, event: t.SessionFinished) -> None:
        session = self.ledger.sessions.get(event.session)
        if session is None:
            return
        if session.state == HELD:  # its requests still wait for an answer
            session.one_shot = True
        else:
            self._end(session, "finished")

    def _end(self, session: Session, cause: str) -> None:
        ended = self.ledger.end_session(session, cause)
        if ended is not None:
            self.policy.ended(session)
            self._out.append(ended)
            self._room = True

    # --- replicas ----------------------------------------------------------------------------------------------
    def _replica_added(self, event: t.ReplicaAdded) -> None:
        known = self.ledger.replicas.get(event.replica)
        fresh = known is None or known.removed
        replica = self.ledger.add_replica(event.replica, event.kv_capacity_tokens)
        if fresh:
            self.policy.replica_added(replica)
        self._room = self._go_on = True

    def _replica_removed(self, event: t.ReplicaRemoved) -> None:
        replica = self.ledger.replicas.get(event.replica)
        if replica is not None:
            self.ledger.remove_replica(replica)
            self.policy.replica_removed(replica)

    def _replica_health(self, event: t.ReplicaHealth) -> None:
        replica = self.ledger.replicas.get(event.replica)
        if replica is not None and not replica.removed:
            self.ledger.set_health(replica, event.usable, event.reason)
            self._room = self._go_on = True

    def _replica_sample(self, event: t.ReplicaSample) -> None:
        replica = self.ledger.replicas.get(event.replica)
        if replica is not None and not replica.removed:
            self.ledger.sample(replica, event)
            self.policy.sampled(replica, event)
            self._room = True

    def _replica_residency(self, event: t.ReplicaResidency) -> None:
        replica = self.ledger.replicas.get(event.replica)
        if replica is not None and not replica.removed:
            self.ledger.reside(replica, event)
            self.policy.resided(replica, event)

    def _replica_reset(self, event: t.ReplicaReset) -> None:
        replica = self.ledger.replicas.get(event.replica)
        if replica is not None:
            self.ledger.cold(replica)
            self.policy.cold(replica)

    # --- the pool ----------------------------------------------------------------------------------------------
    def _paused(self, event: t.PoolPaused) -> None:
        self.ledger.paused = True

    def _resumed(self, event: t.PoolResumed) -> None:
        self.ledger.paused = False
        self._room = self._go_on = True

    def _epoch_started(self, event: t.EpochStarted) -> None:
        self.ledger.epoch += 1
        for replica in self.ledger.replicas.values():
            self.ledger.cold(replica)
            self.policy.cold(replica)

    def _mixture_set(self, event: t.MixtureSet) -> None:
        self.ledger.mixture = dict(event.shares)
        self._room = True

    def _tick(self, event: t.Tick) -> None:
        for session in expired(self.ledger):
            self._end(session, "expired")
        self._time_out()
        control_step(self.ledger)
        self.policy.tick()
        self._room = self._go_on = True

    # --- recheck -----------------------------------------------------------------------------------------------
    def _recheck(self) -> None:
        if self.ledger.paused:
            return
        if self._go_on:
            self._go_on = False
            for request in list(self.holds.continuations.values()):
                self._proceed(request)
        self._freed = False
        for request in self.policy.resumable():
            self._proceed(request)
        if self._room:
            self._room = False
            self._recheck_new()

    def _recheck_new(self) -> None:
        waiting = [klass for klass in self.ledger.classes if klass.queue]
        while waiting:
            klass = self.policy.next_class(waiting)
            admitted = self._admit_head(klass)
            if not admitted and not self.policy.overtakes:
                return
            if not admitted or not klass.queue:
                waiting.remove(klass)

    def _admit_head(self, klass: ClassLedger) -> bool:
        session = next(iter(klass.queue))
        head = self.holds.first_of(session)
        replica, reason, inputs = self.policy.enter(head)
        if replica is None:
            return False
        waiting = self.holds.take_all_of(session)
        self._place(head, replica, reason, inputs)
        for request in waiting:
            if request is not head:
                request.held = False
                session.waiting -= 1
                self._proceed(request)
        return True
