"""adaptive_cap: prime-rl's ConcurrencyController, one cap of the sessions in flight over the whole pool.

The cap starts at sum of KV / maximum context: pessimistic and safe. Then, once a poll over all replicas:

    grow   by 1.25 per turnover of the pool, each completed session giving 1 / in flight of a turnover, while the last
           poll was clear (usage below 0.6, nothing queued, no preemption), is fresh, and the cap binds (>= 0.9 of it
           in flight)
    trim   at a usage above 0.8, to in flight x 0.7 / usage: completions drain the pool (soft). Above 0.9 the excess
           is taken out as well, youngest first (hard). Then not again for 6 polls
    cut    on a preemption, to 0.8 of what is in flight, or on requests queued in the engines > 0.5 of those running
           for 6 polls, to 0.9; the excess is taken out. No further cut until the pool has drained below the cap and
           the engines are calm; a new overload within 6 polls after that cuts to 0.5

Growth is that of the controller's first versions; a later one tapers it from 1.2 at usage 0 to 1 at 0.8. Usage is that
of the fullest replica by its own gauge, as the authors read it (kv_usage.py); the whole waiting queue stands for what
waits for capacity, as they do where an engine does not tell reasons apart. The first cap is far below what the memory
holds where the maximum context is far above what sessions use, and growth is paced by their length: short runs are
ramps.

They run inside the trainer and take out excess by cancelling groups of rollouts. A router cannot call off its client's
work: here the excess is paused, each session at its turn boundary, and goes on, oldest first, when the pool is below
the cap again or after `pause_limit_s`. In flight is live and not paused; new sessions enter only when none is paused.
They do not place; sessions go to the replica with the fewest live ones and stay there.
"""

from __future__ import annotations

from tidegate.policy.base import NO_REPLICA, Choice
from tidegate.policy.baselines.kv_usage import used_fraction
from tidegate.policy.baselines.sticky_least_loaded import StickyLeastLoaded
from tidegate.policy.control import prior_footprint_tokens
from tidegate.policy.entities import LIVE, Replica, Request, Session
from tidegate.policy.ledger import Ledger
from tidegate.policy.params import CoreParams
from tidegate.policy.placement import members
from tidegate.types import ReplicaSample


class Poll:
    """What the replicas say together."""

    __slots__ = ("preempted", "queued", "running", "usage")

    def __init__(self) -> None:
        self.usage: float | None = None  # of the fullest
        self.running = 0
        self.queued = 0
        self.preempted = False


class AdaptiveCap(StickyLeastLoaded):
    name = "adaptive_cap"

    def __init__(self, ledger: Ledger, params: CoreParams, seed: int) -> None:
        super().__init__(ledger, params, seed)
        self.own = params.adaptive_cap
        self.limit = float(self.own.min_sessions)
        self.paused: dict[Session, None] = {}  # taken out of the pool
        self._live: dict[Session, None] = {}  # in order of admission
        self._samples: dict[Replica, ReplicaSample] = {}
        self._preemptions: dict[Replica, int] = {}  # by the last poll
        self._started = False  # the first poll with a known capacity is over
        self._due_s = 0.0
        self._may_grow_until_s = 0.0
        self._queue_polls = 0
        self._trim_polls = 0  # left before the next trim
        self._draining = False
        self._grace_polls = 0  # left in which an overload is a repeated one

    # --- sessions ----------------------------------------------------------------------------------------------
    def enter(self, request: Request) -> Choice:
        usable = self.candidates(request)
        if not usable:
            return NO_REPLICA
        if len(self._live) >= int(self.limit):
            return Choice(None, "pool_cap", {"sessions": len(self._live), "cap": int(self.limit)})
        return self.enter_among(usable)

    def proceed(self, request: Request) -> Replica | str:
        session = request.session
        if session in self.paused and session.state == LIVE and not session.running:
            if self.ledger.now_s - request.arrived_s < self.own.pause_limit_s:
                return "paused"
            del self.paused[session]
        return super().proceed(request)

    def placed(self, request: Request, replica: Replica) -> None:
        if request.session.state == LIVE:
            self._live.setdefault(request.session)

    def ended(self, session: Session) -> None:
        if session not in self._live:
            return
        in_flight = self.in_flight  # itself included
        del self._live[session]
        if session in self.paused:
            del self.paused[session]
        elif session.base_tokens:  # a storm of failures takes no capacity and must not look like a turnover
            self._turn_over(in_flight)
        self._go_on()

    @property
    def in_flight(self) -> int:
        return len(self._live) - len(self.paused)

    def _turn_over(self, in_flight: int) -> None:
        own = self.own
        if self.ledger.now_s < self._may_grow_until_s and in_flight >= own.binding_fraction * int(self.limit):
            self.limit = self._clamp(self.limit * own.growth ** (1.0 / in_flight))

    def _go_on(self) -> None:
        """Paused sessions that fit again; their requests are asked for at the next tick."""
        if not self.paused or self.in_flight >= int(self.limit):
            return
        room = int(self.limit) - self.in_flight
        for session in [session for session in self._live if session in self.paused][:room]:
            del self.paused[session]

    def _clamp(self, sessions: float) -> float:
        return min(max(sessions, float(self.own.min_sessions)), float(self.own.max_sessions))

    # --- replicas ----------------------------------------------------------------------------------------------
    def replica_added(self, replica: Replica) -> None:
        self._start()

    def replica_removed(self, replica: Replica) -> None:
        self._samples.pop(replica, None)
        self._preemptions.pop(replica, None)

    def sampled(self, replica: Replica, sample: ReplicaSample) -> None:
        self._samples[replica] = sample
        self._start()

    def _start(self) -> None:
        """The first cap, anew with every replica that comes before the first poll."""
        if self._started:
            return
        known = [r.capacity_tokens for r in self.ledger.replicas.values() if r.capacity_tokens and not r.removed]
        if known:
            context = self.own.max_context_tokens or 2.0 * prior_footprint_tokens(self.ledger)
            self.limit = self._clamp(sum(known) / context)

    # --- the control step --------------------------------------------------------------------------------------
    def tick(self) -> None:
        self._go_on()
        now_s = self.ledger.now_s
        if now_s < self._due_s or self.ledger.paused:
            return
        self._due_s = now_s + self.own.poll_s
        if self._samples:
            self._started = True
            self._observe(self._poll())

    def _poll(self) -> Poll:
        poll = Poll()
        for slot in members(self.ledger.usable):
            replica = self.ledger.at(slot)
            sample = self._samples.get(replica)
            if sample is None or self.ledger.stale(replica, self.ledger.now_s):
                continue
            used = used_fraction(self.ledger, replica, sample)
            if used is not None:
                poll.usage = max(used, poll.usage or 0.0)
            waiting = replica.waiting
            poll.queued += waiting
            poll.running += max(0, replica.requests - waiting) if sample.running is None else sample.running
            total = sample.preemptions_total
            if total is not None:
                poll.preempted |= total > self._preemptions.get(replica, total)
                self._preemptions[replica] = total
        return poll

    def _observe(self, poll: Poll) -> None:
        own = self.own
        usage = poll.usage or 0.0
        overloaded = poll.running > 0 and poll.queued > own.queue_ratio * poll.running
        self._queue_polls = self._queue_polls + 1 if overloaded else 0
        queueing = self._queue_polls >= own.queue_polls
        if self._draining:
            if self.in_flight <= int(self.limit) and not poll.preempted and not queueing:
                self._draining = False
                self._grace_polls = own.grace_polls
        else:
            self._grace_polls = max(0, self._grace_polls - 1)
        self._trim_polls = max(0, self._trim_polls - 1)
        clear = poll.usage is not None and usage < own.growth_below and not poll.queued and not poll.preempted
        self._may_grow_until_s = self.ledger.now_s + own.growth_expiry_s if clear and not self._draining else 0.0
        if self._draining:
            return
        if poll.preempted or queueing:
            self._cut(own.queue_cut if queueing else own.preemption_cut)
        elif usage > own.soft_usage and self.in_flight and not self._trim_polls:
            self._lower(self.in_flight * own.target_usage / usage, take_out=usage > own.hard_usage)
            self._trim_polls = own.trim_polls

    def _cut(self, fraction: float) -> None:
        repeated = self._grace_polls > 0
        self._lower(self.in_flight * (self.own.repeated_cut if repeated else fraction), take_out=True)
        self._queue_polls = 0
        self._draining = True

    def _lower(self, sessions: float, *, take_out: bool) -> None:
        self.limit = min(self.limit, float(int(self._clamp(sessions))))
        excess = self.in_flight - int(self.limit)
        if take_out and excess > 0:
            youngest = [session for session in reversed(self._live) if session not in self.paused]
            self.paused.update(dict.fromkeys(youngest[:excess]))

    def session_limit(self) -> int | None:
        return int(self.limit)

    # --- views -------------------------------------------------------------------------------------------------
    def estimates(self) -> dict[str, object]:
        return {
            "session_cap": int(self.limit),
            "in_flight": self.in_flight,
            "paused": len(self.paused),
            "draining": self._draining,
            "may_grow": self.ledger.now_s < self._may_grow_until_s,
        }
