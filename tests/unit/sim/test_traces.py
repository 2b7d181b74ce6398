from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.data import CODING_AGENT_TRACE
from tidegate.errors import ConfigError
from tidegate.sim.traces import read_trace


def line(**changes: Any) -> dict[str, Any]:
    good = {
        "session": "s-1",
        "workload": "agentic",
        "shared_prefix_tokens": 50,
        "turns": [[100, 0, 10, 1.5, 0], [160, 96, 20, 2.0, 3.0]],
    }
    return {**good, **changes}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in lines) + "\n")
    return path


def test_the_shipped_trace_is_whole_and_valid() -> None:
    trace = read_trace(CODING_AGENT_TRACE)
    assert len(trace.sessions) == 355
    assert sum(len(session.turns) for session in trace.sessions) == 23_491
    assert trace.skipped == ()


def test_fields_of_a_line_are_read(tmp_path: Path) -> None:
    (session,) = read_trace(write(tmp_path / "t.jsonl", line())).sessions
    assert (session.session, session.workload, session.shared_prefix_tokens) == ("s-1", "agentic", 50)
    turn = session.turns[1]
    assert (turn.prompt_tokens, turn.prefix_tokens, turn.output_tokens) == (160, 96, 20)
    assert (turn.model_time_s, turn.gap_s) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"session": "s-2", ', "JSON is malformed|Input data was truncated"),
        ("[]", "Expected `object`"),
        (line(session="s-2", extra=1), "unknown field `extra`"),
        ({"session": "s-2", "turns": [[1, 0, 1, 0, 0]]}, "missing required field `workload`"),
        (line(session="s-2", turns=[[100, 0, 10, 1.5]]), r"length 5.*turns\[0\]"),
        (line(session="s-2", turns=[["x", 0, 10, 1.5, 0]]), r"Expected `int`.*turns\[0\]"),
        (line(session="s-2", turns=[]), "no turns"),
        (line(session=""), "must not be empty"),
        (line(session="s-2", turns=[[0, 0, 1, 0, 0]], shared_prefix_tokens=0), "turn 0: prompt of 0 tokens"),
        (line(session="s-2", turns=[[100, 0, -1, 0, 0]]), "turn 0: output of -1 tokens"),
        (line(session="s-2", turns=[[100, 0, 1, -2.0, 0]]), "turn 0: model time of -2.0 s"),
        (line(session="s-2", turns=[[100, 0, 1, 0, 1e9]]), "turn 0: gap of 1000000000.0 s"),
        (line(session="s-2", turns=[[99_000_000, 0, 1, 0, 0]]), "turn 0: prompt of 99000000 tokens"),
        (line(session="s-2", turns=[[100, 64, 1, 0, 0]]), "turn 0: prefix 64 of a turn before it"),
        (line(session="s-2", turns=[[100, 0, 1, 0, 0], [300, 200, 1, 0, 0]]), "turn 1: prefix 200 is longer"),
        (line(session="s-2", turns=[[100, 0, 1, 0, 0], [90, 95, 1, 0, 0]]), "turn 1: prefix 95 is not within"),
        (line(session="s-2", shared_prefix_tokens=101), "shared_prefix_tokens 101"),
        (line(), "was already on line 1"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_fault(tmp_path: Path, bad: object, says: str) -> None:
    path = write(tmp_path / "t.jsonl", line(), bad)
    with pytest.raises(ConfigError, match=f"t.jsonl:2: .*(?:{says})"):
        read_trace(path)


def test_skip_bad_counts_the_lines_it_leaves_out(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line(), "nonsense", "", line(session="s-2"), line())
    trace = read_trace(path, skip_bad=True)
    assert [session.session for session in trace.sessions] == ["s-1", "s-2"]
    assert [message.split(": ")[0].rsplit(":", 1)[1] for message in trace.skipped] == ["2", "5"]


@pytest.mark.parametrize("content", ["", "\n\n", "nonsense"])
def test_a_trace_without_a_session_is_refused_even_when_skipping(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match="no usable session"):
        read_trace(write(tmp_path / "t.jsonl", content), skip_bad=True)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
