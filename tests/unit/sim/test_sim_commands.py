"""`tidegate sim` on the command line: the contract for scripts, and what is said of bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from tidegate.cli.sim import sim
from tidegate.cli.sim_options import StepTimes, step_times
from tidegate.errors import ConfigError
from tidegate.observe.replay import replay
from tidegate.sim.hardware import PRESETS
from tidegate.sim.latency import LatencyModel

SHORT = ["--scenario", "vllm-cpu", "--warmup-s", "5", "--duration-s", "20"]


def call(*arguments: str) -> str:
    result = CliRunner().invoke(sim, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(sim, list(arguments), catch_exceptions=False)
    return caught.value.message


def test_compare_writes_a_list_of_rows(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "rows.json"
    policies = "sticky_least_loaded,static_cap"
    shown = call("compare", *SHORT, "--policies", policies, "--seeds", "2", "--set", "static_cap.cap=6",
                 "--in-flight", "8,16", "--processes", "1", "--json", str(out))  # fmt: skip
    rows = json.loads(out.read_text())
    assert [(r["in_flight"], r["seed"], r["policy"]) for r in rows] == [
        (n, seed, policy) for n in (8, 16) for seed in (0, 1) for policy in policies.split(",")
    ]
    assert {(r["scenario"], r["replicas"], r["simulated_s"]) for r in rows} == {("vllm-cpu", 2, 25.0)}
    assert "vllm-cpu, 16 sessions in flight, 2 seeds" in shown


def test_a_sweep_names_each_value(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    call("sweep", *SHORT, "--values", "2,8", "--seeds", "1", "--processes", "1", "--json", str(out))
    rows = {row["policy"]: row for row in json.loads(out.read_text())}
    assert list(rows) == ["static_cap:cap=2", "static_cap:cap=8"]
    assert rows["static_cap:cap=2"]["hold_p95_s"] > rows["static_cap:cap=8"]["hold_p95_s"]
    by_class = rows["static_cap:cap=2"]["hold_p95_by_class_s"]
    assert set(by_class) <= {"agentic", "rlvr", "rlhf"}
    assert max(by_class.values()) >= rows["static_cap:cap=2"]["hold_p95_s"]  # which counts those placed at once too


def test_a_run_writes_all_that_is_known_of_it_and_a_report(tmp_path: Path) -> None:
    out, page = tmp_path / "run.json", tmp_path / "run.html"
    call("run", *SHORT, "--policy", "misa_t", "--seed", "3", "--json", str(out), "--html", str(page))
    (found,) = json.loads(out.read_text())
    assert (found["seed"], found["policy"]) == (3, "misa_t")
    assert sum(found["inventory"].values()) == 24
    assert set(found["block_time"]) <= {"agentic", "rlvr", "rlhf"}
    assert 0.0 < found["utilisation"] < 1.0
    assert page.read_text().count("<svg") == 5


def test_a_recorded_run_is_derived_again_and_its_sessions_are_a_trace(tmp_path: Path) -> None:
    log, trace, out = tmp_path / "run.jsonl", tmp_path / "trace.jsonl", tmp_path / "run.json"
    call("run", *SHORT, "--policy", "misa_t", "--set", "misa.turn_s=5", "--seed", "4", "--record", str(log),
         "--json", str(out))  # fmt: skip
    report = replay(log)
    assert report.same
    assert report.policy == "misa_t"
    assert (report.events, report.gaps) == (json.loads(out.read_text())[0]["decisions"], 0)
    assert report.decisions > 100
    call("convert", str(log), str(trace))
    sessions = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {session["workload"] for session in sessions} == {"agentic", "rlvr", "rlhf"}
    assert "give one scenario" in refusal("run", "--scenario", "steady,burst", "--record", str(log))
    assert "--record" in refusal("run", *SHORT, "--record", str(tmp_path / "run.json" / "x"))


def test_exact_replicas_give_the_same_rows(tmp_path: Path) -> None:
    rows = []
    for flags in ([], ["--exact"]):
        out = tmp_path / "rows.json"
        call("compare", *SHORT, "--policies", "misa_t", "--seeds", "1", "--processes", "1", "--json", str(out), *flags)
        rows += json.loads(out.read_text())
    for name in ("contract_per_min", "hit_rate", "preemptions", "tv_pp", "recomputed_prompt_share"):
        assert rows[0][name] == rows[1][name], name


def test_a_trace_is_run_with_its_own_classes(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [
        json.dumps({"session": f"s{n}", "workload": "tools", "turns": [[100, 0, 5, 0, 0], [150, 100, 5, 0, 0.1]]})
        for n in range(5)
    ]
    trace.write_text("\n".join([*lines, "not json"]) + "\n")
    assert "t.jsonl:6" in refusal("compare", "--trace", str(trace))
    out = tmp_path / "rows.json"
    call("compare", "--trace", str(trace), "--skip-bad", "--warmup-s", "1", "--duration-s", "4", "--seeds", "1",
         "--policies", "misa_t", "--processes", "1", "--json", str(out))  # fmt: skip
    (row,) = json.loads(out.read_text())
    assert row["scenario"] == "t.jsonl"
    assert row["contract_per_min"] > 100


def test_convert_says_what_it_left_out(tmp_path: Path) -> None:
    source = tmp_path / "azure.csv"
    source.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,10,2\n2024-05-10 00:00:01,-1,2\n")
    shown = call("convert", str(source), str(tmp_path / "out.jsonl"), "--skip-bad")
    assert "1 sessions, 1 turns, 1 bad lines left out" in shown
    assert "azure.csv:3: turn 0: prompt of -1 tokens" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--scenario", "stead"], "did you mean 'steady'"),
        (["compare", "--policies", "misat"], "did you mean 'misa_t'"),
        (["compare", "--set", "static_cap.cpa=1"], "did you mean 'cap'"),
        (["compare", "--kv-tokens", "1000"], "max_model_len 32768 needs more"),
        (["compare", "--in-flight", "8,x"], "--in-flight '8,x'"),
        (["compare", "--in-flight", "0"], "at least 1"),
        (["compare", "--in-flight", "99999999999"], "at most 10,000,000"),
        (["compare", "--latency", "h200"], "no latency preset 'h200'"),
        (["compare", "--scenario", "steady", "--trace", "x"], "not both"),
        (["compare", "--trace", "/nowhere/x"], "No such file"),
        (["advise", "--scenario", "steady,burst"], "advice is for one scenario"),
        (["run", "--scenario", "cpu-tier", "--exact"], "fast replicas only"),
        (["run", "--scenario", "replica-loss", "--replicas", "1"], "replica 1 is to be lost, and there are 1"),
    ],
)
def test_bad_input_is_refused_with_what_is_wrong(arguments: list[str], message: str) -> None:
    assert message in refusal(*arguments)


@pytest.mark.parametrize("value", ["nan", "inf", "1e300", "-1"])
def test_a_time_that_never_ends_is_refused(value: str) -> None:
    result = CliRunner().invoke(sim, ["run", *SHORT, "--duration-s", value])
    assert result.exit_code == 2
    assert "--duration-s" in result.output


def test_the_command_is_found_and_fails_in_one_line() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("tidegate")), "sim", "run", "--scenario", "nope"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tidegate: no scenario 'nope'")
    assert "Traceback" not in done.stderr


def test_a_fitted_engine_brings_its_step_times_and_what_a_request_takes_beside_them(tmp_path: Path) -> None:
    model = msgspec.structs.asdict(PRESETS["h100-8b"])
    fitted = tmp_path / "engine.json"
    fitted.write_text(json.dumps({"latency": {**model, "prompt_s": 0.25}, "request_s": 0.125, "decode_error": 0.1}))
    assert step_times(str(fitted)) == StepTimes(LatencyModel(**{**model, "prompt_s": 0.25}), 0.125)
    fitted.write_text(json.dumps(model))
    assert step_times(str(fitted)) == StepTimes(PRESETS["h100-8b"], None)
    rates = []
    for request_s in (0.001, 5.0):
        fitted.write_text(json.dumps({"latency": model, "request_s": request_s}))
        out = tmp_path / "rows.json"
        call("compare", *SHORT, "--policies", "static_cap", "--seeds", "1", "--processes", "1",
             "--latency", str(fitted), "--json", str(out))  # fmt: skip
        rates.append(json.loads(out.read_text())[0]["total_per_min"])
    assert rates[1] < rates[0]
