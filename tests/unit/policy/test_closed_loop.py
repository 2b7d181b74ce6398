"""The loop closed over a crude pool: misa_t keeps the live sessions within the memory, whatever the workload."""

from __future__ import annotations

import pytest
from tests.unit.policy.crude_pool import Kind, Pool, Run

from tidegate.policy.baselines.params import StaticCapParams
from tidegate.policy.params import CoreParams
from tidegate.policy.scheduler import Scheduler

SMALL = 16_384


def agents(clients: int) -> Kind:
    return Kind("agentic", 1_000, 12, (100, 300), (24, 24), 0.5, clients)


MIXED = [
    agents(12),
    Kind("rlvr", 150, 1, (0, 0), (100, 900), 0.0, 7),
    Kind("rlhf", 300, 1, (0, 0), (50, 200), 0.0, 5),
]


def run(policy: str, kinds: list[Kind], seconds: float, capacity: int = SMALL, params: CoreParams | None = None) -> Run:
    scheduler = Scheduler(policy, params or CoreParams())
    return Pool(policy, kinds, replicas=2, capacity=capacity, scheduler=scheduler).run(seconds)


def test_a_young_synchronised_cohort_is_kept_within_the_memory() -> None:
    sticky, misa_t = (run(policy, [agents(24)], 200.0) for policy in ("sticky_least_loaded", "misa_t"))
    assert max(sticky.peak_tokens.values()) > 1.5 * SMALL
    assert max(misa_t.peak_tokens.values()) <= SMALL
    assert misa_t.completed["agentic"] > 2 * sticky.completed["agentic"]


def test_a_mixture_is_kept_within_the_memory_and_all_classes_go_on() -> None:
    sticky, misa_t = (run(policy, MIXED, 200.0) for policy in ("sticky_least_loaded", "misa_t"))
    assert misa_t.over_share <= 0.02 < sticky.over_share
    assert misa_t.hit_rate > sticky.hit_rate + 0.1
    assert min(misa_t.completed.values()) > 50


def test_it_comes_near_the_best_fixed_cap_without_being_told_one() -> None:
    best = max(
        run("static_cap", [agents(24)], 200.0, params=CoreParams(static_cap=StaticCapParams(cap=cap))).completed[
            "agentic"
        ]
        for cap in (4, 5, 6, 7)
    )
    assert run("misa_t", [agents(24)], 200.0).completed["agentic"] >= 0.8 * best


@pytest.mark.parametrize("policy", ["session_admission", "misa_t"])
def test_a_large_replica_ramps_up_and_stays_within_its_memory(policy: str) -> None:
    kinds = [Kind("agentic", 5_000, 20, (500, 2_000), (50, 150), 1.0, 200)]
    found = run(policy, kinds, 1_500.0, capacity=1_000_000)
    assert found.over_share < 0.05
    assert found.completed["agentic"] > 100


def test_nothing_is_held_where_everything_fits() -> None:
    scheduler = Scheduler("misa_t")
    pool = Pool("misa_t", [agents(6)], replicas=2, capacity=1_000_000, scheduler=scheduler)
    for until_s in range(1, 60):
        pool.run(float(until_s))
        assert scheduler.view(pool.now_s).held == 0
