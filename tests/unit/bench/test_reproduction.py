"""The reproduction's table from rows: what is compared with what."""

from __future__ import annotations

import pytest

from tidegate.bench.reproduction import (
    ADMITTING,
    OFFERED,
    PLANS,
    REFERENCE,
    UNBOUNDED,
    Case,
    best_in_sweep,
    cases,
    markdown,
    sweep_lines,
    table_lines,
)
from tidegate.policy import policies
from tidegate.sim.compare import Row
from tidegate.sim.scenarios import scenario
from tidegate.sim.workload_names import PAPER_CONTEXT_TOKENS

PLAN = PLANS[0]


def row(policy: str, in_flight: int, seed: int, total: float, contract: float | None = None) -> Row:
    return Row(
        scenario=PLAN.scenario,
        policy=policy,
        seed=seed,
        replicas=4,
        in_flight=in_flight,
        contract_per_min=total if contract is None else contract,
        efficiency=None,
        hit_rate=0.9,
        recomputed_prompt_share=0.02,
        tv_pp=1.5,
        preemptions=0,
        hold_p50_s=0.0,
        hold_p95_s=0.0,
        total_per_min=total,
        simulated_s=10.0,
        wall_s=1.0,
    )


ROWS = [
    *(row(REFERENCE, 4 * 64, seed, rate) for seed, rate in ((0, 10.0), (1, 12.0))),
    *(row(REFERENCE, 4 * 96, seed, rate) for seed, rate in ((0, 20.0), (1, 10.0))),
    *(row(REFERENCE, OFFERED, seed, 5.0) for seed in (0, 1)),
    *(row("misa_t", OFFERED, seed, rate, 15.0) for seed, rate in ((0, 30.0), (1, 15.0))),
]


def test_the_reference_is_the_sweeps_best_and_not_the_high_concurrency() -> None:
    assert best_in_sweep(PLAN, [*ROWS, row(REFERENCE, OFFERED, 2, 1000.0)]) == 4 * 96


def test_ratios_are_of_the_same_seeds() -> None:
    lines = {line.name: line for line in table_lines(PLAN, [*ROWS, row("misa_t", OFFERED, 2, 999.0)])}
    ours = lines["misa_t"]
    assert ours.seeds == 2
    assert ours.rate.mean == pytest.approx(1.5)
    assert (ours.rate.low, ours.rate.high) == pytest.approx((1.5, 1.5))
    assert ours.contract.mean == pytest.approx(1.0)
    assert ours.published is not None
    assert ours.published.rate_percent == 43.6
    assert lines[f"cache_aware, {OFFERED} in flight"].rate.mean == pytest.approx(1 / 3)
    assert "misa" not in lines  # not run


def test_the_sweep_has_a_line_for_what_was_run() -> None:
    assert [(at, round(line.rate.mean, 2)) for at, line in sweep_lines(PLAN, ROWS)] == [(64, 0.73), (96, 1.0)]


def test_markdown_has_both_tables_and_nothing_before_the_sweep() -> None:
    text = markdown(PLAN, ROWS)
    assert "| misa_t | +43.6 % | +50.0 % |" in text
    assert "| 96 | +0.0 % |" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {10, 7}
    assert markdown(PLAN, [row("misa_t", OFFERED, 0, 1.0)]) == ""
    assert markdown(PLANS[1], ROWS) == ""


def test_every_case_can_be_run_and_runs_once() -> None:
    for plan in PLANS:
        planned = list(cases(plan))
        assert len({(case.policy, case.in_flight) for case in planned}) == len(planned)
        assert {*ADMITTING, UNBOUNDED} <= {case.policy for case in planned}
        for case in planned:
            job = case.job(3)
            assert job.seed == 3
            assert job.policy.name in policies()
            assert job.scenario.trainer.in_flight == case.in_flight
            assert job.unbounded == (case.policy == UNBOUNDED)


def test_the_safe_cap_is_what_surely_fits() -> None:
    for plan in PLANS:
        config = scenario(plan.scenario).replicas[0].config
        assert plan.safe_cap == config.num_blocks * config.block_size // PAPER_CONTEXT_TOKENS


def test_an_unbounded_case_never_evicts() -> None:
    bounded, free = (Case(PLAN.scenario, policy, OFFERED).job(0).scenario for policy in ("misa_t", UNBOUNDED))
    assert free.replicas[0].config.num_blocks > 1000 * bounded.replicas[0].config.num_blocks
