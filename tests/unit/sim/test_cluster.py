"""The simulated shell keeps the router's promises, and a run obeys the laws of queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tidegate.errors import ConfigError
from tidegate.policy.params import CoreParams
from tidegate.policy.scheduler import Scheduler
from tidegate.sim.cluster import Cluster
from tidegate.sim.disturbances import ReplicaLoss
from tidegate.sim.monitor import MonitorSpec
from tidegate.sim.run import run, unbounded
from tidegate.sim.scenario import Scenario
from tidegate.sim.scenarios import scenario
from tidegate.sim.trainer import TrainerSpec
from tidegate.types import (
    AnyDecision,
    AnyEvent,
    Place,
    ReplicaResidency,
    ReplicaSample,
    RequestArrived,
    RequestEnded,
    RequestProgress,
    SessionFinished,
    Tick,
)


def small(**changes: Any) -> Scenario:
    base = scenario("vllm-cpu")
    return msgspec.structs.replace(base, warmup_s=10.0, duration_s=50.0, **changes)


def log_of(case: Scenario, policy: str = "misa_t", seed: int = 0) -> list[tuple[AnyEvent, Sequence[AnyDecision]]]:
    log: list[tuple[AnyEvent, Sequence[AnyDecision]]] = []
    cluster = Cluster(case, policy, CoreParams(), seed, recorder=lambda event, made: log.append((event, made)))
    cluster.run(60.0)
    return log


def test_every_request_that_arrived_ends_once_or_is_under_way() -> None:
    arrived, ended = Counter[int](), Counter[int]()
    for event, _ in log_of(small()):
        if isinstance(event, RequestArrived):
            arrived[event.request] += 1
        elif isinstance(event, RequestEnded):
            ended[event.request] += 1
    assert set(arrived.values()) == set(ended.values()) == {1}
    assert 0 < len(arrived) - len(ended) <= 24
    assert not set(ended) - set(arrived)


def test_a_recorded_run_gives_the_same_decisions_to_a_fresh_scheduler() -> None:
    scheduler = Scheduler("misa_t")
    for event, decisions in log_of(small()):
        assert scheduler.handle(event) == decisions


def test_time_never_runs_backwards_in_the_log_but_for_readings() -> None:
    times = [event.at_s for event, _ in log_of(small()) if not isinstance(event, ReplicaSample | ReplicaResidency)]
    assert times == sorted(times)


def test_ticks_come_at_the_schedulers_own_period() -> None:
    ticks = [event.at_s for event, _ in log_of(small()) if isinstance(event, Tick)]
    assert ticks == pytest.approx([Scheduler("misa_t").tick_s * n for n in range(1, len(ticks) + 1)])


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    assert log_of(small()) == log_of(small())
    assert log_of(small()) != log_of(small(), seed=1)


def test_readings_carry_the_time_when_they_were_taken() -> None:
    late = small(monitor=MonitorSpec(period_s=1.0, delay_s=3.0))
    cluster = Cluster(late, "misa_t", CoreParams(), 0)
    ages: list[float] = []
    cluster.gate._recorder = lambda event, made: (
        ages.append(cluster.kernel.now_s - event.at_s) if isinstance(event, ReplicaSample) else None
    )
    cluster.run(20.0)
    assert len(ages) >= 20
    assert ages == pytest.approx([3.0] * len(ages))


def test_lost_readings_do_not_arrive() -> None:
    outage = small(monitor=MonitorSpec(outage_s=(20.0, 40.0)))
    times = [event.at_s for event, _ in log_of(outage) if isinstance(event, ReplicaSample)]
    assert not [at_s for at_s in times if 20.0 <= at_s < 40.0]
    assert min(times) < 20.0
    assert max(times) >= 40.0


def test_unbounded_kv_never_evicts_and_never_preempts() -> None:
    cluster = Cluster(unbounded(small()), "sticky_least_loaded", CoreParams(), 0)
    cluster.run(60.0)
    totals = [replica.totals() for replica in cluster.replicas.values()]
    assert [total.evicted_blocks for total in totals] == [0, 0]
    assert sum(total.preemptions for total in totals) == 0
    assert sum(total.prompt_tokens for total in totals) > 100_000


def test_littles_law_holds_for_sessions() -> None:
    """Sessions in flight = rate of completions x mean time in the system, over a long window."""
    case = msgspec.structs.replace(small(), duration_s=900.0)
    score = run(case, "misa_t", 0).score
    ended = sum(score.completed.values())
    spent_s = sum(score.residency_s[name] * count for name, count in score.completed.items())
    assert score.mean_in_flight == pytest.approx(24, abs=0.1)
    assert ended * spent_s / ended / score.window_s == pytest.approx(24, rel=0.08)


def test_tokens_that_come_out_are_those_that_were_asked_for() -> None:
    cluster = Cluster(msgspec.structs.replace(small(), warmup_s=0.0), "sticky_least_loaded", CoreParams(), 0)
    cluster.run(60.0)
    made = sum(replica.totals().generation_tokens for replica in cluster.replicas.values())
    answered = sum(request.output_tokens for request in cluster.clients.requests)
    under_way = sum(
        cluster.replicas[rollout.replica].generated(rollout.call)
        for rollout in cluster.clients.live.values()
        if rollout.call is not None and rollout.replica is not None and rollout.call.placed_s is not None
    )
    assert made == answered + under_way


def test_a_system_without_new_sessions_drains() -> None:
    case = small(trainer=TrainerSpec(mode="synchronous", in_flight=8, batch=8, train_s=1e6))
    cluster = Cluster(case, "misa_t", CoreParams(), 0)
    cluster.run(600.0)
    assert len(cluster.clients.ended) == 8
    assert not cluster.clients.live
    for replica in cluster.replicas.values():
        totals = replica.totals()
        assert (totals.running, totals.waiting, totals.used_blocks) == (0, 0, 0)
    view = cluster.gate.scheduler.view(600.0)
    assert (view.live, view.held, view.in_flight) == (0, 0, 0)


def test_fast_and_exact_replicas_give_the_same_score() -> None:
    fast, exact = (run(small(fidelity=fidelity), "sticky_least_loaded", 0).score for fidelity in ("fast", "exact"))
    for name in ("completed", "hit_rate", "prompt_tokens", "recomputed_prompt_tokens", "preemptions"):
        assert getattr(fast, name) == getattr(exact, name), name
    assert fast.residency_s == pytest.approx(exact.residency_s)


def test_a_lost_replica_costs_no_session_and_comes_back_empty() -> None:
    case = small(losses=(ReplicaLoss(replica=0, at_s=20.0, back_s=30.0),))
    log = log_of(case)
    result = run(case, "misa_t", 0)
    assert result.score.failed == 0
    placed = [
        decision.replica
        for event, decisions in log
        if 20.01 < event.at_s < 30.0
        for decision in decisions
        if isinstance(decision, Place)
    ]
    assert set(placed) == {"http://replica-1"}
    assert any(
        decision.replica == "http://replica-0"
        for event, decisions in log
        if event.at_s > 30.0
        for decision in decisions
        if isinstance(decision, Place)
    )


def test_streamed_replies_of_a_lost_replica_fail_and_are_asked_for_again() -> None:
    case = small(losses=(ReplicaLoss(replica=0, at_s=20.0, back_s=30.0),), streams=True)
    log = log_of(case)
    assert any(isinstance(event, RequestEnded) and event.outcome == "replica_lost" for event, _ in log)
    assert any(isinstance(event, RequestProgress) for event, _ in log)
    assert run(case, "misa_t", 0).score.failed == 0


def test_clients_that_do_not_finish_leave_it_to_the_gate() -> None:
    assert not any(isinstance(event, SessionFinished) for event, _ in log_of(small(finishes=False)))


def test_unlabelled_requests_carry_no_class() -> None:
    labels = {e.workload for e, _ in log_of(small(labelled=0.0)) if isinstance(e, RequestArrived)}
    some = {e.workload for e, _ in log_of(small(labelled=0.5)) if isinstance(e, RequestArrived)}
    assert labels == {None}
    assert some == {None, "agentic", "rlvr", "rlhf"}


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'misa_t'"):
        Cluster(small(), "misat", CoreParams(), 0)
