"""vLLM's own scheduler, without a model: its steps are the golden file's, and the simulated replica's.

`python -m tests.vllm.test_scheduler_golden` writes the golden file.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
from tests.unit.sim.scheduler_scenarios import GOLDEN, SCENARIOS, digest, scenario, simulate
from tests.vllm.replica import ENVIRONMENT, MODELS, PYTHON, ROOT

pytestmark = pytest.mark.vllm


def run_vllm() -> dict[str, list[dict[str, Any]]]:
    """vLLM's steps by scenario; importing it takes 10 s, so once for all."""
    scenarios = {name: {**scenario(name), "model": str(MODELS / "tiny")} for name in SCENARIOS}
    process = subprocess.run(
        [PYTHON, str(ROOT / "tests/vllm/scheduler_trace.py")],
        input=json.dumps(list(scenarios.values())),
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"},
        check=False,
        timeout=300,
    )
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == sum(made["steps"] for made in scenarios.values()), process.stderr[-3000:]
    return {name: [lines.pop(0) for _ in range(made["steps"])] for name, made in scenarios.items()}


@pytest.fixture(scope="module")
def real() -> dict[str, list[dict[str, Any]]]:
    return run_vllm()


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_step_is_the_golden_files_and_the_replicas(name: str, real: dict[str, list[dict[str, Any]]]) -> None:
    for step, (expected, got) in enumerate(zip(real[name], simulate(scenario(name)), strict=True)):
        assert got == expected, f"step {step}"
    assert [digest(line) for line in real[name]] == json.loads(GOLDEN.read_text())[name]


if __name__ == "__main__":
    made = {name: [digest(line) for line in lines] for name, lines in run_vllm().items()}
    GOLDEN.write_text(json.dumps(made) + "\n")
