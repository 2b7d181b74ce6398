"""working_set: keep the working sets of the admitted sessions resident; suspend whole sessions when they do not fit.

Thrashing is Denning's problem and has Denning's answer. On each replica, with C its KV capacity:

    resident    the longest prefix of its live sessions, oldest admission first, whose claims sum to <= theta C together
                with what running requests of newer sessions pin until they end
    continue    requests of resident sessions pass. A continuation of a newer one is held at its turn boundary (paused)
                until it fits; a session is never stopped in the middle of a generation. The oldest always passes, and
                so does one that has waited for `pause_limit_s`: no deadlock, and every wait is bounded
    enter       while what the live sessions are expected to hold, the newcomer included, fits in alpha C at every
                horizon (working_set_forecast.py), and they are no more than alpha C over their mean claim: without the
                cap, a young cohort is followed by a pause of all admissions when it is grown. Both are means without
                a margin, which is what pausing is for. An empty replica takes one always
    doze        a session idle for longer than its KV is worth (working_set_idle.py) claims nothing until it comes back;
                then it claims again in its old rank
    move        a session that has been paused for longer than its prompt takes to compute goes to a replica that has
                room for it: waiting costs more by then than its KV is worth

Claims and sums: working_set_replica.py. Growth beyond theta pauses the newest, whose lost KV is the smallest. Room that
comes free is offered to paused sessions, oldest first, then to new ones, first come first served over all classes.

On a replica of unknown capacity or stale state nobody is paused; new ones enter there up to a small fixed number.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from tidegate.policy.base import NO_REPLICA, Choice, Sticky
from tidegate.policy.entities import LIVE, Replica, Request, Session
from tidegate.policy.ledger import Ledger
from tidegate.policy.params import CoreParams
from tidegate.policy.unseen import TOLD_TOKENS
from tidegate.policy.working_set_forecast import Held, Outlook
from tidegate.policy.working_set_idle import Patience
from tidegate.policy.working_set_learned import LearnedClaims
from tidegate.policy.working_set_replica import Claim, WorkingSet
from tidegate.policy.working_set_views import estimates, session_limit
from tidegate.types import ReplicaSample, RequestEnded


class WorkingSetPolicy(Sticky):
    name = "working_set"

    def __init__(self, ledger: Ledger, params: CoreParams, seed: int) -> None:
        super().__init__(ledger, params, seed)
        self.own = params.working_set
        self.sets: list[WorkingSet] = []  # by replica slot
        self.claims: dict[Session, Claim] = {}
        self.outlook = Outlook(ledger.classes)
        self._admitted = 0  # ranks given
        self.learned = LearnedClaims(ledger, params)
        self.patience = Patience()
        self._closed: list[int] = []  # by class: replicas found closed since they last had room freed
        self._why: list[Choice] = []
        self._next_slot = 0

    # --- a new session -----------------------------------------------------------------------------------------
    def enter(self, request: Request) -> Choice:
        index = request.session.klass.index
        while len(self._closed) <= index:
            self._closed.append(0)
            self._why.append(NO_REPLICA)
        usable = self.candidates(request)
        if not usable:
            return NO_REPLICA
        open_slots = usable & ~self._closed[index]
        newcomer = self._newcomer(request)
        while open_slots:
            choices = [self._try(slot, request, newcomer) for slot in self._some(request, open_slots)]
            best: Choice | None = None
            for slot, choice in choices:
                if choice.replica is None:
                    self._closed[index] |= 1 << slot
                    self._why[index] = choice
                    open_slots &= ~(1 << slot)
                elif best is None or choice.inputs["fill"] < best.inputs["fill"]:
                    best = choice
            if best is not None and best.replica is not None:
                self.turn.took(best.replica.slot)
                self.outlook.add(best.replica.slot, newcomer)
                return best
        return self._why[index]

    def _some(self, request: Request, slots: int) -> list[int]:
        limit = self.params.placement.candidates
        chosen = self.turn.some(slots, limit)
        group = request.session.group
        if group is not None:
            chosen += [slot for slot in list(group.on)[:limit] if slots >> slot & 1 and slot not in chosen]
        return chosen

    def _newcomer(self, request: Request) -> list[float]:
        session = request.session
        tokens = float(max(1, request.prompt_tokens, session.tokens))
        return self.outlook.one(Held(session.klass, tokens, tokens, session.expected_tokens))

    def _try(self, slot: int, request: Request, newcomer: list[float]) -> tuple[int, Choice]:
        ledger = self.ledger
        replica = ledger.at(slot)
        live = len(replica.live) - self.set_of(replica).dormant
        capacity = replica.capacity_tokens
        stale = ledger.stale(replica, ledger.now_s)
        if capacity is None or stale:
            cap = self.params.replica.unknown_sessions
            inputs = {"sessions": live, "cap": cap, "fill": float(live)}
            reason = "capacity_unknown" if capacity is None else "stale_state"
            return slot, Choice(replica, "admitted", inputs) if live < cap else Choice(None, reason, inputs)
        room = self.own.admit_fraction * capacity
        cap = max(1, int(room / self.learned.mean_tokens))
        if live >= cap:
            return slot, Choice(None, "replica_cap", {"sessions": live, "cap": cap})
        needed = self._needed(replica, request, newcomer)
        inputs = {"sessions": live, "needed_tokens": needed, "capacity_tokens": room, "fill": needed / capacity}
        if needed > room and live:
            return slot, Choice(None, "occupancy", inputs)
        return slot, Choice(replica, "admitted", inputs)

    def session_limit(self) -> int | None:
        return session_limit(self)

    def _needed(self, replica: Replica, request: Request, newcomer: list[float]) -> float:
        """Tokens that the replica is expected to hold with the newcomer, now or at the worst horizon."""
        working_set = self.set_of(replica)
        now = working_set.claimed_tokens(self.ledger.now_s) + newcomer[0]
        later = max(a + b for a, b in zip(self.outlook.means(replica.slot), newcomer, strict=True))
        shared = min(working_set.shared_tokens(_key(request.session)), request.prompt_tokens)
        return max(now, later) - shared

    # --- a continuation ----------------------------------------------------------------------------------------
    def proceed(self, request: Request) -> Replica | str:
        session = request.session
        replica = session.replica
        if replica is None or not replica.usable or request.failed & replica.bit:
            return self.repin(request) or "no_replica"
        claim = self.claims.get(session)
        if claim is None or session.state != LIVE or claim.slot != replica.slot:
            return replica
        working_set = self.set_of(replica)
        claim.growing.pop(request.id, None)  # the replica gave it back
        claim.asked = max(claim.asked, request.prompt_tokens)
        if claim.dormant:
            self._wake(session, claim, working_set)
        working_set.update(session, claim)
        if self._passes(request, session, replica, working_set):
            return replica
        return self._roomier(request, claim, replica) or self._pause(request, claim, working_set)

    def _passes(self, request: Request, session: Session, replica: Replica, working_set: WorkingSet) -> bool:
        ledger = self.ledger
        now_s = ledger.now_s
        if replica.capacity_tokens is None or session.running or working_set.claims_first(session):
            return True
        limit = self.own.resident_fraction * replica.capacity_tokens
        claimed = working_set.claimed_up_to(session, now_s) + working_set.pinned_after(session, now_s)
        if claimed <= limit or now_s - request.arrived_s >= self.own.pause_limit_s:
            return True
        return ledger.stale(replica, now_s)

    def _wake(self, session: Session, claim: Claim, working_set: WorkingSet) -> None:
        working_set.wake(claim)
        context = max(session.tokens, claim.asked)
        self.outlook.add(
            claim.slot, self.outlook.one(Held(session.klass, context, context - claim.shared, session.expected_tokens))
        )

    def _pause(self, request: Request, claim: Claim, working_set: WorkingSet) -> str:
        if not request.held:
            working_set.pause(request, claim.rank)
        return "not_resident"

    def _roomier(self, request: Request, claim: Claim, replica: Replica) -> Replica | None:
        """Another replica that would take it as a new session, once its wait has cost more than its prefill."""
        ledger = self.ledger
        waited_s = ledger.now_s - request.arrived_s
        if waited_s < request.prompt_tokens / ledger.prefill_rate(replica):
            return None
        others = self.candidates(request) & ~replica.bit
        if not others:
            return None
        newcomer = self._newcomer(request)
        tried = [
            self._try(slot, request, newcomer)[1] for slot in self.turn.some(others, self.params.placement.candidates)
        ]
        fitting = [choice for choice in tried if choice.replica is not None and "needed_tokens" in choice.inputs]
        if not fitting:
            return None
        best = min(fitting, key=lambda choice: choice.inputs["fill"]).replica
        if best is not None:
            self.outlook.add(best.slot, newcomer)
        return best

    def repin(self, request: Request) -> Replica | None:
        """An admitted session must move: to the replica that it fills least."""
        usable = self.candidates(request)
        if not usable:
            return None
        newcomer = self._newcomer(request)
        tried = {slot: self._fill(slot, request, newcomer) for slot in self._some(request, usable)}
        slot = min(tried, key=tried.__getitem__)
        self.turn.took(slot)
        self.outlook.add(slot, newcomer)
        return self.ledger.at(slot)

    def _fill(self, slot: int, request: Request, newcomer: list[float]) -> float:
        replica = self.ledger.at(slot)
        capacity = replica.capacity_tokens
        return self._needed(replica, request, newcomer) / capacity if capacity else float(len(replica.live))

    # --- what happened -----------------------------------------------------------------------------------------
    def placed(self, request: Request, replica: Replica) -> None:
        session = request.session
        if session.state != LIVE:
            return
        claim = self.claims.get(session)
        working_set = self.set_of(replica)
        if claim is not None and claim.dormant:
            self._wake(session, claim, self.sets[claim.slot])
        if claim is None:
            self._admitted += 1
            claim = self.claims[session] = Claim(self._admitted, replica.slot, _key(session))
            working_set.add(session, claim)
        elif claim.slot != replica.slot:
            self.sets[claim.slot].remove(session, claim)
            claim.slot, claim.shared = replica.slot, 0
            claim.growing.clear()
            working_set.add(session, claim)
        claim.asked = 0
        claim.growing[request.id] = int(working_set.clock.at(self.ledger.now_s))
        working_set.update(session, claim)

    def progressed(self, request: Request) -> bool:
        session = request.session
        claim = self.claims.get(session)
        if claim is None or request.id not in claim.growing:
            return False
        working_set = self.sets[claim.slot]
        now_s = self.ledger.now_s
        before = working_set.claimed_tokens(now_s)
        claim.growing[request.id] = int(working_set.clock.at(now_s))
        working_set.update(session, claim)
        if working_set.claimed_tokens(now_s) >= before:
            return False
        working_set.freed = True  # the clock had run ahead
        return True

    def withdrawn(self, request: Request) -> None:
        session = request.session
        claim = self.claims.get(session)
        if claim is not None and not session.waiting:
            claim.asked = 0
            working_set = self.sets[claim.slot]
            working_set.update(session, claim)
            working_set.freed = True

    def answered(self, request: Request, event: RequestEnded) -> None:
        session = request.session
        claim = self.claims.get(session)
        if claim is None:
            return
        working_set = self.sets[claim.slot]
        if claim.growing.pop(request.id, None) is not None:
            if event.completion_tokens is not None:
                seconds = self.ledger.now_s - request.arrived_s
                working_set.clock.answered(event.completion_tokens, seconds, self.ledger.now_s)
            if session.turns == 1 and not session.generation and event.cached_tokens is not None:
                self._learn_shared(session, claim, working_set, min(event.cached_tokens, request.prompt_tokens))
        if not session.waiting:
            claim.asked = 0
        working_set.update(session, claim)
        working_set.freed = True

    def _learn_shared(self, session: Session, claim: Claim, working_set: WorkingSet, cached: int) -> None:
        if cached and session.group is None:
            cached = self.learned.shared_tokens(claim.key, cached)
        self.learned.shares(session.klass, cached)
        if cached:
            working_set.share(session, claim, cached)

    def ended(self, session: Session) -> None:
        claim = self.claims.pop(session, None)
        if claim is None:
            return
        working_set = self.sets[claim.slot]
        working_set.remove(session, claim)
        replica = self.ledger.slots[claim.slot]
        if replica is not None:
            self._left(replica)
            self._reopen(replica.bit)

    def _left(self, replica: Replica) -> None:
        if len(replica.live) <= self.params.occupancy.exact_sessions:
            self._rebuild(replica)
        else:
            self.outlook.scale(replica.slot, 1.0 - 1.0 / (len(replica.live) + 1))

    def _reopen(self, slots: int) -> None:
        for index in range(len(self._closed)):
            self._closed[index] &= ~slots

    def resumable(self) -> Iterator[Request]:
        """Paused requests to try again: on each replica with room freed, the oldest, as long as they fit."""
        for working_set in self.sets:
            if not working_set.freed:
                continue
            working_set.freed = False
            while (request := working_set.longest_admitted()) is not None:
                yield request
                if request.held:
                    break

    # --- replicas ----------------------------------------------------------------------------------------------
    def set_of(self, replica: Replica) -> WorkingSet:
        while len(self.sets) <= replica.slot:
            self.sets.append(WorkingSet(self.ledger.now_s))
        return self.sets[replica.slot]

    def replica_added(self, replica: Replica) -> None:
        if not len(self.set_of(replica).order):  # the slot's last replica may have been another one
            self.sets[replica.slot] = WorkingSet(self.ledger.now_s)
        self.outlook.prior_tokens = self.learned.prior_tokens()
        self._rebuild(replica)
        self._reopen(replica.bit)

    def sampled(self, replica: Replica, sample: ReplicaSample) -> None:
        working_set = self.set_of(replica)
        working_set.clock.sampled(sample)
        working_set.freed = True
        self._reopen(replica.bit)

    # --- the control step --------------------------------------------------------------------------------------
    def tick(self) -> None:
        self.outlook.prior_tokens = self.learned.prior_tokens()
        self.outlook.step()
        self.learned.step()
        self.patience.step()
        slots = self.ledger.slots
        left = self.params.occupancy.sessions_per_step
        for _ in range(len(slots)):
            slot = self._next_slot % len(slots)
            self._next_slot = slot + 1
            replica = slots[slot]
            if replica is not None:
                self._tell_growth(replica)
                self._rebuild(replica)
                left -= len(replica.live) + 1
            if left <= 0:
                break
        self._reopen(-1)

    def _tell_growth(self, replica: Replica) -> None:
        """Unseen growth is told to the ledger as progress, or the sizes of classes would be learned from those only
        that have ended: the short ones first."""
        ledger = self.ledger
        working_set = self.set_of(replica)
        clock = int(working_set.clock.at(ledger.now_s))
        for session in replica.live:
            claim = self.claims.get(session)
            if claim is None or claim.slot != replica.slot:
                continue
            if not session.running and not session.waiting and not claim.dormant:
                if ledger.now_r - session.last_active_r > self.patience.of(session.klass, replica):
                    working_set.doze(session, claim)
                continue
            for request_id, since in claim.growing.items():
                if clock - since >= TOLD_TOKENS:
                    request = ledger.requests[request_id]
                    ledger.progress(request, request.completion_tokens + clock - since)
                    claim.growing[request_id] = clock
                    working_set.update(session, claim)

    def _rebuild(self, replica: Replica) -> None:
        working_set = self.set_of(replica)
        self.outlook.rebuild(replica.slot, self._held(replica, working_set))

    def _held(self, replica: Replica, working_set: WorkingSet) -> Iterator[Held]:
        now_s = self.ledger.now_s
        for session in replica.live:
            claim = self.claims.get(session)
            if claim is not None and claim.slot == replica.slot and not claim.dormant:
                tokens, charge = working_set.claim_tokens(session, claim, now_s)
                yield Held(session.klass, tokens, charge, session.expected_tokens)

    def estimates(self) -> dict[str, object]:
        return estimates(self)


def _key(session: Session) -> Hashable:
    """Whom it shares its first prompt with."""
    return session.klass.name if session.group is None else ("group", session.group.name)
