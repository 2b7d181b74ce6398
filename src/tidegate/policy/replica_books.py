"""The replica side of the ledger: which replicas there are, what they reported, how loaded they are; and the clocks."""

from __future__ import annotations

from math import inf

from tidegate.policy.entities import ClassLedger, Replica, Request, Session
from tidegate.policy.params import CoreParams
from tidegate.policy.placement import LoadIndex
from tidegate.types import ReplicaId, ReplicaSample


class ReplicaBooks:
    def __init__(self, params: CoreParams) -> None:
        self.params = params
        self.now_s = 0.0
        self.now_r = 0.0
        self.started = False  # the first event sets the clocks
        self.stepped_s = 0.0  # last control step
        self.largest_tokens = inf  # that any replica can hold; inf: of some it is not known
        self.paused = False
        self.classes: list[ClassLedger] = []
        self.replicas: dict[ReplicaId, Replica] = {}
        self.slots: list[Replica | None] = []
        self.usable = 0  # slots that may take requests
        self.by_sessions = LoadIndex()
        self.by_requests = LoadIndex()

    # --- time --------------------------------------------------------------------------------------------------
    def advance(self, at_s: float) -> None:
        """An event slightly older than the last one happens now."""
        if not self.started:
            self.started = True
            self.now_s = self.stepped_s = at_s
        elif at_s > self.now_s:
            if not self.paused:
                self.now_r += at_s - self.now_s
            self.now_s = at_s

    # --- replicas ----------------------------------------------------------------------------------------------
    def add_replica(self, url: ReplicaId, capacity_tokens: int | None) -> Replica:
        replica = self.replicas.get(url)
        if replica is None:
            slot = next((i for i, taken in enumerate(self.slots) if taken is None), len(self.slots))
            replica = Replica(url, slot, self.now_s, len(self.classes), self.params)
            if slot == len(self.slots):
                self.slots.append(replica)
                self.by_sessions.add(slot)
                self.by_requests.add(slot)
            else:
                self.slots[slot] = replica
            self.replicas[url] = replica
            self.usable |= replica.bit
        elif replica.removed:
            replica.removed = False
            replica.added_s = self.now_s
            replica.sampled_s = None
            replica.totals = None
            self.set_health(replica, True, "ok")
        if capacity_tokens is not None:
            replica.capacity_tokens = capacity_tokens
        return replica

    def remove_replica(self, replica: Replica) -> None:
        replica.removed = True
        self.set_health(replica, False, "removed")
        self._forget_if_empty(replica)

    def set_health(self, replica: Replica, usable: bool, reason: str) -> None:
        replica.usable = usable and not replica.removed
        replica.reason = reason
        self.usable = self.usable | replica.bit if replica.usable else self.usable & ~replica.bit

    def _forget_if_empty(self, replica: Replica) -> None:
        known = self.slots[replica.slot] is replica
        if known and replica.removed and not replica.requests and not replica.live and not replica.tokens:
            del self.replicas[replica.url]
            self.slots[replica.slot] = None

    def cold(self, replica: Replica) -> None:
        """Its caches are empty."""
        replica.cache_epoch += 1
        replica.resident_tokens = None
        replica.signals.forget(self.now_s)

    def at(self, slot: int) -> Replica:
        replica = self.slots[slot]
        assert replica is not None
        return replica

    def stale(self, replica: Replica, now_s: float) -> bool:
        last_s = replica.added_s if replica.sampled_s is None else replica.sampled_s
        return now_s - last_s > self.params.replica.stale_after_s

    def sample(self, replica: Replica, sample: ReplicaSample) -> None:
        """Capacity, prefill rate, and which prefills must be done by now."""
        if replica.sampled_s is not None and sample.at_s < replica.sampled_s:
            return
        replica.sampled_s = sample.at_s
        if sample.kv_capacity_tokens is not None:
            replica.capacity_tokens = sample.kv_capacity_tokens
        if sample.waiting is not None:
            replica.waiting = sample.waiting
            if sample.waiting == 0:  # what was placed before the last sample has been scheduled since
                replica.credit_old = replica.credit_new
                replica.credit_new = 0
                replica.credit_turn += 1
        replica.signals.sampled(sample)
        self._measure_prefill(replica, sample)

    def _measure_prefill(self, replica: Replica, sample: ReplicaSample) -> None:
        if sample.prompt_tokens_total is None:
            return
        computed = sample.prompt_tokens_total - (sample.cached_tokens_total or 0)
        before, replica.totals = replica.totals, (sample.at_s, computed)
        if before is None or sample.at_s <= before[0] or computed <= before[1]:
            return
        rate = (computed - before[1]) / (sample.at_s - before[0])
        params = self.params.replica
        faded: float = replica.prefill_rate * 0.5 ** (
            (sample.at_s - replica.prefill_rate_at_s) / params.prefill_rate_halflife_s
        )
        if rate > faded:
            replica.prefill_rate = rate
            replica.prefill_rate_at_s = sample.at_s

    def prefill_rate(self, replica: Replica) -> float:
        return replica.prefill_rate or self.params.replica.prefill_rate_prior_tokens_per_s

    def backlog_s(self, replica: Replica) -> float:
        """d of Eq (1)."""
        return (replica.credit_new + replica.credit_old) / self.prefill_rate(replica)

    # --- prefill in flight ---------------------------------------------------------------------------------------
    def charge_prefill(self, request: Request, session: Session, replica: Replica) -> None:
        expected = self.reusable_tokens(session, replica)
        request.expected_hit_tokens = expected
        replica.signals.placed(request.prompt_tokens, expected)
        uncached = request.prompt_tokens - expected
        if uncached > 0:
            request.credit = uncached
            request.credit_turn = replica.credit_turn
            replica.credit_new += uncached

    def reusable_tokens(self, session: Session, replica: Replica) -> int:
        """H of Eq (1): its own footprint where it lives, else what its group's sessions left there."""
        if session.replica is replica and session.cache_epoch == replica.cache_epoch:
            return session.base_tokens
        group = session.group
        if group is not None and replica.slot in group.on:
            return group.prefix_tokens
        return 0

    def release_prefill(self, request: Request, replica: Replica) -> None:
        if request.credit:
            age = replica.credit_turn - request.credit_turn
            if age == 0:
                replica.credit_new -= request.credit
            elif age == 1:
                replica.credit_old -= request.credit
            request.credit = 0
