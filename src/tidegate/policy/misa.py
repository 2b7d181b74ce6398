"""misa and misa_t: session_admission with a cap per replica and workload class.

A new session of class b enters w only if also count_{w,b} < K_{w,b}. The caps divide C_w by demand: misa by
S = N kbar (Eqs 8-10), misa_t by block-time R = N kbar That (Eqs 11-13), so that every class's backlog would drain in
the same time (Eq 12). N counts unfinished sessions, the held ones too, which are shared over replicas by capacity; a
replica with less of a class than its part of the pool's demand is credited with that part, or it would never open for
the class. kbar and That come from running sessions as well as from ended ones (estimators.py). Rounding is feasible by
default (apportion.py), or the paper's with misa.floor = paper.

A class that has earned a slot, but for whose large sessions no memory comes free for a residency, has a replica kept
for it until its head has entered.

Of several classes that wait, the one with the lowest ratio of live sessions to its cap over all replicas goes first.
"""

from __future__ import annotations

from tidegate.policy.apportion import Apportioner, fractional_caps, paper_caps
from tidegate.policy.base import Choice
from tidegate.policy.entities import ClassLedger, Replica, Request
from tidegate.policy.ledger import Ledger
from tidegate.policy.params import CoreParams
from tidegate.policy.placement import members
from tidegate.policy.session_admission import SessionAdmission


class Misa(SessionAdmission):
    name = "misa"
    overtakes = True  # the caps bound each class: a class that does not fit must not stop the others

    def __init__(self, ledger: Ledger, params: CoreParams, seed: int) -> None:
        super().__init__(ledger, params, seed)
        self._caps: list[list[int]] = []  # by replica slot, by class
        self._pool_cap: list[int] = []  # by class
        self.apportioned_footprints: dict[int, tuple[float, list[float]]] = {}  # by slot: C_w and kbar_b of its caps
        self._entitled: list[float] = []  # by class, sessions over all replicas before rounding
        self._fractions: list[list[float]] = []
        self._apportioner = Apportioner()
        self._served_s = 0.0
        self._kept: dict[int, int] = {}  # replica slot: the only class that may enter it just now
        self._next_slot = 0

    def weight(self, klass: ClassLedger) -> float:
        """Demand of one unfinished session."""
        return self.kbar_tokens(klass)

    # --- decisions ---------------------------------------------------------------------------------------------
    def enter(self, request: Request) -> Choice:
        klass = request.session.klass
        if klass.index >= len(self._entitled) or not self._entitled[klass.index]:  # it had no demand until now
            self._apportion()
            self._reopen(-1)
        return super().enter(request)

    def refuse_class(self, replica: Replica, klass: ClassLedger) -> Choice | None:
        kept_for = self._kept.get(replica.slot)
        if kept_for is not None and kept_for != klass.index:
            return Choice(None, "reserved", {"sessions": len(replica.live)})
        count = replica.class_live[klass.index]
        cap = self.class_cap(replica, klass)
        if count < cap:
            return None
        return Choice(None, "class_cap", {"class_sessions": count, "class_cap": cap})

    def caps_at(self, slot: int) -> list[int]:
        return self._caps[slot] if slot < len(self._caps) else []

    def class_cap(self, replica: Replica, klass: ClassLedger) -> int:
        caps = self.caps_at(replica.slot)
        return caps[klass.index] if klass.index < len(caps) else 0

    def next_class(self, waiting: list[ClassLedger]) -> ClassLedger:
        return min(waiting, key=lambda klass: (klass.live / max(1, self.cap(klass) or 0), klass.index))

    def cap(self, klass: ClassLedger) -> int | None:
        return self._pool_cap[klass.index] if klass.index < len(self._pool_cap) else 0

    # --- the control step --------------------------------------------------------------------------------------
    def tick(self) -> None:
        super().tick()
        self._serve()
        self._apportion()
        self._keep_room()

    def _keep_room(self) -> None:
        """A starving class with a free slot gets a replica to itself until its head has entered: small sessions would
        take every gap for ever. Largest sessions first."""
        kept: dict[int, int] = {}
        waiting = [klass for klass in self.ledger.classes if klass.held and self._starves(klass)]
        for klass in sorted(waiting, key=lambda k: (-self.kbar_tokens(k), k.index)):
            mine = [slot for slot, index in self._kept.items() if index == klass.index and self._fits(slot, klass)]
            free = mine or [slot for slot in members(self.ledger.usable) if self._fits(slot, klass)]
            free = [slot for slot in free if slot not in kept]
            if free:
                kept[min(free, key=lambda s: (self.forecast.of(self.ledger.at(s)).peak_tokens, s))] = klass.index
        self._kept = kept

    def _starves(self, klass: ClassLedger) -> bool:
        """Nothing of it entered for a residency, though it has earned a slot."""
        patience_s = max(3.0 * self.params.misa.turn_s, klass.profile.residency_s)
        return self._apportioner.deficit_of(klass.index) >= 1.0 and self.ledger.now_r - klass.entered_r > patience_s

    def _fits(self, slot: int, klass: ClassLedger) -> bool:
        if not self.ledger.usable >> slot & 1:
            return False
        replica = self.ledger.at(slot)
        return replica.class_live[klass.index] < self.class_cap(replica, klass)

    def _serve(self) -> None:
        """Deficits: what each class is entitled to against what it has."""
        now_s = self.ledger.now_s
        turns = max(0.0, now_s - self._served_s) / self.params.misa.turn_s
        self._served_s = now_s
        for klass, entitled in zip(self.ledger.classes, self._entitled, strict=False):
            self._apportioner.serve(klass.index, min(entitled, klass.demand), klass.live, klass.held > 0, turns)

    def _apportion(self) -> None:
        """Caps of as many replicas as a step may compute, in turn."""
        ledger = self.ledger
        classes = ledger.classes
        known = [s for s in members(ledger.usable) if ledger.at(s).capacity_tokens]
        if not known or not classes:
            return
        while len(self._caps) < len(ledger.slots):
            self._caps.append([])
            self._fractions.append([])
        pool_tokens = sum(self.forecast.capacity(ledger.at(slot)) for slot in known)
        count = max(1, self.params.misa.cells_per_step // len(classes))
        for _ in range(min(count, len(known))):
            slot = next((s for s in known if s >= self._next_slot), known[0])
            if slot == known[0]:
                self._apportioner.start_pass()
            self._next_slot = slot + 1
            self._apportion_replica(ledger.at(slot), pool_tokens)
        self._pool_cap = self._sum_caps(known)

    def _sum_caps(self, known: list[int]) -> list[int]:
        classes = len(self.ledger.classes)
        caps, entitled = [0] * classes, [0.0] * classes
        for slot in known:
            for b, cap in enumerate(self._caps[slot]):
                caps[b] += cap
                entitled[b] += self._fractions[slot][b]
        self._entitled = entitled
        return caps

    def _apportion_replica(self, replica: Replica, pool_tokens: float) -> None:
        capacity = self.forecast.capacity(replica)
        part = capacity / pool_tokens
        demand, weights, footprints = [], [], []
        for klass in self.ledger.classes:
            here = replica.class_live[klass.index] + (klass.held + klass.opened) * part
            sessions = max(here, klass.demand * part)
            demand.append(sessions)
            footprints.append(self.footprint_tokens(klass, capacity))
            weights.append(sessions * self.weight(klass))
        if self.params.misa.floor == "paper":
            caps = paper_caps(capacity, weights, footprints) if sum(weights) else [0] * len(weights)
            self._fractions[replica.slot] = [float(cap) for cap in caps]
        else:
            fractions = fractional_caps(capacity, weights, footprints, demand)
            self._fractions[replica.slot] = fractions
            caps = self._apportioner.round(capacity, fractions, footprints)
        self._caps[replica.slot] = caps
        self.apportioned_footprints[replica.slot] = (capacity, footprints)

    def footprint_tokens(self, klass: ClassLedger, capacity: float) -> float:
        """kbar, as far as one session can hold it on this replica."""
        return min(max(1.0, self.kbar_tokens(klass)), max(1.0, capacity))

    def replica_added(self, replica: Replica) -> None:
        if replica.slot < len(self._caps):  # the slot's last replica may have been another one
            self._caps[replica.slot] = []
            self.apportioned_footprints.pop(replica.slot, None)
        super().replica_added(replica)

    def capacities_changed(self) -> None:
        self._apportion()

    def replica_estimates(self, slot: int) -> dict[str, object]:
        found = super().replica_estimates(slot)
        found["class_caps"] = {k.name: cap for k, cap in zip(self.ledger.classes, self.caps_at(slot), strict=False)}
        return found


class MisaT(Misa):
    name = "misa_t"

    def weight(self, klass: ClassLedger) -> float:
        return self.kbar_tokens(klass) * klass.profile.residency_s
