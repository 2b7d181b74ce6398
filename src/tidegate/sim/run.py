"""One run of one scenario under one policy, scored.

Efficiency is the contract rate over that of the same run with unbounded KV: the same sessions on replicas that never
evict, placed by least live sessions and never held. `unbounded` makes that scenario.
"""

from __future__ import annotations

import time

import msgspec

from tidegate.policy.params import CoreParams
from tidegate.sim.cluster import Cluster
from tidegate.sim.distributions import percentile
from tidegate.sim.gate import Recorder
from tidegate.sim.scenario import ReplicaSpec, Scenario
from tidegate.sim.score import Score, Window, score

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


def run(
    scenario: Scenario,
    policy: str,
    seed: int = 0,
    params: CoreParams = CoreParams(),  # noqa: B008 - frozen
    *,
    label: str = "",
    recorder: Recorder | None = None,
) -> RunResult:
    """`label`: the policy's name in the result, where its parameters are part of it."""
    began_s = time.perf_counter()
    cluster = Cluster(scenario, policy, params, seed, recorder=recorder)
    window = Window(scenario.warmup_s, scenario.warmup_s + scenario.duration_s)
    cluster.run(window.start_s)
    before = _preemptions(cluster)
    cluster.run(window.end_s)
    clients = cluster.clients
    holds_s = [hold_s for at_s, hold_s in clients.holds_s if at_s in window]
    return RunResult(
        scenario=scenario.name,
        policy=label or policy,
        seed=seed,
        replicas=scenario.replica_count,
        in_flight=scenario.trainer.in_flight,
        score=score(
            [*clients.ended, *clients.open_sessions()],
            clients.requests,
            scenario.shares or cluster.workload.shares,
            window,
            holds_s=(percentile(holds_s, 0.5), percentile(holds_s, 0.95)) if holds_s else None,
            preemptions=_preemptions(cluster) - before,
        ),
        simulated_s=window.end_s,
        wall_s=time.perf_counter() - began_s,
        events=cluster.kernel.events,
        decisions=cluster.gate.handled,
        refusals=clients.refusals,
        repins=cluster.gate.repins,
    )


def unbounded(scenario: Scenario) -> Scenario:
    replicas = tuple(
        ReplicaSpec(config=msgspec.structs.replace(spec.config, num_blocks=_UNBOUNDED_BLOCKS), count=spec.count)
        for spec in scenario.replicas
    )
    return msgspec.structs.replace(scenario, replicas=replicas)


def _preemptions(cluster: Cluster) -> int:
    return cluster.lost_preemptions + sum(replica.totals().preemptions for replica in cluster.replicas.values())
