"""Simulated against live: what the verdicts say, and that a cell is simulated as it ran."""

from __future__ import annotations

import io
from collections import Counter

import msgspec
import pytest
from rich.console import Console

from tidegate.bench.validation import Observed, Pair, Spread, validity_table, verdicts
from tidegate.bench.validation_run import Cell, ValidationOptions, cells, simulated
from tidegate.sim.latency import CPU_TINY
from tidegate.sim.replica import ReplicaConfig

OPTIONS = ValidationOptions(
    engines=("http://a", "http://b"),
    config=ReplicaConfig(
        num_blocks=512, block_size=32, max_model_len=8192, max_num_seqs=64, max_num_batched_tokens=2048
    ),
    policies=("sticky_least_loaded", "misa_t", "working_set"),
    concurrency=(8, 16),
    warmup_s=10.0,
    duration_s=30.0,
)


def pair(
    live: tuple[float, float | None],
    simulated: tuple[float, float | None],
    *,
    policy: str = "misa_t",
    concurrency: int = 8,
    repeat: int = 0,
) -> Pair:
    seen, told = (
        Observed(generated_tokens_per_s=rate, hit_rate=hit, sessions_per_min=1.0) for rate, hit in (live, simulated)
    )
    return Pair(policy=policy, concurrency=concurrency, repeat=repeat, seed=repeat, live=seen, simulated=told)


def test_a_cell_is_judged_by_the_mean_over_its_repeats() -> None:
    (found,) = verdicts([pair((100.0, 0.8), (130.0, 0.86)), pair((100.0, 0.8), (90.0, 0.82), repeat=1)])
    assert found.repeats == 2
    assert found.throughput_ratio == Spread(pytest.approx(1.1), pytest.approx(0.9), pytest.approx(1.3))
    assert found.hit_difference_points == Spread(pytest.approx(4.0), pytest.approx(2.0), pytest.approx(6.0))
    assert (found.throughput_within, found.hit_within) == (True, True)


def test_a_slow_repeat_does_not_count_more_than_a_fast_one() -> None:
    (found,) = verdicts([pair((10.0, 0.5), (20.0, 0.5)), pair((190.0, 0.5), (180.0, 0.5), repeat=1)])
    assert found.throughput_ratio is not None
    assert found.throughput_ratio.mean == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rate", "hit", "within"),
    [(114.9, 0.8, (True, True)), (115.1, 0.8, (False, True)), (84.9, 0.8, (False, True)), (85.1, 0.849, (True, True)),
     (100.0, 0.851, (True, False)), (100.0, 0.749, (True, False))],
)  # fmt: skip
def test_the_limits_hold_both_ways(rate: float, hit: float, within: tuple[bool, bool]) -> None:
    (found,) = verdicts([pair((100.0, 0.8), (rate, hit))])
    assert (found.throughput_within, found.hit_within) == within


def test_what_is_unknown_is_not_within() -> None:
    (dead,) = verdicts([pair((0.0, None), (100.0, 0.8))])
    assert (dead.throughput_ratio, dead.hit_difference_points) == (None, None)
    assert not dead.throughput_within
    assert not dead.hit_within


def test_each_policy_and_concurrency_has_its_row() -> None:
    found = verdicts(
        [
            pair((100.0, 0.8), (100.0, 0.8), policy=policy, concurrency=concurrency)
            for concurrency in (8, 24)
            for policy in ("misa_t", "working_set")
        ]
    )
    assert [(each.policy, each.concurrency) for each in found] == [
        ("misa_t", 8), ("working_set", 8), ("misa_t", 24), ("working_set", 24)
    ]  # fmt: skip
    shown = io.StringIO()
    Console(file=shown, width=160).print(
        validity_table([*found, *verdicts([pair((0.0, None), (1.0, None), policy="dead")])])
    )
    lines = shown.getvalue().splitlines()
    assert sum("1.00 (1.00..1.00)" in line for line in lines) == 4
    (dead,) = (line for line in lines if "dead" in line)
    assert dead.split().count("no") == 2


def test_every_cell_runs_once_and_no_policy_is_always_first() -> None:
    planned = list(cells(OPTIONS))
    assert Counter((cell.policy, cell.concurrency, cell.repeat) for cell in planned) == Counter(
        (policy, concurrency, repeat) for policy in OPTIONS.policies for concurrency in (8, 16) for repeat in (0, 1)
    )
    assert len({planned[start].policy for start in range(0, len(planned), 3)}) == 3
    assert {(cell.repeat, cell.seed) for cell in planned} == {(0, 0), (1, 1)}


def test_a_simulated_cell_depends_on_its_seed_and_step_times_only() -> None:
    cell = Cell("sticky_least_loaded", 8, 0, 3)
    first = simulated(OPTIONS, cell, CPU_TINY, 0.001)
    assert first == simulated(OPTIONS, cell, CPU_TINY, 0.001)
    assert first.hit_rate is not None
    assert first.generated_tokens_per_s > 0.0
    assert first != simulated(OPTIONS, Cell("sticky_least_loaded", 8, 0, 4), CPU_TINY, 0.001)
    slow = msgspec.structs.replace(CPU_TINY, step_s=3 * CPU_TINY.step_s)
    assert simulated(OPTIONS, cell, slow, 0.001).generated_tokens_per_s < 0.7 * first.generated_tokens_per_s
    assert simulated(OPTIONS, cell, CPU_TINY, 1.0).generated_tokens_per_s < 0.9 * first.generated_tokens_per_s
