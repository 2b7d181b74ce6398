from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.bench.stand_in import StandIn

from tidegate.cli.bench import bench, parse_mixture
from tidegate.errors import ConfigError


async def test_bench_prints_a_table_and_writes_the_result(stand_in: StandIn, tmp_path: Path) -> None:
    out = tmp_path / "sub" / "result.json"
    arguments = ["--url", f"{stand_in.url}/v1", "--sessions", "6", "--concurrency", "3", "--context-tokens", "512"]
    arguments += ["--engine-urls", stand_in.url, "--policy-label", "mine", "--workload", "trace", "--json", str(out)]
    result = await asyncio.to_thread(CliRunner().invoke, bench, [*arguments, "--mixture", "agentic=2,rlhf=1"])
    assert result.exit_code == 0, result.output
    assert "mine" in result.output
    written = json.loads(out.read_text())
    assert written["label"] == "mine"
    assert written["result"]["score"]["completed"] == {"agentic": 4, "rlhf": 2}
    assert written["result"]["time_scale"] == 50.0  # as the engine says


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workload", "papr"], "did you mean paper"),
        (["--mixture", "agentic"], "is not CLASS=SHARE"),
        (["--mixture", "agentic=1,nobody=1"], "no such class"),
        (["--workload", "trace", "--trace", "/nowhere.jsonl"], "/nowhere.jsonl: No such file"),
        ([], "names no model"),
    ],
)
def test_what_cannot_be_run_is_said(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(bench, ["--url", "http://127.0.0.1:1", *arguments])
    assert result.exit_code == 1
    assert says in result.output


async def test_bad_lines_that_were_left_out_are_named(stand_in: StandIn, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    good = '{"session":"s","workload":"agentic","turns":[[64,0,4,1,0],[128,64,4,1,0.1]]}'
    trace.write_text(f"nonsense\n{good}\n")
    arguments = ["--url", stand_in.url, "--sessions", "2", "--workload", "trace", "--trace", str(trace)]
    arguments += ["--context-tokens", "512", "--mixture", "agentic=1"]
    refused = await asyncio.to_thread(CliRunner().invoke, bench, arguments)
    assert refused.exit_code == 1
    assert "t.jsonl:1" in refused.output
    skipped = await asyncio.to_thread(CliRunner().invoke, bench, [*arguments, "--skip-bad"])
    assert skipped.exit_code == 0, skipped.output
    assert "left out:" in skipped.output


def test_a_mixture_is_parsed() -> None:
    assert parse_mixture("a=.5, b=1") == {"a": 0.5, "b": 1.0}
    with pytest.raises(ConfigError, match="is not CLASS=SHARE"):
        parse_mixture("a=x")
