"""What a shell may look at: the pool as /state and the metrics show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.policy.entities import ClassLedger, Replica
from tidegate.policy.ledger import Ledger
from tidegate.types import ClassView, PoolView, ReplicaView

if TYPE_CHECKING:
    from tidegate.policy.scheduler import Scheduler


def pool_view(scheduler: Scheduler, now_s: float) -> PoolView:
    ledger = scheduler.ledger
    listed = [replica for replica in ledger.slots if replica is not None]
    return PoolView(
        policy=scheduler.policy.name,
        epoch=ledger.epoch,
        paused=ledger.paused,
        live=sum(klass.live for klass in ledger.classes),
        held=sum(klass.held for klass in ledger.classes),
        paused_sessions=len({id(request.session) for request in scheduler.holds.continuations.values()}),
        in_flight=sum(replica.requests for replica in listed),
        waiting=len(scheduler.holds),
        replicas=tuple(_replica_view(scheduler, replica, now_s) for replica in listed),
        classes={klass.name: _class_view(scheduler, klass) for klass in ledger.classes},
        alarms=tuple(_alarms(scheduler, listed, now_s)),
    )


def _replica_view(scheduler: Scheduler, replica: Replica, now_s: float) -> ReplicaView:
    return ReplicaView(
        url=replica.url,
        ready=replica.usable,
        reason=replica.reason,
        sessions=len(replica.live),
        requests=replica.requests,
        kv_capacity_tokens=replica.capacity_tokens,
        kv_used_tokens=replica.tokens,
        kv_resident_tokens=replica.resident_tokens,
        stale=scheduler.ledger.stale(replica, now_s),
        hit_rate=replica.signals.hit_rate,
        pressure=scheduler.policy.pressure(replica),
    )


def _class_view(scheduler: Scheduler, klass: ClassLedger) -> ClassView:
    return ClassView(
        live=klass.live,
        held=klass.held,
        cap=scheduler.policy.cap(klass),
        footprint_tokens=klass.profile.footprint_tokens,
        residency_s=klass.profile.residency_s,
        share=share(scheduler.ledger, klass),
        completed=klass.completed,
    )


def share(ledger: Ledger, klass: ClassLedger) -> float:
    """The trainer's target, or else the mixture as it arrives."""
    if ledger.mixture:
        return ledger.mixture.get(klass.name, 0.0)
    total = sum(other.recent for other in ledger.classes)
    return klass.recent / total if total else 0.0


def _alarms(scheduler: Scheduler, listed: list[Replica], now_s: float) -> list[str]:
    ledger = scheduler.ledger
    alarms = []
    if not ledger.usable:
        alarms.append("no_usable_replica")
    for replica in listed:
        if replica.removed:
            continue
        if replica.capacity_tokens is None:
            alarms.append(f"capacity_unknown {replica.url}")
        if ledger.stale(replica, now_s):
            alarms.append(f"stale_state {replica.url}")
    return alarms + scheduler.policy.alarms()


def estimates(scheduler: Scheduler, now_s: float) -> dict[str, object]:
    ledger = scheduler.ledger
    classes: dict[str, object] = {
        klass.name: {
            "kbar_tokens": klass.profile.footprint_tokens,
            "residency_s": klass.profile.residency_s,
            "growth_tokens_per_s": klass.profile.growth_per_s,
            "doubt": klass.profile.doubt,
            "demand": klass.demand,
            "idle_ttl_s": klass.gaps.ttl_s(len(klass.idle)),
        }
        for klass in ledger.classes
    }
    replicas: dict[str, object] = {
        replica.url: {"prefill_tokens_per_s": ledger.prefill_rate(replica), "backlog_s": ledger.backlog_s(replica)}
        for replica in ledger.replicas.values()
    }
    return {"classes": classes, "replicas": replicas, "policy": scheduler.policy.estimates()}
