from __future__ import annotations

import pytest

from tidegate.bench.comparison import Comparison, Run
from tidegate.bench.driver import LoadResult
from tidegate.sim.score import SessionRecord, Window, score


def run(name: str, concurrency: int, repeat: int, sessions: int) -> Run:
    router, policy = name.split(":")
    records = [SessionRecord(workload="a", started_s=0, ended_s=1, completed=True) for _ in range(sessions)]
    result = LoadResult(
        score=score(records, [], {"a": 1.0}, Window(0, 60)),
        errors={},
        outputs_guessed=0,
        engines=None,
        engine_hit_rate=None,
        time_scale=1.0,
        requests_per_wall_s=1.0,
        driver_cpu_share=0.0,
        sessions=[],
    )
    return Run(router=router, policy=policy, concurrency=concurrency, repeat=repeat, seed=repeat, result=result)


RUNS = [
    *(run("vllm-router:hash", 16, i, n) for i, n in enumerate((40, 60))),
    *(run("vllm-router:sticky", 16, i, n) for i, n in enumerate((60, 90))),
    *(run("vllm-router:hash", 24, i, n) for i, n in enumerate((20, 30))),
    *(run("vllm-router:sticky", 24, i, n) for i, n in enumerate((10, 15))),
    *(run("tidegate:misa_t", 24, i, n) for i, n in enumerate((30, 45))),
]


def test_ratios_are_to_the_best_rival_there_and_anywhere() -> None:
    (ratio,) = Comparison(RUNS).ratios("tidegate", "vllm-router")
    assert (ratio.rival_there, ratio.rival_anywhere) == ("vllm-router:hash", "vllm-router:sticky at 16")
    assert ratio.at_that_concurrency is not None
    assert ratio.at_any_concurrency is not None
    assert ratio.at_that_concurrency.mean == pytest.approx(1.5)
    assert ratio.at_any_concurrency.mean == pytest.approx(0.5)
    # Every pair has the same ratio: what the machine did to both cancels.
    assert ratio.at_that_concurrency.low == pytest.approx(ratio.at_that_concurrency.high)


def test_an_interrupted_sweep_compares_the_pairs_that_it_has() -> None:
    (ratio,) = Comparison(RUNS[:-1]).ratios("tidegate", "vllm-router")
    assert ratio.at_that_concurrency is not None
    assert ratio.at_that_concurrency.mean == pytest.approx(1.5)


def test_without_rivals_there_is_no_ratio() -> None:
    (ratio,) = Comparison(RUNS[-2:]).ratios("tidegate", "vllm-router")
    assert ratio.at_that_concurrency is None
    assert ratio.at_any_concurrency is None
    assert Comparison(RUNS[-2:]).ratios_table("tidegate", "vllm-router").row_count == 1


def test_the_rates_table_has_a_row_for_each_policy_and_a_column_for_each_concurrency() -> None:
    table = Comparison(RUNS).rates_table()
    assert table.row_count == 3
    assert [str(column.header) for column in table.columns[1:]] == ["16 in flight", "24 in flight"]
    assert list(table.columns[1].cells) == ["50.0 (40..60) -", "75.0 (60..90) -", ""]
