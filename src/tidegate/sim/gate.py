"""The simulated shell: the production Scheduler between trainers and replicas, as the router's driver runs it.

What it sees becomes an event with its time, at once given to `Scheduler.handle`; the decisions are carried out in the
same breath. It keeps the driver's promises: each RequestArrived has one RequestEnded unless it was rejected, and a tick
comes every `Scheduler.tick_s`. Replies and requests take `hop_s` between gate and replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from tidegate.policy.advice import Advisor
from tidegate.policy.scheduler import Scheduler
from tidegate.sim.kernel import Kernel
from tidegate.sim.replicas import SimReplica
from tidegate.sim.rollout import Call, Rollout
from tidegate.types import (
    AnyDecision,
    AnyEvent,
    Ended,
    Hold,
    MixtureSet,
    Place,
    Reject,
    ReplicaId,
    RequestArrived,
    RequestEnded,
    RequestProgress,
    RequestReturned,
    SessionFinished,
    SessionOpened,
    Tick,
    WorkloadClass,
)

Recorder: TypeAlias = Callable[[AnyEvent, Sequence[AnyDecision]], None]
Answered: TypeAlias = Callable[[Call], None]
Refused: TypeAlias = Callable[[Call, Reject], None]

PROGRESS_TOKENS = 128  # what the data path lets pass between two reports of a stream
MAX_ATTEMPTS = 3  # tries of a call on replicas that fail before their first byte


class Gate:
    def __init__(
        self,
        kernel: Kernel,
        scheduler: Scheduler,
        replicas: Mapping[ReplicaId, SimReplica],
        *,
        labelled: float = 1.0,
        streams: bool = False,
        hop_s: float = 0.0005,
        releases: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        """`labelled`: the share of sessions whose requests say their class. `streams`: replies are streamed, so that
        their growth is seen. `hop_s`: between gate and replica, one way. `releases`: replicas are told which sessions
        ended."""
        self.scheduler = scheduler
        self.advisor = Advisor(scheduler)
        self.repins = 0
        self.handled = 0  # events given to the scheduler
        self._kernel = kernel
        self._replicas = replicas
        self._recorder = recorder
        self._labelled = labelled
        self._labels = kernel.stream("labels")
        self._label_of: dict[str, bool] = {}
        self._streams = streams
        self._hop_s = hop_s
        self._releases = releases
        self._placed: dict[str, dict[ReplicaId, Rollout]] = {}  # where the KV of live sessions may be
        self._prefix_chunk_tokens = scheduler.prefix_chunk_tokens if scheduler.wants_prefix else 0
        self._calls: dict[int, Call] = {}
        self._waiting: dict[int, None] = {}
        self.answered: Answered = lambda call: None  # set by the trainer
        self.refused: Refused = lambda call, reject: None
        kernel.every(scheduler.tick_s, self._tick)

    @property
    def held(self) -> int:
        """Calls that wait."""
        return len(self._waiting)

    # --- what the trainer asks ---------------------------------------------------------------------------------
    def open(self, session: str, workload: str, group: str | None, expected_tokens: int | None) -> None:
        """The client announces a session before its first request."""
        label = workload if self._is_labelled(session) else None
        self.handle(
            SessionOpened(
                at_s=self._kernel.now_s, session=session, workload=label, group=group, expected_tokens=expected_tokens
            )
        )

    def set_mixture(self, shares: dict[WorkloadClass, float]) -> None:
        self.handle(MixtureSet(at_s=self._kernel.now_s, shares=shares))

    def send(self, call: Call) -> None:
        rollout = call.rollout
        call.arrived_s = self._kernel.now_s
        self._calls[call.id] = call
        prefix: tuple[int, ...] = ()
        if self._prefix_chunk_tokens:
            prefix = rollout.context.prefix(self._prefix_chunk_tokens, call.prompt_tokens)
        self.handle(
            RequestArrived(
                at_s=self._kernel.now_s,
                request=call.id,
                session=rollout.id,
                workload=rollout.plan.workload if self._is_labelled(rollout.id) else None,
                group=rollout.plan.group,
                prompt_tokens=call.prompt_tokens,
                prefix=prefix,
            )
        )

    def finish(self, session: str) -> None:
        self._label_of.pop(session, None)
        self.handle(SessionFinished(at_s=self._kernel.now_s, session=session))

    def abort(self, call: Call) -> int:
        """The client leaves. Gives the tokens generated so far."""
        if self._calls.pop(call.id, None) is None:
            return call.output_tokens
        self._waiting.pop(call.id, None)
        generated = 0
        if call.replica is not None and call.placed_s is not None and call.replica in self._replicas:
            generated = self._replicas[call.replica].abort(call)
        call.outcome = "aborted"
        self._tell_end(call, generated)
        return generated

    def _is_labelled(self, session: str) -> bool:
        if self._labelled >= 1.0:
            return True
        known = self._label_of.get(session)
        if known is None:
            known = self._label_of[session] = self._labels.random() < self._labelled
        return known

    # --- what replicas tell ------------------------------------------------------------------------------------
    def done(self, call: Call) -> None:
        self._kernel.after(self._hop_s, self._replied, call)

    def _replied(self, call: Call) -> None:
        if self._calls.pop(call.id, None) is None:
            return  # the client left meanwhile
        call.ended_s = self._kernel.now_s
        self._tell_end(call, call.output_tokens)
        self.answered(call)

    def calls_on(self, url: ReplicaId) -> list[Call]:
        """Placed there and not ended, in the order in which they came."""
        return [call for call in self._calls.values() if call.replica == url]

    def lost(self, call: Call, replica: ReplicaId, *, before_first_byte: bool) -> None:
        """The replica died under it: before its first byte it is placed anew, after it the client gets an error."""
        if call.id not in self._calls:
            return
        call.attempts += 1
        call.replica = call.placed_s = None
        if before_first_byte and call.attempts < MAX_ATTEMPTS:
            self.handle(RequestReturned(at_s=self._kernel.now_s, request=call.id, failed=replica))
            return
        del self._calls[call.id]
        call.outcome = "error" if before_first_byte else "replica_lost"
        call.ended_s = self._kernel.now_s
        self._tell_end(call, None)
        self.answered(call)

    def _tell_end(self, call: Call, generated: int | None) -> None:
        known = call.outcome == "ok"
        self.handle(
            RequestEnded(
                at_s=self._kernel.now_s,
                request=call.id,
                outcome=call.outcome,
                prompt_tokens=call.prompt_tokens if known else None,
                completion_tokens=generated,
                cached_tokens=call.cached_tokens if known else None,
                estimated=not known,
            )
        )

    # --- events and decisions ----------------------------------------------------------------------------------
    def handle(self, event: AnyEvent) -> None:
        decisions = self.scheduler.handle(event)
        self.handled += 1
        if self._recorder is not None:
            self._recorder(event, decisions)
        for decision in decisions:
            match decision:
                case Place():
                    self._place(decision)
                case Hold():
                    self._waiting[decision.request] = None
                case Reject():
                    self._waiting.pop(decision.request, None)
                    self.refused(self._calls.pop(decision.request), decision)
                case Ended():
                    self._session_ended(decision)

    def _session_ended(self, decision: Ended) -> None:
        for url, rollout in self._placed.pop(decision.session, {}).items():
            self._kernel.after(self._hop_s, self._release, url, rollout)

    def _release(self, url: ReplicaId, rollout: Rollout) -> None:
        replica = self._replicas.get(url)
        if replica is not None and rollout.call is None:
            replica.release(rollout)

    def _place(self, decision: Place) -> None:
        call = self._calls.get(decision.request)
        if call is None:
            return  # its end is being told in the same breath
        self._waiting.pop(call.id, None)
        if decision.reason == "repinned":
            self.repins += 1
        call.replica = decision.replica
        if self._releases:
            self._placed.setdefault(call.rollout.id, {})[decision.replica] = call.rollout
        self._kernel.after(self._hop_s, self._submit, call, decision.replica)

    def _submit(self, call: Call, url: ReplicaId) -> None:
        if self._calls.get(call.id) is call and call.replica == url:
            replica = self._replicas.get(url)
            if replica is None:
                self.lost(call, url, before_first_byte=True)
                return
            if call.placed_s is None and not call.attempts:
                call.first_placed_s = self._kernel.now_s - self._hop_s
            call.placed_s = self._kernel.now_s
            call.rollout.replica = url
            replica.submit(call)

    # --- time --------------------------------------------------------------------------------------------------
    def _tick(self) -> None:
        if self._streams:
            self._report_progress()
        self.handle(Tick(at_s=self._kernel.now_s))

    def _report_progress(self) -> None:
        """The data path reports as bytes pass; looked at once a tick, which is about as often."""
        for call in list(self._calls.values()):
            replica = self._replicas.get(call.replica) if call.replica is not None else None
            if call.placed_s is None or replica is None:
                continue
            generated = replica.generated(call)
            if generated - call.told_tokens >= PROGRESS_TOKENS:
                call.told_tokens = generated
                self.handle(RequestProgress(at_s=self._kernel.now_s, request=call.id, completion_tokens=generated))
