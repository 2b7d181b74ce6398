"""One run of one scenario under one policy, scored.

Efficiency is the contract rate over that of the same run with unbounded KV: the same sessions on replicas that never
evict, placed by least live sessions and never held. `unbounded` makes that scenario.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

import msgspec

from tidegate.policy.params import CoreParams
from tidegate.sim.cluster import Cluster
from tidegate.sim.distributions import percentile
from tidegate.sim.gate import Recorder
from tidegate.sim.scenario import ReplicaSpec, Scenario
from tidegate.sim.score import Score, Window, score, total_variation_pp
from tidegate.sim.timeline import Observer, Timeline
from tidegate.types import WorkloadClass

UNBOUNDED_POLICY = "sticky_least_loaded"
_UNBOUNDED_BLOCKS = 1 << 40


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    scenario: str
    policy: str
    seed: int
    replicas: int
    in_flight: int
    score: Score
    simulated_s: float
    wall_s: float
    events: int  # of the kernel
    decisions: int  # events that the scheduler handled
    refusals: int
    repins: int
    inventory: dict[str, int]  # sessions in flight at the end, by class
    tv_with_inventory_pp: float | None  # of completed sessions and those in flight together
    hold_p95_by_class_s: dict[WorkloadClass, float]  # of the calls that were held; without classes of which none was
    block_time: dict[str, float]  # token-seconds of KV, by class, of the calls answered, in the window
    utilisation: float  # block-time / (capacity x window)
    timeline: Timeline | None = None


def run(
    scenario: Scenario,
    policy: str,
    seed: int = 0,
    params: CoreParams = CoreParams(),  # noqa: B008 - frozen
    *,
    label: str = "",
    recorder: Recorder | None = None,
    observe: bool = False,
) -> RunResult:
    """`label`: the policy's name in the result, where its parameters are part of it. `observe`: with a timeline."""
    began_s = time.perf_counter()
    cluster = Cluster(scenario, policy, params, seed, recorder=recorder)
    window = Window(scenario.warmup_s, scenario.warmup_s + scenario.duration_s)
    observer = Observer(cluster, window.end_s) if observe else None
    cluster.run(window.start_s)
    before = _preemptions(cluster)
    cluster.run(window.end_s)
    clients = cluster.clients
    shares = scenario.shares or cluster.workload.shares
    inventory = dict(Counter(rollout.plan.workload for rollout in clients.live.values()))
    block_time: dict[WorkloadClass, float] = {}
    for at_s, workload, token_s in clients.block_time:
        if at_s in window:
            block_time[workload] = block_time.get(workload, 0.0) + token_s
    held = [(workload, hold_s) for at_s, workload, hold_s in clients.holds_s if at_s in window]
    holds_s = [hold_s for _, hold_s in held]
    scored = score(
        [*clients.ended, *clients.open_sessions()],
        clients.requests,
        shares,
        window,
        holds_s=(percentile(holds_s, 0.5), percentile(holds_s, 0.95)) if holds_s else None,
        preemptions=_preemptions(cluster) - before,
    )
    return RunResult(
        scenario=scenario.name,
        policy=label or policy,
        seed=seed,
        replicas=scenario.replica_count,
        in_flight=scenario.trainer.in_flight,
        score=scored,
        simulated_s=window.end_s,
        wall_s=time.perf_counter() - began_s,
        events=cluster.kernel.events,
        decisions=cluster.gate.handled,
        refusals=clients.refusals,
        repins=cluster.gate.repins,
        inventory=inventory,
        tv_with_inventory_pp=total_variation_pp(Counter(scored.completed) + Counter(inventory), shares),
        hold_p95_by_class_s=_hold_p95_by_class_s(held),
        block_time=block_time,
        utilisation=sum(block_time.values()) / (_capacity_tokens(scenario) * window.length_s),
        timeline=observer.timeline if observer is not None else None,
    )


def unbounded(scenario: Scenario) -> Scenario:
    replicas = tuple(
        ReplicaSpec(config=msgspec.structs.replace(spec.config, num_blocks=_UNBOUNDED_BLOCKS), count=spec.count)
        for spec in scenario.replicas
    )
    return msgspec.structs.replace(scenario, replicas=replicas)


def _hold_p95_by_class_s(held: Iterable[tuple[WorkloadClass, float]]) -> dict[WorkloadClass, float]:
    """Of the calls that did wait."""
    waits: dict[WorkloadClass, list[float]] = {}
    for workload, hold_s in held:
        if hold_s > 0.0:
            waits.setdefault(workload, []).append(hold_s)
    return {workload: percentile(values, 0.95) for workload, values in sorted(waits.items())}


def _preemptions(cluster: Cluster) -> int:
    return cluster.lost_preemptions + sum(replica.totals().preemptions for replica in cluster.replicas.values())


def _capacity_tokens(scenario: Scenario) -> int:
    return sum(spec.config.num_blocks * spec.config.block_size * spec.count for spec in scenario.replicas)
