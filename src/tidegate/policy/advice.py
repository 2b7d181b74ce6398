"""How many sessions of each class a trainer should have in flight: what the pool holds, and a few that wait.

Completions come at rate X rho_b when the mixture is kept, so by Little's law the live sessions of class b are
X rho_b That_b, and a pool with room for L sessions holds

    L_b = L rho_b That_b / sum_c rho_c That_c

    L      the policy's own limit of live sessions, over all usable replicas. For a policy that lets all in, what the
           memory holds: sum_w n_w with n k + z sigma sqrt(n) = phi C_w; phi is the protected fraction, k and sigma the
           mean and deviation of the footprint of a session of the mixture, z how many of them are kept free. A replica
           of unknown capacity counts as the few sessions that it would be given; one whose state is stale as no more
           than it has
    held   max(1, L_b reaction / That_b) on top: the sessions that end before the trainer has started others. They wait
           at the gate and cost no memory. Under a policy that lets all in nobody would wait: there are none

Every class with a share has one session at least.

rho is the trainer's, or what arrives. Only ratios of residencies count, so a pool that slows down as a whole is given
the same advice, and nothing depends on how many sessions are in flight: a trainer that follows closes no loop. The
advice of a class rises at once and falls only when it is off by more than a band; where the pool or the mixture is
another one it is made afresh.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import Final, NamedTuple

from tidegate.policy.control import prior_footprint_tokens
from tidegate.policy.entities import ClassLedger
from tidegate.policy.placement import members
from tidegate.policy.scheduler import Scheduler
from tidegate.types import Advice, ClassAdvice, WorkloadClass

AGES_SQUARE: Final = 4.0 / 3.0  # E[x^2] / E[x]^2 of what grows evenly from nothing: a session at a random age


class _Class(NamedTuple):
    share: float
    residency_s: float
    footprint_tokens: float
    known: bool

    @property
    def weight(self) -> float:
        return self.share * self.residency_s


def _advice(one: _Class, live: int, reaction_s: float | None) -> ClassAdvice:
    """`reaction_s` None: none of them would wait."""
    held = 0 if reaction_s is None else max(1, min(live, ceil(live * reaction_s / one.residency_s)))
    return ClassAdvice(
        sessions=max(1, live + held),
        held_sessions=held,
        share=one.share,
        footprint_tokens=one.footprint_tokens,
        residency_s=one.residency_s,
        reason="learned" if one.known else "prior",
    )


class Advisor:
    """One per pool; it remembers what it said last."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._ledger = scheduler.ledger
        self._policy = scheduler.policy
        self._params = scheduler.params
        self._said: dict[WorkloadClass, int] = {}
        self._said_of: object = None  # the pool and the mixture that it was said of

    def look(self) -> Advice:
        """As of the last event."""
        classes = self._classes()
        limit, reason, inputs = self._limit(classes)
        holds = self._policy.session_limit() is not None
        live = self._steady(split(limit, {name: one.weight for name, one in classes.items()}))
        advised = {
            name: _advice(one, live[name], self._params.advice.reaction_s if holds else None)
            for name, one in classes.items()
        }
        sessions = sum(one.sessions for one in advised.values())
        return Advice(
            policy=self._policy.name,
            paused=self._ledger.paused,
            mixture_given=bool(self._ledger.mixture),
            sessions=sessions if advised else max(1, limit + holds),
            held_sessions=sum(one.held_sessions for one in advised.values()) if advised else int(holds),
            reason=reason,
            inputs=inputs,
            classes=advised,
        )

    # --- the classes -------------------------------------------------------------------------------------------
    def _classes(self) -> dict[WorkloadClass, _Class]:
        ledger = self._ledger
        known = {klass.name: klass for klass in ledger.classes}
        if ledger.mixture:
            shares = {name: share for name, share in ledger.mixture.items() if share > 0.0}
        else:
            arriving = {klass.name: klass.recent for klass in ledger.classes if klass.demand or klass.recent >= 0.5}
            total = sum(arriving.values())
            shares = {name: recent / total if total > 0.0 else 1.0 / len(arriving) for name, recent in arriving.items()}
        prior_s = self._prior_residency_s(shares, known)
        prior_tokens = prior_footprint_tokens(ledger)
        return {name: _profile(share, known.get(name), prior_s, prior_tokens) for name, share in shares.items()}

    def _prior_residency_s(self, shares: dict[WorkloadClass, float], known: dict[WorkloadClass, ClassLedger]) -> float:
        """Of a class never seen: that of the others, so that ratios stay."""
        seen = [known[name].profile.residency_s for name in shares if name in known]
        return sum(seen) / len(seen) if seen else self._params.estimators.residency_prior_s

    # --- the pool ----------------------------------------------------------------------------------------------
    def _limit(self, classes: dict[WorkloadClass, _Class]) -> tuple[int, str, dict[str, float]]:
        """L, why, and from what."""
        usable = [self._ledger.at(slot) for slot in members(self._ledger.usable)]
        if not usable:
            return 0, "no_replica", {"usable_replicas": 0}
        capacity = sum(replica.capacity_tokens or 0 for replica in usable)
        mean, deviation = self._footprint(classes)
        inputs = {
            "usable_replicas": len(usable),
            "kv_capacity_tokens": capacity,
            "mean_footprint_tokens": mean,
            "footprint_deviation_tokens": deviation,
        }
        reason = "capacity" if capacity else "capacity_unknown"
        limit = self._policy.session_limit()
        if limit is not None:
            return limit, "session_limit" if capacity else reason, inputs
        few = self._params.replica.unknown_sessions
        spare = self._params.occupancy.deviations * deviation
        fitting = 0.0
        for replica in usable:
            room = self._params.occupancy.protected_fraction * (replica.capacity_tokens or 0)
            fits = max(1.0, _fitting(room, mean, spare)) if room else few
            stale = self._ledger.stale(replica, self._ledger.now_s)
            fitting += min(fits, max(few, len(replica.live))) if stale else fits
        return int(fitting), reason, inputs

    def _footprint(self, classes: dict[WorkloadClass, _Class]) -> tuple[float, float]:
        """Mean and standard deviation over live sessions, of all classes and ages."""
        weight = sum(one.weight for one in classes.values())
        if weight <= 0.0:
            return prior_footprint_tokens(self._ledger), 0.0
        mean = sum(one.weight * one.footprint_tokens for one in classes.values()) / weight
        square = sum(one.weight * one.footprint_tokens**2 for one in classes.values()) / weight
        return max(1.0, mean), sqrt(max(0.0, AGES_SQUARE * square - mean * mean))

    # --- what was said -----------------------------------------------------------------------------------------
    def _steady(self, live: dict[WorkloadClass, int]) -> dict[WorkloadClass, int]:
        ledger = self._ledger
        pool = [(slot, ledger.at(slot).capacity_tokens) for slot in members(ledger.usable)]
        of = (pool, ledger.mixture)
        before = self._said if of == self._said_of else {}
        self._said_of = of
        self._said = {name: self._held_back(before.get(name, 0), now) for name, now in live.items()}
        return self._said

    def _held_back(self, before: int, now: int) -> int:
        band = max(1.0, self._params.advice.band_fraction * before)
        return before if now < before <= now + band else now


def _fitting(room: float, mean: float, spare: float) -> float:
    """n with n mean + spare sqrt(n) = room."""
    root = (sqrt(spare * spare + 4.0 * mean * room) - spare) / (2.0 * mean)
    return root * root


def _profile(share: float, klass: ClassLedger | None, prior_s: float, prior_tokens: float) -> _Class:
    if klass is None:
        return _Class(share, prior_s, prior_tokens, False)
    profile = klass.profile
    return _Class(share, profile.residency_s, profile.footprint_tokens or prior_tokens, bool(profile.ended))


def split(sessions: int, weights: dict[WorkloadClass, float]) -> dict[WorkloadClass, int]:
    """Whole sessions in proportion to the weights, by largest remainder; they sum to `sessions`."""
    total = sum(weights.values())
    if total <= 0.0:
        return dict.fromkeys(weights, 0)
    exact = {name: sessions * weight / total for name, weight in weights.items()}
    whole = {name: int(part) for name, part in exact.items()}
    left = sessions - sum(whole.values())
    for name in sorted(exact, key=lambda name: whole[name] - exact[name])[:left]:
        whole[name] += 1
    return whole
