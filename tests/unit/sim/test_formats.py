"""Sessions of other formats, and a decision log, become recorded sessions; bad lines are named."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tidegate.data import CODING_AGENT_TRACE
from tidegate.errors import ConfigError
from tidegate.observe.recorder import Header, Recorder
from tidegate.policy.params import CoreParams
from tidegate.sim.cluster import Cluster
from tidegate.sim.formats import read_sessions, write_sessions
from tidegate.sim.run import run
from tidegate.sim.scenarios import from_trace, scenario
from tidegate.sim.traces import read_trace


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_our_own_format_is_read_as_it_is(tmp_path: Path) -> None:
    assert read_sessions(CODING_AGENT_TRACE) == read_trace(CODING_AGENT_TRACE)
    write_sessions(read_trace(CODING_AGENT_TRACE).sessions, tmp_path / "copy.jsonl")
    assert read_trace(tmp_path / "copy.jsonl") == read_trace(CODING_AGENT_TRACE)


def test_rollout_lengths_become_turns_of_a_growing_context(tmp_path: Path) -> None:
    line = '{"group": "g1", "stream": 3, "prompt_len": 100, "out_lens": [10, 20, 5], "obs_lens": [30, 40]}'
    (session,) = read_sessions(written(tmp_path / "r.jsonl", line)).sessions
    assert session.session == "g1/3"
    assert [(t.prompt_tokens, t.prefix_tokens, t.output_tokens) for t in session.turns] == [
        (100, 0, 10), (140, 100, 20), (200, 140, 5),
    ]  # fmt: skip


def test_mooncake_requests_that_continue_each_other_are_one_session(tmp_path: Path) -> None:
    path = written(
        tmp_path / "m.jsonl",
        '{"timestamp": 0, "input_length": 1024, "output_length": 10, "hash_ids": [1, 2]}',
        '{"timestamp": 500, "input_length": 1024, "output_length": 10, "hash_ids": [7, 8]}',
        '{"timestamp": 3000, "input_length": 1700, "output_length": 20, "hash_ids": [1, 2, 3, 4]}',
    )
    first, second = read_sessions(path).sessions
    assert [(t.prompt_tokens, t.prefix_tokens, t.gap_s) for t in first.turns] == [(1024, 0, 0.0), (1700, 1024, 3.0)]
    assert len(second.turns) == 1


def test_azure_rows_are_single_requests(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44")
    (session,) = read_sessions(path).sessions
    assert (session.turns[0].prompt_tokens, session.turns[0].output_tokens) == (374, 44)


def ended(at_s: float, request: int, completion_tokens: int = 3) -> str:
    event = {"event": "request_ended", "at_s": at_s, "request": request, "outcome": "ok", "prompt_tokens": 5,
             "completion_tokens": completion_tokens}  # fmt: skip
    return json.dumps({"event": event, "decisions": []})


def arrived(at_s: float, request: int) -> str:
    event = {"event": "request_arrived", "at_s": at_s, "request": request, "session": f"s{request}"}
    return json.dumps({"event": event, "decisions": []})


HEADER = json.dumps({"tidegate": "0", "format": 1, "policy": "misa_t", "seed": 0, "params": {}})
DECISIONS = "\n".join([HEADER, arrived(1.0, 6), ended(2.0, 6), arrived(1.0, 7)])


@pytest.mark.parametrize(
    ("name", "good", "bad", "message"),
    [
        ("r.jsonl", '{"group": 1, "stream": 1, "prompt_len": 9, "out_lens": [1], "obs_lens": []}',
         '{"group": 1, "stream": 2, "prompt_len": 9, "out_lens": [1], "obs_lens": [1, 2]}', "1 outputs and 2 obs"),
        ("r.jsonl", '{"group": 1, "stream": 1, "prompt_len": 9, "out_lens": [1], "obs_lens": []}',
         '{"group": 1, "stream": 2, "prompt_len": -9, "out_lens": [1], "obs_lens": []}', "prompt of -9 tokens"),
        ("r.jsonl", '{"group": 1, "stream": 1, "prompt_len": 9, "out_lens": [1], "obs_lens": []}',
         '{"group": 1, "stream": 2, "prompt_len": 9, "out_lens": [], "obs_lens": []}', "no turns"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}',
         '{"timestamp": 0, "input_length": 5000000000, "output_length": 1, "hash_ids": [2]}', "prompt of 5000000000"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}', '{"timestamp": 0',
         "truncated"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4", "2023-11-16 18:15:46,x,4",
         "ContextTokens 'x' is not a whole number"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4", "2023-11-16 18:15:46,3",
         "2 columns, not 3"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4", "2023-11-16 18:15:45,3,4",
         "18:15:45 after one of"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4", "yesterday,3,4", "yesterday"),
        ("r.jsonl", '{"group": 1, "stream": 1, "prompt_len": 9, "out_lens": [1], "obs_lens": []}',
         '{"group": 1, "stream": 1, "prompt_len": 9, "out_lens": [1], "obs_lens": []}', "1/1 was already on line 1"),
        ("r.jsonl", '{"group": 1, "stream": 1, "prompt_len": 9, "out_lens": [1], "obs_lens": []}',
         '{"group": 1, "stream": 2, "prompt_len": 9, "out_lens": [5, 5], "obs_lens": [-1]}', "observation of -1"),
        ("m.jsonl", '{"timestamp": 9000, "input_length": 5, "output_length": 1, "hash_ids": [1]}',
         '{"timestamp": 8000, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "8.0 s, the one before is 9.0"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}',
         '{"timestamp": 1, "input_length": 5, "output_length": -1, "hash_ids": [1]}', "output of -1 tokens"),
        ("d.jsonl", DECISIONS, ended(2.0, 7, completion_tokens=-4), "output of -4 tokens"),
        ("d.jsonl", DECISIONS, ended(0.5, 7), "7 was answered 0.5 s before it arrived"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_or_counted(tmp_path: Path, name: str, good: str, bad: str, message: str) -> None:
    path = written(tmp_path / name, good, bad)
    number = len(good.splitlines()) + 1
    with pytest.raises(ConfigError, match=f"{name}:{number}: .*{message}"):
        read_sessions(path)
    trace = read_sessions(path, skip_bad=True)
    assert len(trace.sessions) == 1
    assert len(trace.skipped) == 1


def test_a_table_without_a_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.csv:1: no column GeneratedTokens"):
        read_sessions(written(tmp_path / "a.csv", "TIMESTAMP,ContextTokens", "2023-11-16 18:15:46,3"), skip_bad=True)


def test_a_number_of_a_thousand_digits_is_not_repeated_in_full(tmp_path: Path) -> None:
    line = '{"session": "a", "workload": "w", "turns": [[' + "9" * 1000 + ", 0, 1, 0, 0]]}"
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: turn 0: prompt of 999") as caught:
        read_sessions(written(tmp_path / "t.jsonl", line))
    assert len(caught.value.message) < 400


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no usable session"):
        read_sessions(written(tmp_path / "empty.jsonl"))


def test_a_decision_log_gives_back_the_sessions_that_were_driven(tmp_path: Path) -> None:
    """A simulated run recorded as the router records, exported, and run again."""
    case = msgspec.structs.replace(scenario("vllm-cpu"), warmup_s=0.0, duration_s=60.0)
    header = Header(tidegate="x", format=1, policy="misa_t", seed=0, params=msgspec.to_builtins(CoreParams()))
    recorder = Recorder(tmp_path / "log.jsonl", header)
    cluster = Cluster(case, "misa_t", CoreParams(), 0, recorder=recorder.record)
    cluster.run(60.0)
    recorder.close()
    trace = read_sessions(tmp_path / "log.jsonl")
    by_name = {session.session.partition("#")[0]: session for session in trace.sessions}
    plan = cluster.workload.sources["agentic"].session(0)
    recorded = by_name["agentic-0"]
    assert [turn.prompt_tokens for turn in recorded.turns] == plan.prompt_tokens()[: len(recorded.turns)]
    assert {turn.output_tokens for turn in recorded.turns} == {24}
    assert all(turn.gap_s == pytest.approx(0.5, abs=0.01) for turn in recorded.turns[1:])
    write_sessions(trace.sessions, tmp_path / "sessions.jsonl")
    again = msgspec.structs.replace(from_trace(tmp_path / "sessions.jsonl"), warmup_s=0.0, duration_s=60.0)
    assert sum(run(again, "misa_t").score.completed.values()) > 20
