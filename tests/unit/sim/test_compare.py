"""Comparisons: the same rows wherever the runs were made, and summaries that can be recomputed by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tidegate.sim.advice import advise, populations
from tidegate.sim.compare import Row, compare, jobs, summaries
from tidegate.sim.overrides import policy_choice
from tidegate.sim.report import report
from tidegate.sim.scenario import Scenario
from tidegate.sim.scenarios import SCENARIOS, scenario
from tidegate.sim.tables import comparison_tables


def short() -> Scenario:
    return msgspec.structs.replace(scenario("vllm-cpu"), warmup_s=5.0, duration_s=25.0)


def row(**changes: Any) -> Row:
    base = Row(
        scenario="s", policy="a", seed=0, replicas=2, in_flight=8, contract_per_min=10.0, efficiency=0.5, hit_rate=0.9,
        recomputed_prompt_share=0.1, tv_pp=1.0, preemptions=3, hold_p50_s=0.0, hold_p95_s=1.0, total_per_min=12.0,
        simulated_s=60.0, wall_s=0.1,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def test_the_rows_are_the_same_at_any_process_count() -> None:
    choices = [policy_choice("sticky_least_loaded"), policy_choice("static_cap:cap=6")]
    alone, beside = (compare([short()], choices, range(2), processes=count).rows for count in (1, 2))
    assert [msgspec.structs.replace(each, wall_s=0.0) for each in alone] == [
        msgspec.structs.replace(each, wall_s=0.0) for each in beside
    ]
    assert [(each.policy, each.seed) for each in alone] == [
        ("sticky_least_loaded", 0), ("static_cap:cap=6", 0), ("sticky_least_loaded", 1), ("static_cap:cap=6", 1),
    ]  # fmt: skip
    assert alone[0].contract_per_min != alone[2].contract_per_min or alone[0].hit_rate != alone[2].hit_rate


def test_rows_have_the_fields_that_scripts_read() -> None:
    fields = {field.name for field in msgspec.structs.fields(Row)}
    assert fields >= {
        "scenario", "policy", "seed", "replicas", "contract_per_min", "efficiency", "hit_rate",
        "recomputed_prompt_share", "tv_pp", "preemptions", "hold_p95_s", "hold_p95_by_class_s", "simulated_s", "wall_s",
    }  # fmt: skip


def test_each_scenario_and_seed_has_one_run_without_a_bound() -> None:
    planned = jobs([short()], [policy_choice("misa_t"), policy_choice("misa")], range(3))
    assert [job.unbounded for job in planned] == [True, False, False] * 3


def test_progress_counts_every_run_of_the_comparison() -> None:
    seen: list[tuple[int, int]] = []
    compare([short()], [policy_choice("misa_t")], [0], processes=1, progress=lambda *now: seen.append(now))
    assert seen == [(1, 2), (2, 2)]


def test_a_summary_averages_what_is_known() -> None:
    (summary,) = summaries([row(seed=0), row(seed=1, contract_per_min=20.0, hit_rate=None, tv_pp=3.0)])
    assert summary.contract_per_min.mean == 15.0
    assert (summary.contract_per_min.low, summary.contract_per_min.high) == (10.0, 20.0)
    assert (summary.seeds, summary.hit_rate, summary.tv_pp) == (2, 0.9, 2.0)


def test_numbers_in_flight_are_told_apart() -> None:
    assert len(summaries([row(), row(in_flight=16)])) == 2
    assert len(comparison_tables([row(), row(in_flight=16), row(policy="b")])) == 2


def test_advice_takes_the_smallest_number_that_is_as_good() -> None:
    rates = {("a", 8): 9.0, ("a", 16): 9.9, ("a", 32): 10.0, ("b", 8): 5.0, ("b", 16): 4.0, ("b", 32): 2.0}
    rows = [row(policy=p, in_flight=n, contract_per_min=r, seed=s) for (p, n), r in rates.items() for s in (0, 1)]
    best, other = advise(rows)
    assert (best.policy, best.in_flight, best.gain) == ("a", 16, None)
    assert (other.policy, other.in_flight) == ("b", 8)
    assert other.gain is not None
    assert other.gain.mean == pytest.approx(9.9 / 5.0)


def test_advice_looks_on_both_sides_of_the_scenarios_number() -> None:
    numbers = [each.trainer.in_flight for each in populations(short())]
    assert numbers == sorted(numbers)
    assert numbers[0] < short().trainer.in_flight < numbers[-1]


def test_every_scenario_is_named_as_it_is_listed_and_says_what_it_is() -> None:
    for name in SCENARIOS:
        assert scenario(name).name == name
        assert scenario(name).about


def test_a_report_stands_alone_and_shows_every_policy() -> None:
    choices = [policy_choice("sticky_least_loaded"), policy_choice("misa_t")]
    done = compare([short()], choices, [0], processes=1, observe=True)
    page = report("a <b> title", done.rows, done.runs)
    assert page.count("<svg") == 10
    assert "a &lt;b&gt; title" in page
    assert "sticky_least_loaded" in page
    assert "http://" not in page
    assert "https://" not in page
    timeline = done.runs[0].timeline
    assert timeline is not None
    assert len(timeline.at_s) == len(timeline.live) == len(timeline.completed["rlvr"]) == 240
    assert max(timeline.ledger_share) > 0.5
