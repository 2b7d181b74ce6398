"""What the ledger keeps books of: replicas, workload classes, groups, sessions, requests.

Plain records; only `Ledger` changes the counters in them. Sums (sessions, tokens, requests by replica and class) are
kept incrementally and are redundant on purpose: `check.check` recomputes them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from tidegate.policy.estimators import Cohort, IdleGaps, Profile
from tidegate.policy.params import CoreParams
from tidegate.policy.pressure import Signals
from tidegate.types import ReplicaId, RequestId, SessionId, WorkloadClass

OPENED: Final = 0  # announced, nothing asked yet
HELD: Final = 1  # its first requests wait for admission
LIVE: Final = 2  # admitted
ENDED: Final = 3  # over; requests that it left running are counted until their own end


class Replica:
    """One engine. `slot` is its place in bit masks and load indexes; `bit` is 1 << slot."""

    __slots__ = (
        "added_s",
        "bit",
        "cache_epoch",
        "capacity_tokens",
        "class_live",
        "class_tokens",
        "credit_new",
        "credit_old",
        "credit_turn",
        "live",
        "prefill_rate",
        "prefill_rate_at_s",
        "reason",
        "removed",
        "requests",
        "resident_tokens",
        "sampled_s",
        "signals",
        "slot",
        "tokens",
        "totals",
        "url",
        "usable",
        "waiting",
    )

    def __init__(self, url: ReplicaId, slot: int, added_s: float, classes: int, params: CoreParams) -> None:
        self.url = url
        self.slot = slot
        self.bit = 1 << slot
        self.added_s = added_s
        self.usable = True
        self.removed = False
        self.reason = "ok"
        self.capacity_tokens: int | None = None
        self.live: dict[Session, None] = {}  # its admitted sessions, in order of arrival here
        self.requests = 0  # placed and not ended
        self.tokens = 0  # footprints of its live sessions, and of ended ones with requests still running
        self.class_live = [0] * classes
        self.class_tokens = [0] * classes  # of live sessions only
        self.cache_epoch = 0  # counts the times that its caches were emptied
        self.resident_tokens: int | None = None
        # prefill not yet known to be done, by whether it was placed after or before the last sample
        self.credit_new = 0
        self.credit_old = 0
        self.credit_turn = 0
        self.prefill_rate = 0.0  # measured; 0: not yet
        self.prefill_rate_at_s = added_s
        self.sampled_s: float | None = None
        self.totals: tuple[float, int] | None = None  # (time, computed prompt tokens so far) of the last sample
        self.waiting = 0  # in the engine's own queue, by the last sample
        self.signals = Signals(params.pressure, added_s)


class ClassLedger:
    """One workload class over all replicas. `index` is its place in per-class lists."""

    __slots__ = (
        "completed",
        "ended",
        "entered_r",
        "gaps",
        "held",
        "idle",
        "index",
        "live",
        "name",
        "opened",
        "profile",
        "queue",
        "recent",
        "started",
        "tokens",
    )

    def __init__(self, name: WorkloadClass, index: int, params: CoreParams) -> None:
        self.name = name
        self.index = index
        self.opened = 0
        self.held = 0
        self.live = 0
        self.tokens = 0  # of live sessions, wherever they are
        self.started = 0  # sessions ever opened
        self.recent = 0.0  # sessions opened, fading: the mixture as it arrives
        self.ended = 0
        self.entered_r = 0.0  # when a session of it was last admitted
        self.completed = 0
        self.queue: OrderedDict[Session, None] = OrderedDict()  # held sessions, first come first
        self.idle: OrderedDict[SessionId, Session] = OrderedDict()  # nothing running or waiting; longest idle first
        self.gaps = IdleGaps(params.ledger)
        self.profile = Profile(params.estimators)

    @property
    def demand(self) -> int:
        """N of Eq (8): unfinished sessions, those that wait included."""
        return self.live + self.held + self.opened


class Group:
    """Sessions that start from one prompt (the samples of a GRPO group)."""

    __slots__ = ("name", "on", "prefix_tokens", "sessions")

    def __init__(self, name: str) -> None:
        self.name = name
        self.sessions = 0  # not ended
        self.prefix_tokens = 0  # the shortest first prompt seen: an upper bound of what they share
        self.on: dict[int, int] = {}  # live sessions by replica slot


class Session:
    __slots__ = (
        "admitted_r",
        "announced",
        "base_tokens",
        "cache_epoch",
        "cohort",
        "expected_tokens",
        "generation",
        "group",
        "heard_r",
        "id",
        "klass",
        "last_active_r",
        "last_ok",
        "listed",
        "one_shot",
        "replica",
        "running",
        "size_bin",
        "state",
        "tokens",
        "turns",
        "waiting",
    )

    def __init__(self, id: SessionId, klass: ClassLedger, group: Group | None, generation: int, now_r: float) -> None:
        self.id = id
        self.klass = klass
        self.group = group
        self.generation = generation
        self.state = OPENED
        self.listed = True  # in the table by its id; a session of one request is not
        self.announced = False  # opened by the client, so it stays when a waiting request leaves
        self.one_shot = False  # ends with its last request
        self.replica: Replica | None = None  # where it is pinned; kept when that replica goes, until the next request
        self.cache_epoch = -1  # the replica's cache epoch when it last ran there
        self.base_tokens = 0  # prompt + completion of its last answered request
        self.tokens = 0  # footprint: base plus what running requests add to it
        self.expected_tokens: int | None = None
        self.running = 0
        self.waiting = 0
        self.turns = 0
        self.last_ok = False
        self.admitted_r = 0.0
        self.last_active_r = now_r
        self.heard_r = now_r  # when its footprint was last known: a request placed, progressed or ended
        self.size_bin = 0  # the largest size that it has reached
        self.cohort: Cohort | None = None

    @property
    def resident_tokens(self) -> int:
        """Of its footprint, what its replica's cache should still hold."""
        replica = self.replica
        return self.base_tokens if replica is not None and replica.cache_epoch == self.cache_epoch else 0


class Request:
    __slots__ = (
        "arrived_s",
        "completion_tokens",
        "credit",
        "credit_turn",
        "expected_hit_tokens",
        "extra_tokens",
        "failed",
        "held",
        "id",
        "max_tokens",
        "moved",
        "prefix",
        "prompt_tokens",
        "replica",
        "session",
    )

    def __init__(
        self,
        id: RequestId,
        session: Session,
        prompt_tokens: int,
        max_tokens: int | None,
        prefix: tuple[int, ...],
        arrived_s: float,
    ) -> None:
        self.id = id
        self.session = session
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.max_tokens = max_tokens
        self.prefix = prefix
        self.arrived_s = arrived_s
        self.replica: Replica | None = None  # where it runs
        self.held = False
        self.extra_tokens = 0  # what it adds to its session's footprint
        self.expected_hit_tokens = 0  # of its prompt, what the ledger expects its replica to hold
        self.credit = 0  # its uncached prompt, as backlog of the replica
        self.credit_turn = 0
        self.failed = 0  # slots of replicas that returned it
        self.moved = False  # returned at least once
