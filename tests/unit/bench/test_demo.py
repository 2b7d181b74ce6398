from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.bench.test_comparison import run

from tidegate.bench.demo import DemoSettings, PolicyRun, Sample
from tidegate.bench.gate_time import gate_environment
from tidegate.bench.plot import SMOOTH_SAMPLES, hit_rates, plot
from tidegate.bench.report import score_table
from tidegate.config.load import load
from tidegate.policy.params import CoreParams
from tidegate.sim.workload_names import WorkloadOptions, build_workload


def sample(at_s: float, prompt: int, cached: int, held: int = 3) -> Sample:
    return Sample(
        at_s=at_s,
        kv_used_tokens=50,
        kv_capacity_tokens=100,
        live=5,
        held=held,
        prompt_tokens=prompt,
        cached_tokens=cached,
        ended=0,
    )


def policy_run(policy: str, samples: list[Sample]) -> PolicyRun:
    return PolicyRun(
        policy=policy, result=run("tidegate:x", 1, 0, 30).result, samples=samples, warmup_model_s=2.0, load_before=0.0
    )


def test_a_scaled_gate_differs_in_times_only() -> None:
    config = load(environ=gate_environment(10.0)).config
    default = CoreParams()
    assert config.core.tick_s == pytest.approx(default.tick_s / 10)
    assert config.core.pressure.settle_s == pytest.approx(default.pressure.settle_s / 10)
    assert config.core.pressure.threshold == default.pressure.threshold
    assert config.core.occupancy == default.occupancy
    assert config.core.replica.stale_after_s == default.replica.stale_after_s
    rate = default.replica.prefill_rate_prior_tokens_per_s
    assert config.core.replica.prefill_rate_prior_tokens_per_s == pytest.approx(rate * 10)


def test_a_gate_in_real_time_is_not_scaled() -> None:
    assert load(environ=gate_environment(1.0)).config == load().config


def test_the_demo_offers_two_to_three_times_what_its_engines_hold() -> None:
    settings = DemoSettings()
    workload = build_workload(
        "trace", WorkloadOptions(context_tokens=settings.context_tokens, merge_turns=settings.merge_turns)
    )
    weighted = []
    for label, share in workload.shares.items():
        plans = [workload.sources[label].session(index) for index in range(300)]
        # A session holds what it has so far: half its peak if it is one long output, and the mean of its prompts else.
        held = [
            plan.peak_tokens() / 2 if len(plan.turns) == 1 else sum(plan.prompt_tokens()) / len(plan.turns)
            for plan in plans
        ]
        tokens = [sum(turn.output_tokens for turn in plan.turns) + 10 * len(plan.turns) for plan in plans]
        weighted.append((share * sum(tokens), share * sum(t * h for t, h in zip(tokens, held, strict=True))))
    mean_footprint = sum(w for _, w in weighted) / sum(w for w, _ in weighted)
    demand = settings.concurrency * mean_footprint / (settings.engines * settings.kv_tokens)
    assert 2.0 < demand < 4.0


def test_hit_rates_are_of_what_was_answered_between_samples() -> None:
    samples = [sample(float(i), 100 * i, 100 * i if i < 10 else 1000) for i in range(20)]
    at_s, rates = hit_rates(samples)
    assert at_s[0] == SMOOTH_SAMPLES
    assert rates[0] == 100
    assert rates[-1] == 0
    assert hit_rates([sample(0, 5, 5), sample(1, 5, 5)]) == ([], [])


def test_the_plot_is_written_as_svg_and_png(tmp_path: Path) -> None:
    samples = [sample(float(i), 100 * i, 50 * i) for i in range(30)]
    runs = [policy_run("consistent_hash", samples), policy_run("misa_t", samples)]
    plot(runs, tmp_path / "p.svg", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "p.svg").read_text()
    assert "<svg" in text
    plot(runs, tmp_path / "again.svg", tmp_path / "p.png")
    assert (tmp_path / "again.svg").read_text() == text


def test_the_table_shows_unknown_as_unknown() -> None:
    table = score_table({"p": run("tidegate:x", 1, 0, 30).result}, ["a"], title="t", first="policy")
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["p", "30.0", "30.0", "0.0", "-", "-", "-", "-"]
