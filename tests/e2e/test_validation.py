"""`make validate`, small: step times of live engines, a cell behind a gate of its own, and the same cell simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidegate.bench.processes import Servers
from tidegate.bench.validation import verdicts
from tidegate.bench.validation_run import Cell, ValidationOptions, fitted, run_pair
from tidegate.sim.replica import ReplicaConfig


async def test_a_cell_runs_live_and_simulated(replicas: list[Any], tmp_path: Path) -> None:
    options = ValidationOptions(
        engines=tuple(replica.url for replica in replicas),
        config=ReplicaConfig(
            num_blocks=512, block_size=32, max_model_len=8192, max_num_seqs=64, max_num_batched_tokens=2048
        ),
        policies=("sticky_least_loaded",),
        concurrency=(3,),
        warmup_s=0.5,
        duration_s=2.0,
        vocab_size=2048,
        longest_prompt=512,
    )
    measured: list[tuple[int, int]] = []
    found = await fitted(options, lambda done, total: measured.append((done, total)))
    assert measured[-1][0] == measured[-1][1] == len(measured)
    assert found.engines == len(replicas)
    assert found.latency.step_time_s(512, 512**2 / 2, 4, 2048, 1) > 0.0
    with Servers(tmp_path) as servers:
        pair = await run_pair(options, servers, Cell("sticky_least_loaded", 3, 0, 5), found)
    assert pair.errors == {}
    assert pair.live.generated_tokens_per_s > 0.0
    assert pair.simulated.generated_tokens_per_s > 0.0
    (verdict,) = verdicts([pair])
    assert (verdict.policy, verdict.concurrency, verdict.repeats) == ("sticky_least_loaded", 3, 1)
