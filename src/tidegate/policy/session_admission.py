"""session_admission: a global session cap per replica, and no more expected footprints than its memory holds.

On a request of a session that is not admitted, for replicas in order of the placement cost

    c(r, w) = d_w + (L_r - H_{r,w}) / mu_w                                                                    Eq (1)

it is placed on the first one w that is open: usable, its state known and fresh, |O_w u P_w| < K_w, and constraint (3)
holds with it (forecast.py); else it is held. The ledger counts an admission in the same step, so P_w (admitted since
the last snapshot) is in every count. Costs that differ by no more than mu is uncertain are equal: then the replica
with the least expected occupancy goes first, then the rotating turn. A replica without sessions takes one always, so
that a session larger than expected cannot stop the pool. A continuation is never held.

    K_w = base cap = C_w / mean kbar of the unfinished sessions (running ones included), contracted under confirmed
    pressure (pressure.py). A replica of unknown capacity or with stale state takes new sessions up to a small fixed
    number, and says so.

Held heads go strictly first come first served over all classes: no small session overtakes a large one for ever.

Replicas found closed are left out until something frees room on them: a session of theirs ends, or a control step.
So an arrival at a full pool costs a few operations on bit masks.
"""

from __future__ import annotations

from typing import NamedTuple

from tidegate.policy.base import NO_REPLICA, Choice, Sticky
from tidegate.policy.control import prior_footprint_tokens
from tidegate.policy.entities import ClassLedger, Replica, Request, Session
from tidegate.policy.forecast import Forecast, Load
from tidegate.policy.ledger import Ledger
from tidegate.policy.params import CoreParams
from tidegate.policy.placement import members
from tidegate.policy.pressure import PressureCap
from tidegate.policy.unseen import UnseenGrowth
from tidegate.types import ReplicaSample, RequestEnded


class Candidate(NamedTuple):
    cost_s: float
    occupancy: float
    turn: int
    replica: Replica


class SessionAdmission(Sticky):
    name = "session_admission"

    def __init__(self, ledger: Ledger, params: CoreParams, seed: int) -> None:
        super().__init__(ledger, params, seed)
        self.pressures: list[PressureCap] = []
        self.base_caps: list[int] = []
        self.forecast = Forecast(ledger, params.occupancy, prior_footprint_tokens(ledger))
        self.unseen = UnseenGrowth(ledger)
        self._closed: list[int] = []  # by class: replicas found closed since they last had room freed
        self._why: list[Choice] = []  # by class: what closed the cheapest of them
        self._unknown_bits = 0  # replicas of unknown capacity or stale state, by the last look
        self._stepped_s = 0.0

    # --- a new session -----------------------------------------------------------------------------------------
    def enter(self, request: Request) -> Choice:
        klass = request.session.klass
        self._grow(klass)
        usable = self.candidates(request)
        if not usable:
            return NO_REPLICA
        open_slots = usable & ~self._closed[klass.index]
        if not open_slots:
            return self._why[klass.index]
        added = self.forecast.newcomer(request.session, request.prompt_tokens)
        while open_slots:
            for candidate in self._by_cost(request, open_slots):
                replica = candidate.replica
                choice = self._try(replica, klass, added, candidate.cost_s)
                if choice.replica is not None:
                    self.turn.took(replica.slot)
                    self.forecast.admitted(replica, added)
                    return choice
                if not self._closed[klass.index] & usable:
                    self._why[klass.index] = choice
                self._closed[klass.index] |= replica.bit
                open_slots &= ~replica.bit
        return self._why[klass.index]

    def repin(self, request: Request) -> Replica | None:
        """An admitted session must move: to the cheapest replica with room, or else to the least occupied."""
        usable = self.candidates(request)
        if not usable:
            return None
        self._grow(request.session.klass)
        added = self.forecast.newcomer(request.session, request.prompt_tokens)
        candidates = self._by_cost(request, usable)
        for candidate in candidates:
            if self._try(candidate.replica, request.session.klass, added, candidate.cost_s).replica is not None:
                break
        else:
            candidate = min(candidates, key=lambda c: (c.occupancy, c.turn))
        self.turn.took(candidate.replica.slot)
        self.forecast.admitted(candidate.replica, added)
        return candidate.replica

    def _by_cost(self, request: Request, slots: int) -> list[Candidate]:
        limit = self.params.placement.candidates
        chosen = self.turn.some(slots, limit)
        group = request.session.group
        if group is not None:
            chosen += [slot for slot in list(group.on)[:limit] if slots >> slot & 1 and slot not in chosen]
        found = [self._candidate(request, slot, turn) for turn, slot in enumerate(chosen)]
        least_s = min(candidate.cost_s for candidate in found)
        params = self.params.placement
        tied_s = max(least_s * (1.0 + params.tie_fraction), least_s + params.tie_s)
        return sorted(found, key=lambda c: (0.0 if c.cost_s <= tied_s else c.cost_s, c.occupancy, c.turn))

    def _candidate(self, request: Request, slot: int, turn: int) -> Candidate:
        ledger = self.ledger
        replica = ledger.at(slot)
        reusable = ledger.reusable_tokens(request.session, replica)
        uncached = request.prompt_tokens - reusable if reusable < request.prompt_tokens else 0
        cost_s = (replica.credit_new + replica.credit_old + uncached) / ledger.prefill_rate(replica)
        capacity = replica.capacity_tokens
        occupancy = self.forecast.of(replica).peak_tokens / capacity if capacity else float(len(replica.live))
        return Candidate(cost_s, occupancy, turn, replica)

    def _try(self, replica: Replica, klass: ClassLedger, added: Load, cost_s: float) -> Choice:
        live = len(replica.live)
        unknown = self._unknown(replica)
        if unknown is not None:
            cap = self.params.replica.unknown_sessions
            inputs = {"sessions": live, "cap": cap, "cost_s": cost_s}
            return Choice(replica, "admitted", inputs) if live < cap else Choice(None, unknown, inputs)
        cap, contracted = self.session_cap(replica)
        if live >= cap:
            reason = "pressure" if contracted else "replica_cap"
            return Choice(None, reason, {"sessions": live, "cap": cap, "pressure": self.pressure(replica)})
        refusal = self.refuse_class(replica, klass)
        if refusal is not None:
            return refusal
        needed = self.forecast.needed(replica, added)
        capacity = self.forecast.capacity(replica)
        inputs = {"sessions": live, "cap": cap, "needed_tokens": needed, "capacity_tokens": capacity, "cost_s": cost_s}
        if needed > capacity and live:
            return Choice(None, "occupancy", inputs)
        return Choice(replica, "admitted", inputs)

    def refuse_class(self, replica: Replica, klass: ClassLedger) -> Choice | None:
        """Class caps, for policies that have them."""
        return None

    def _unknown(self, replica: Replica) -> str | None:
        if replica.capacity_tokens is None:
            return "capacity_unknown"
        return "stale_state" if self.ledger.stale(replica, self.ledger.now_s) else None

    def session_cap(self, replica: Replica) -> tuple[int, bool]:
        """K_w, and whether pressure contracted it."""
        self._grow_slots(replica)
        contracted = self.pressures[replica.slot].cap
        base = self.base_caps[replica.slot]
        return (base, False) if contracted is None or contracted >= base else (contracted, True)

    def session_limit(self) -> int | None:
        usable = [self.ledger.at(slot) for slot in members(self.ledger.usable)]
        return sum(self.narrowed(replica, self.session_cap(replica)[0]) for replica in usable)

    # --- what running requests make ----------------------------------------------------------------------------
    def placed(self, request: Request, replica: Replica) -> None:
        self.unseen.placed(request, replica)

    def progressed(self, request: Request) -> bool:
        self.unseen.progressed(request)
        return False

    def answered(self, request: Request, event: RequestEnded) -> None:
        self.unseen.answered(request, event)

    # --- what frees room ---------------------------------------------------------------------------------------
    def ended(self, session: Session) -> None:
        replica = session.replica
        if replica is not None and replica.usable:
            self.forecast.left(replica)
            self._reopen(replica.bit)

    def _reopen(self, slots: int) -> None:
        for index in range(len(self._closed)):
            self._closed[index] &= ~slots

    def replica_added(self, replica: Replica) -> None:
        self._grow_slots(replica)
        self.unseen.replica_added(replica)
        self.pressures[replica.slot] = PressureCap(self.params.pressure)
        self.forecast.prior_tokens = prior_footprint_tokens(self.ledger)
        self.base_caps[replica.slot] = self._base_cap(replica)
        self.forecast.rebuild(replica)
        if self._unknown(replica):
            self._unknown_bits |= replica.bit
        self.capacities_changed()
        self._reopen(replica.bit)

    def sampled(self, replica: Replica, sample: ReplicaSample) -> None:
        self.unseen.sampled(replica, sample)
        if self._unknown_bits & replica.bit:
            self._unknown_bits &= ~replica.bit
            self._grow_slots(replica)
            self.forecast.prior_tokens = prior_footprint_tokens(self.ledger)
            self.base_caps[replica.slot] = self._base_cap(replica)
            self.capacities_changed()
            self._reopen(replica.bit)

    def capacities_changed(self) -> None:
        """A replica came, or its capacity became known: for policies that divide it."""

    # --- the control step --------------------------------------------------------------------------------------
    def tick(self) -> None:
        ledger = self.ledger
        now_s = ledger.now_s
        dt_s = max(0.0, now_s - self._stepped_s)
        self._stepped_s = now_s
        self.unseen.tell(self.params.occupancy.sessions_per_step)
        self.forecast.prior_tokens = prior_footprint_tokens(ledger)
        self.forecast.step()
        for slot in members(ledger.usable):
            replica = ledger.at(slot)
            self._grow_slots(replica)
            base = self.base_caps[slot] = self._base_cap(replica)
            self.pressures[slot].step(replica.signals, len(replica.live), base, now_s, dt_s)
        self._unknown_bits = sum(ledger.at(s).bit for s in members(ledger.usable) if self._unknown(ledger.at(s)))
        self._reopen(-1)

    def _base_cap(self, replica: Replica) -> int:
        return max(1, int(self.forecast.capacity(replica) / max(1.0, self.mean_footprint_tokens())))

    def mean_footprint_tokens(self) -> float:
        """The moving reference of session length: kbar over the sessions that are unfinished now, or, in an empty
        pool, over those that came lately."""
        classes = self.ledger.classes
        weights = [float(klass.demand) for klass in classes]
        if not any(weights):
            weights = [klass.recent for klass in classes]
        sessions = sum(weights)
        tokens = sum(weight * self.kbar_tokens(klass) for weight, klass in zip(weights, classes, strict=True))
        return tokens / sessions if sessions > 0.0 else self.forecast.prior_tokens

    def kbar_tokens(self, klass: ClassLedger) -> float:
        return klass.profile.footprint_tokens or self.forecast.prior_tokens

    def _grow(self, klass: ClassLedger) -> None:
        while len(self._closed) <= klass.index:
            self._closed.append(0)
            self._why.append(NO_REPLICA)

    def _grow_slots(self, replica: Replica) -> None:
        while len(self.pressures) <= replica.slot:
            self.pressures.append(PressureCap(self.params.pressure))
            self.base_caps.append(1)

    # --- views -------------------------------------------------------------------------------------------------
    def pressure(self, replica: Replica) -> float:
        return self.pressures[replica.slot].pressure if replica.slot < len(self.pressures) else 0.0

    def alarms(self) -> list[str]:
        return [f"pressure {self.ledger.at(slot).url}" for slot in members(self.ledger.usable) if self._pressed(slot)]

    def _pressed(self, slot: int) -> bool:
        return slot < len(self.pressures) and self.pressures[slot].confirmed

    def estimates(self) -> dict[str, object]:
        return {self.ledger.at(slot).url: self.replica_estimates(slot) for slot in members(self.ledger.usable)}

    def replica_estimates(self, slot: int) -> dict[str, object]:
        replica = self.ledger.at(slot)
        pressure = self.pressures[slot]
        return {
            "session_cap": self.session_cap(replica)[0],
            "base_cap": self.base_caps[slot],
            "contracted_cap": pressure.cap,
            "hit_efficiency": replica.signals.efficiency,
            "hit_reference": pressure.reference,
            "pressure": pressure.pressure,
            "pressure_confirmed": pressure.confirmed,
            "expected_tokens": list(self.forecast.of(replica).mean),
            "protected_tokens": self.forecast.capacity(replica),
        }
