"""The shell around the Scheduler: turns what the data path and the monitors see into events, carries out decisions.

One object, on the event loop's thread; every call is synchronous, so an event and its decisions are one step. It owns
the only clock reads. What it must keep straight, whatever happens to a request:

- each RequestArrived is followed by exactly one RequestEnded, unless it was rejected (`_entries` is the guard: the
  entry leaves the table once, and that is when the end is told);
- a request leaves a replica only before its first byte went out; at most `max_attempts` replicas fail one that reached
  them, and one that could not even be sent waits until a replica can be connected to;
- a refusal of our own is never tried again;
- an exception in a callback ends its request, is counted and logged, and leaks nothing.

Requests on other paths than the six inference paths cost no KV: they are relayed to the usable replica with the
fewest of them, without admission, and do not appear in the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import structlog

from tidegate.clock import Clock
from tidegate.errors import ReplicaError, RequestError, TidegateError
from tidegate.observe.counters import Counters
from tidegate.observe.recorder import Recorder
from tidegate.policy.scheduler import Scheduler
from tidegate.proxy.identity import INFERENCE_PATHS, Identifier
from tidegate.proxy.paths import normalised
from tidegate.proxy.pool import UNSENT
from tidegate.proxy.seam import AsgiApp, Exchange, RequestHead
from tidegate.proxy.tokens import TokenRatios
from tidegate.proxy.usage import UsageMeter
from tidegate.server.entry import Entry
from tidegate.server.inferring import entry_type
from tidegate.server.passing import Passing
from tidegate.server.prefix import chunk_bytes, chunk_hashes
from tidegate.server.refusals import aborted, not_admitted, shutting_down
from tidegate.server.replicas import Replicas
from tidegate.types import (
    AnyEvent,
    Ended,
    Hold,
    Outcome,
    Place,
    Reject,
    ReplicaId,
    ReplicaReset,
    RequestArrived,
    RequestEnded,
    RequestProgress,
    RequestReturned,
    Tick,
)

log: structlog.stdlib.BoundLogger = structlog.get_logger("tidegate.driver")

Router = Callable[[RequestHead], AsgiApp | None]


class Driver:
    """Implements `proxy.seam.Handler`."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        identifier: Identifier,
        *,
        max_attempts: int = 3,
        recorder: Recorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.counters = Counters()
        self.recorder = recorder
        self.replicas: Replicas  # set by whoever puts the parts together; both need each other
        self.passing: Passing
        self.told: Callable[[AnyEvent, Sequence[Any]], None] = lambda event, decisions: None  # of all that happens
        self.router: Router = lambda head: None
        self.names_sessions = False  # to engines, which read one header only
        self.draining = False
        self.failed_ticks = 0  # in a row, for a fault of ours
        self._aborts_called_s = float("-inf")  # when somebody last aborted requests through the gate
        self.started_s = clock.now_s()
        self.now_s = clock.now_s
        self.ratios = TokenRatios()
        self._event_s = self.started_s  # of the event being handled
        self._chunk_bytes = chunk_bytes(scheduler.prefix_chunk_tokens) if scheduler.wants_prefix else 0
        self._identifier = identifier
        self._carry: dict[type, Callable[[Any], None]] = {
            Place: self._place,
            Hold: self._hold,
            Reject: self._reject,
            Ended: self._session_ended,
        }
        self._entries: dict[int, Entry] = {}
        self._max_attempts = max_attempts

    # --- events ------------------------------------------------------------------------------------------------------
    def handle(self, event: AnyEvent) -> None:
        decisions = self.scheduler.handle(event)
        if self.recorder is not None:
            self.recorder.record(event, decisions)
        for decision in decisions:
            self._event_s = event.at_s
            self._carry[type(decision)](decision)
        self.told(event, decisions)

    def tick(self) -> None:
        self.handle(Tick(at_s=self.now_s()))
        self._recall_lost()

    def _recall_lost(self) -> None:
        lost = self.replicas.lost_before_s()
        if not lost:
            return
        for entry in list(self._entries.values()):
            replica = entry.replica
            if replica is not None and entry.placed_s < lost.get(replica, float("-inf")):
                error = ReplicaError(f"replica {replica} will not answer", reason="replica_lost_request", status=504)
                entry.exchange.recall(error)

    def observed(self, event: AnyEvent) -> None:
        """From a monitor."""
        if isinstance(event, ReplicaReset):
            self.counters.resets[event.replica, event.reason] += 1
            log.warning("replica's caches were lost", replica=event.replica, reason=event.reason)
        try:
            self.handle(event)
        except Exception:  # it would end the monitor, and with it the replica
            self.counters.faults += 1
            log.exception("internal fault", where="observed", replica_event=type(event).__name__)

    def aborts_called(self) -> None:
        """Somebody aborts requests through the gate: replies of those that run now are not a draining replica's."""
        self._aborts_called_s = self.now_s()

    def refuse_all(self) -> int:
        """For a shutdown: what is held and what still comes is refused, so that clients go elsewhere at once."""
        self.draining = True
        return self._turn_away(self.held(), shutting_down)

    def abort_held(self, ids: Collection[str] = ()) -> int:
        """Somebody aborts all requests, or those with these ids: those that wait here are among them."""
        return self._turn_away([entry for entry in self.held() if not ids or entry.goes_by(ids)], aborted)

    def _turn_away(self, held: Sequence[Entry], why: Callable[[], TidegateError]) -> int:
        for entry in held:  # all of them first: the end of one may make room for another, which is to be refused too
            del self._entries[entry.exchange.id]
        for entry in held:
            self.handle(RequestEnded(at_s=self.now_s(), request=entry.exchange.id, outcome="aborted"))
            self._refuse(entry.exchange, why())
        return len(held)

    @property
    def under_way(self) -> int:
        """Exchanges that have not ended, held ones too."""
        return len(self._entries) + self.passing.under_way

    # --- Handler: what the data path asks and tells ------------------------------------------------------------------
    def route(self, head: RequestHead) -> AsgiApp | None:
        if head.path in INFERENCE_PATHS:
            return None
        known = normalised(head.path)
        if known in INFERENCE_PATHS:
            head.path = known
            return None
        return self.router(head)

    def wants_body(self, head: RequestHead) -> bool:
        if head.path not in INFERENCE_PATHS or head.method != "POST":
            return False
        return self._identifier.wants_body(head) or self._chunk_bytes > 0

    def opened(self, exchange: Exchange, body: bytes | None) -> None:
        head = exchange.head
        if self.draining:
            self._refuse(exchange, shutting_down())
            return
        if head.path not in INFERENCE_PATHS or head.method != "POST":
            self.passing.opened(exchange)
            return
        try:
            self._arrived(exchange, head, body)
        except RequestError as error:
            self._refuse(exchange, error)
        except Exception:
            self._fault(exchange.id, "opened")
            self._drop(exchange)

    def returned(self, exchange: Exchange, replica: ReplicaId, error: TidegateError) -> None:
        entry = self._entries.get(exchange.id)
        if entry is None:
            self.passing.returned(exchange, replica, error)
            return
        try:
            self._returned(entry, replica, error)
        except Exception:
            self._fault(exchange.id, "returned")
            self._drop(exchange)

    def ended(self, exchange: Exchange, outcome: Outcome, error: TidegateError | None) -> None:
        entry = self._entries.pop(exchange.id, None)
        if entry is None:
            self.passing.ended(exchange, outcome)
            return
        try:
            event = self._account(entry, outcome, error)
            entry.over()
        except Exception:
            self._fault(exchange.id, "ended")
            event = RequestEnded(at_s=self.now_s(), request=exchange.id, outcome=outcome)
        try:
            self.handle(event)
        except Exception:
            self._fault(exchange.id, "ended")

    # --- the life of a request ---------------------------------------------------------------------------------------
    def _arrived(self, exchange: Exchange, head: RequestHead, body: bytes | None) -> None:
        identity = self._identifier.identify(head, body)
        session = identity.session
        named = session is None or identity.in_own_header or head.get(b"x-session-id") is not None
        if session is not None and not named and self.names_sessions and session.isascii():
            exchange.name_session(session.encode())
        now_s = self.now_s()
        request = exchange.id
        entry = entry_type(head)(exchange, self, identity, self.counters.of_class(identity.workload), now_s)
        self._entries[request] = exchange.meter = entry
        size_bytes = head.content_length if body is None else len(body)
        self.handle(
            RequestArrived(
                at_s=now_s,
                request=request,
                session=identity.session,
                workload=identity.workload,
                group=identity.group,
                prompt_tokens=self.ratios.estimate(head.path, size_bytes),
                prefix=chunk_hashes(body, self._chunk_bytes) if body is not None and self._chunk_bytes else (),
            )
        )

    def progressed(self, meter: UsageMeter, completion_tokens: int) -> None:
        if isinstance(meter, Entry) and meter.exchange.id in self._entries:
            self.handle(
                RequestProgress(at_s=self.now_s(), request=meter.exchange.id, completion_tokens=completion_tokens)
            )

    def aborts_are_the_replicas(self, meter: UsageMeter) -> bool:
        return isinstance(meter, Entry) and meter.placed_s > self._aborts_called_s

    def _returned(self, entry: Entry, replica: ReplicaId, error: TidegateError) -> None:
        entry.attempts += 1
        entry.replica = None
        self.counters.replica_errors[replica, error.reason] += 1
        if entry.wants_retry:  # an abort without text
            self.counters.empty_aborts[replica] += 1
            self.replicas.saw_empty_abort(replica)
            error = ReplicaError(
                f"replica {replica} is shutting down", reason="replica_draining", status=503, retry_after_s=1.0
            )
        else:
            self.replicas.connect_failed(replica, str(error))
        entry.begin_anew()
        request = entry.exchange.id
        entry.failures += error.reason not in UNSENT
        if entry.failures < self._max_attempts and self._max_attempts > 1:
            self.counters.retried[error.reason] += 1
            self.handle(RequestReturned(at_s=self.now_s(), request=request, failed=replica))
            return
        del self._entries[request]
        self.handle(RequestEnded(at_s=self.now_s(), request=request, outcome="error"))
        self._refuse(entry.exchange, error)

    def _account(self, entry: Entry, outcome: Outcome, error: TidegateError | None) -> RequestEnded:
        now_s, counters, path = self.now_s(), entry.counters, entry.exchange.head.path
        usage = entry.usage()
        if entry.replica is not None:
            outcome = self._account_replica(entry, entry.replica, outcome, error)
            counters.prompt_tokens += usage.prompt_tokens or 0
            counters.cached_tokens += usage.cached_tokens or 0
            counters.completion_tokens += usage.completion_tokens or 0
            if entry.implausible:
                self.counters.implausible_usages[entry.replica] += 1
            if usage.estimated and outcome == "ok":
                self.counters.estimated_usages[path] += 1
        counters.requests[path, outcome] += 1
        counters.duration_s.observe(now_s - entry.arrived_s)
        return RequestEnded(
            at_s=now_s,
            request=entry.exchange.id,
            outcome=outcome,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            estimated=usage.estimated,
            final=entry.identity.final,
        )

    def _account_replica(
        self, entry: Entry, replica: ReplicaId, outcome: Outcome, error: TidegateError | None
    ) -> Outcome:
        """What this says of the replica, and how the request ended in truth."""
        if entry.first_byte_s is not None:
            self.replicas.response_ok(replica)
            entry.counters.first_byte_s.observe(entry.first_byte_s - entry.placed_s)
            if entry.load_report is not None:
                self.replicas.load_report(replica, entry.load_report)
        if error is not None:
            self.counters.replica_errors[replica, error.reason] += 1
        if entry.aborted:
            self.counters.aborted_replies[replica] += 1
            return "error" if outcome == "ok" else outcome
        return outcome

    # --- decisions ---------------------------------------------------------------------------------------------------
    def _place(self, decision: Place) -> None:
        self.counters.placed[decision.reason] += 1
        entry = self._entries.get(decision.request)
        if entry is None:
            return  # its end is being told: this decision was made in the same breath
        if entry.attempts == 0:
            entry.counters.held_s.observe(self._event_s - entry.arrived_s)
        entry.placed_s = self._event_s
        entry.replica = decision.replica
        entry.hold_reason = None
        try:
            entry.exchange.place(decision.replica)
        except Exception:
            self._fault(decision.request, "place")
            self._drop(entry.exchange)

    def _hold(self, decision: Hold) -> None:
        self.counters.held[decision.reason] += 1
        entry = self._entries.get(decision.request)
        if entry is None:
            return
        if self.draining:  # its replica failed meanwhile, and nobody will place it again in time
            self._turn_away([entry], shutting_down)
        else:
            entry.hold_reason = decision.reason

    def _reject(self, decision: Reject) -> None:
        entry = self._entries.pop(decision.request, None)
        if entry is not None:
            self._refuse(entry.exchange, not_admitted(decision))

    def _session_ended(self, decision: Ended) -> None:
        self.counters.ended[decision.cause] += 1

    # --- refusals and faults -----------------------------------------------------------------------------------------
    def _refuse(self, exchange: Exchange, error: TidegateError) -> None:
        self.counters.refused[error.reason] += 1
        if isinstance(exchange.meter, Entry):
            exchange.meter.over()
        exchange.reject(error)

    def count_fault(self) -> None:
        self.counters.faults += 1

    def _fault(self, request: int, where: str) -> None:
        self.count_fault()
        log.exception("internal fault", where=where, request=request)

    def _drop(self, exchange: Exchange) -> None:
        """After a fault of ours: the request is over, for the ledger and for the client."""
        request = exchange.id
        try:
            if self._entries.pop(request, None) is not None:
                self.handle(RequestEnded(at_s=self.now_s(), request=request, outcome="error"))
            self._refuse(exchange, TidegateError("the gate failed on this request"))
        except Exception:
            self._fault(request, "drop")  # the data path has let go of it already, or the scheduler is at fault

    # --- what others may look at -------------------------------------------------------------------------------------
    def home(self, head: RequestHead) -> ReplicaId | None:
        """Where the session that the headers name has its KV, if it is known."""
        session = self._identifier.header_session(head)
        known = self.scheduler.ledger.sessions.get(session) if session is not None else None
        return known.replica.url if known is not None and known.replica is not None else None

    def held(self) -> Sequence[Entry]:
        return [entry for entry in self._entries.values() if entry.hold_reason is not None]
