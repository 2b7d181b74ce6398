"""The demo itself, short: real engines, a real gate, every file that it promises."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from tidegate.cli.demo import demo


def test_the_demo_runs_each_policy_and_writes_table_json_and_plot(tmp_path: Path) -> None:
    arguments = ["--policies", "consistent_hash,misa_t", "--concurrency", "6", "--time-scale", "50"]
    arguments += ["--warmup-s", "0.5", "--duration-s", "2", "--out", str(tmp_path)]
    result = CliRunner().invoke(demo, arguments)
    assert result.exit_code == 0, result.output
    runs = json.loads((tmp_path / "demo.json").read_text())["runs"]
    assert [run["policy"] for run in runs] == ["consistent_hash", "misa_t"]
    for run in runs:
        assert run["policy"] in result.output
        assert run["result"]["errors"] == {}
        assert run["result"]["outputs_guessed"] == 0
        assert run["result"]["score"]["prompt_tokens"] > 0
        assert run["result"]["score"]["hold_p50_s"] is not None  # read from the gate
        assert run["samples"][-1]["kv_capacity_tokens"] > 0
    assert (tmp_path / "demo.svg").exists()
    assert (tmp_path / "demo.png").exists()


def test_an_unknown_policy_ends_the_demo_with_the_gates_own_words(tmp_path: Path) -> None:
    result = CliRunner().invoke(demo, ["--policies", "misa_tt", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "did you mean" in result.output
