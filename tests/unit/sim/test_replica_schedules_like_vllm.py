"""The simulated replica against what vLLM 0.32's own scheduler did with the same requests: each step, block by block.

The golden file holds a digest of each step of vLLM's; `tests/vllm/test_scheduler_golden.py` makes it, and compares it
with vLLM where that is installed.
"""

from __future__ import annotations

import json

import pytest
from tests.unit.sim.scheduler_scenarios import GOLDEN, SCENARIOS, digest, scenario, simulate


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_step_is_vllms(name: str) -> None:
    expected = json.loads(GOLDEN.read_text())[name]
    lines = simulate(scenario(name))
    assert len(lines) == len(expected)
    for step, (line, wanted) in enumerate(zip(lines, expected, strict=True)):
        assert digest(line) == wanted, f"step {step}: {line}"
    assert sum(line["hits"] for line in lines) > 0
    if "too few blocks" in name:
        assert any(line["preempted"] for line in lines)
