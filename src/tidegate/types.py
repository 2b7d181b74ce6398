"""The contract between the decision core and its shells: events in, decisions out, snapshots to look at.

A shell (the router, the simulator, an endpoint picker, a replay) turns what it sees into an `Event` with its
time, gives it to `Scheduler.handle`, and carries out the returned `Decision`s. Events hold raw facts; thresholds
live in policies. Everything here is a frozen msgspec struct with a tag, so that a log of events and decisions is
plain JSON lines and can be replayed to the same result.

Times are seconds of the shell's monotonic clock. Token counts are tokens of the served model.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

ReplicaId: TypeAlias = str  # the replica's base URL: identity survives re-listing
SessionId: TypeAlias = str  # at most 256 bytes, no control characters; checked at the boundary
RequestId: TypeAlias = int  # unique for the life of the shell
WorkloadClass: TypeAlias = str  # any label; UNLABELLED when the client gave none

UNLABELLED: WorkloadClass = "unlabelled"

Outcome: TypeAlias = Literal["ok", "error", "aborted", "replica_lost", "refused"]
"""How a placed request ended: 2xx with a whole body; the replica's own 4xx/5xx; the client left; the replica died
after its first byte; the replica shed it (429/503), which says nothing about its health."""


class Event(msgspec.Struct, frozen=True, tag_field="event", kw_only=True, gc=False):  # part of no cycle
    at_s: float


# --- replicas ---------------------------------------------------------------------------------------------------
class ReplicaAdded(Event, frozen=True, tag="replica_added"):
    """Idempotent: adding a known replica changes nothing but a given capacity."""

    replica: ReplicaId
    kv_capacity_tokens: int | None = None  # None: not known yet


class ReplicaRemoved(Event, frozen=True, tag="replica_removed"):
    """Its sessions lose their placement and are placed anew at their next request; running requests stay counted
    until their own end."""

    replica: ReplicaId


class ReplicaHealth(Event, frozen=True, tag="replica_health"):
    """Whether it may take requests. A replica that is not usable keeps its load and its sessions' footprints."""

    replica: ReplicaId
    usable: bool
    reason: str = ""  # connect_failed, health_failed, draining, ejected, half_open, ok


class ReplicaSample(Event, frozen=True, tag="replica_sample"):
    """One reading of a replica's own numbers; a field it did not report is None, never 0. Totals are cumulative since
    the replica started. `at_s` is when the reading was taken."""

    replica: ReplicaId
    kv_capacity_tokens: int | None = None
    kv_used_fraction: float | None = None  # vLLM: blocks of RUNNING requests only; does not show thrash
    running: int | None = None
    waiting: int | None = None
    prompt_tokens_total: int | None = None
    cached_tokens_total: int | None = None
    generation_tokens_total: int | None = None
    preemptions_total: int | None = None


class ReplicaResidency(Event, frozen=True, tag="replica_residency"):
    """Resident KV by session, from the replica's KV events: a session-cache snapshot. Sessions left out hold none."""

    replica: ReplicaId
    session_tokens: dict[SessionId, int]
    resident_tokens: int  # all cached tokens, those of ended and unknown sessions too
    evicted_tokens: int = 0  # since the previous report


class ReplicaReset(Event, frozen=True, tag="replica_reset"):
    """Its caches are empty: restart, cache reset, sleep."""

    replica: ReplicaId
    reason: str


# --- sessions and requests --------------------------------------------------------------------------------------
class SessionOpened(Event, frozen=True, tag="session_opened"):
    """The client announced a session before its first request. Demand only: it is admitted by its first request."""

    session: SessionId
    workload: WorkloadClass | None = None
    group: str | None = None
    expected_tokens: int | None = None  # the client's own estimate of its final footprint


class SessionFinished(Event, frozen=True, tag="session_finished"):
    """Idempotent; an unknown id is fine. A later request of the id opens a new generation."""

    session: SessionId


class RequestArrived(Event, frozen=True, tag="request_arrived"):
    """A request wants a replica. Its session is opened if it is not known; None makes a session of this one request."""

    request: RequestId
    session: SessionId | None = None
    workload: WorkloadClass | None = None
    group: str | None = None
    prompt_tokens: int = 0  # often an estimate from the body's size
    max_tokens: int | None = None
    prefix: tuple[int, ...] = ()  # chained hashes of the prompt's chunks, filled only if the policy asks for them


class RequestProgress(Event, frozen=True, tag="request_progress"):
    """A running request has generated this many tokens so far (streams only; an estimate)."""

    request: RequestId
    completion_tokens: int


class RequestReturned(Event, frozen=True, tag="request_returned"):
    """The replica failed before the first byte of a response: the request wants another one. `failed` is left out of
    the choice, and the session's pin to it is dropped."""

    request: RequestId
    failed: ReplicaId


class RequestEnded(Event, frozen=True, tag="request_ended"):
    """Sent exactly once for every arrived request that was not rejected, held ones included (outcome `aborted`)."""

    request: RequestId
    outcome: Outcome
    prompt_tokens: int | None = None  # None: nothing learned
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # prompt tokens found in the replica's cache
    estimated: bool = True  # the counts are not the replica's own
    final: bool = False  # the client says that this was the session's last request


# --- the pool and time ------------------------------------------------------------------------------------------
class PoolPaused(Event, frozen=True, tag="pool_paused"):
    """Generation is paused on all replicas (a weight update): requests are held, residency clocks stop."""


class PoolResumed(Event, frozen=True, tag="pool_resumed"):
    pass


class EpochStarted(Event, frozen=True, tag="epoch_started"):
    """New weights or a pool-wide cache reset: all caches are cold."""

    reason: str


class MixtureSet(Event, frozen=True, tag="mixture_set"):
    """The trainer's target mixture rho by class; shares sum to 1. An empty one goes back to learning from arrivals."""

    shares: dict[WorkloadClass, float]


class Tick(Event, frozen=True, tag="tick"):
    """Time passed. Shells send one at least every `Scheduler.tick_s`; expiry, control steps, rechecks happen here."""


AnyEvent: TypeAlias = (
    ReplicaAdded
    | ReplicaRemoved
    | ReplicaHealth
    | ReplicaSample
    | ReplicaResidency
    | ReplicaReset
    | SessionOpened
    | SessionFinished
    | RequestArrived
    | RequestProgress
    | RequestReturned
    | RequestEnded
    | PoolPaused
    | PoolResumed
    | EpochStarted
    | MixtureSet
    | Tick
)


class Decision(msgspec.Struct, frozen=True, tag_field="decision", kw_only=True, gc=False):
    pass


class Place(Decision, frozen=True, tag="place"):
    """Send the request to this replica now. Also given, later, for a request that was held."""

    request: RequestId
    replica: ReplicaId
    session: SessionId
    reason: str  # admitted, continuation, repinned, retried, overload_borrow, ...
    inputs: dict[str, float] = {}  # what the choice was made from


class Hold(Decision, frozen=True, tag="hold"):
    """Keep the request waiting; a Place or a Reject follows, unless its RequestEnded comes first."""

    request: RequestId
    session: SessionId
    reason: str  # replica_cap, class_cap, occupancy, queued, ...: the table is policy.reasons
    inputs: dict[str, float] = {}


class Reject(Decision, frozen=True, tag="reject"):
    """Answer the client with an error. Never given to a continuation of an admitted session."""

    request: RequestId
    reason: str  # hold_timeout, overloaded, queue_full, session_table_full, no_replica
    retry_after_s: float | None = None


class Ended(Decision, frozen=True, tag="ended"):
    """A session left the ledger; `replica` held its KV (None: it was never admitted). Engines that can, release it."""

    session: SessionId
    replica: ReplicaId | None
    workload: WorkloadClass
    cause: str  # finished, expired, evicted, single_request, abandoned
    completed: bool  # whether it counts as a completed rollout


AnyDecision: TypeAlias = Place | Hold | Reject | Ended


# --- what a shell may look at -----------------------------------------------------------------------------------
class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    url: ReplicaId
    ready: bool
    reason: str
    sessions: int
    requests: int
    kv_capacity_tokens: int | None
    kv_used_tokens: int  # the ledger's sum of its live sessions' footprints
    kv_resident_tokens: int | None  # by KV events; None: not known
    stale: bool
    hit_rate: float | None
    pressure: float


class ClassView(msgspec.Struct, frozen=True, kw_only=True):
    live: int
    held: int
    cap: int | None  # over all replicas; None: not capped
    footprint_tokens: float
    residency_s: float
    share: float  # target mixture, given or learned
    completed: int


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    epoch: int
    paused: bool
    live: int  # admitted sessions
    held: int  # sessions waiting for admission
    paused_sessions: int  # admitted sessions whose continuation waits
    in_flight: int  # placed requests
    waiting: int  # held requests
    replicas: tuple[ReplicaView, ...]
    classes: dict[WorkloadClass, ClassView]
    alarms: tuple[str, ...]


class ClassAdvice(msgspec.Struct, frozen=True, kw_only=True):
    sessions: int  # to have in flight: in the engines and waiting at the gate
    held_sessions: int  # of them, expected to wait, so that the gate never runs dry
    share: float  # of the completed sessions, given by the trainer or learned
    footprint_tokens: float
    residency_s: float
    reason: str  # the table is policy.reasons


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """How many sessions a trainer should have in flight now."""

    policy: str
    paused: bool  # a weight update is under way: start none
    mixture_given: bool  # False: the split over classes is that of what arrives, and binds nobody
    sessions: int  # over all classes
    held_sessions: int
    reason: str  # the table is policy.reasons
    inputs: dict[str, float]  # what the number was made from
    classes: dict[WorkloadClass, ClassAdvice]
