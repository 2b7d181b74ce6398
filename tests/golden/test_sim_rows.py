"""Figures of the simulator that must not move by themselves: baselines on the scenario vllm-cpu.

After a change that is meant to move them: python -m tests.golden.test_sim_rows
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tidegate.sim.compare import Row, compare
from tidegate.sim.overrides import policy_choice
from tidegate.sim.scenarios import scenario

ROWS = Path(__file__).with_name("sim_rows.json")
POLICIES = ("round_robin", "consistent_hash", "sticky_least_loaded", "static_cap:cap=7")


def rows() -> list[Row]:
    case = msgspec.structs.replace(scenario("vllm-cpu"), warmup_s=20.0, duration_s=60.0)
    found = compare([case], [policy_choice(policy) for policy in POLICIES], [0], processes=1).rows
    return [msgspec.structs.replace(row, wall_s=0.0) for row in found]


def test_baselines_give_the_figures_of_record() -> None:
    recorded = msgspec.json.decode(ROWS.read_bytes(), type=list[Row])
    for now, then in zip(rows(), recorded, strict=True):
        assert (now.policy, now.seed, now.preemptions) == (then.policy, then.seed, then.preemptions)
        for name in ("contract_per_min", "efficiency", "hit_rate", "recomputed_prompt_share", "tv_pp", "total_per_min"):
            assert getattr(now, name) == pytest.approx(getattr(then, name), rel=1e-9), (now.policy, name)


if __name__ == "__main__":
    ROWS.write_bytes(msgspec.json.format(msgspec.json.encode(rows()), indent=1) + b"\n")
