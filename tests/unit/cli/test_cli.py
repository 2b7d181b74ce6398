"""The command line: what it accepts, what it refuses and how, and commands on a gate in this process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner, Result

from tidegate.cli.main import COMMANDS, cli
from tidegate.config.engines import EnginesConfig
from tidegate.config.schema import leaves
from tidegate.config.server import ServerConfig
from tidegate.config.tree import Config
from tidegate.engine.config import EngineConfig
from tidegate.engine.server import EngineServer
from tidegate.errors import ConfigError
from tidegate.server.gate import Gate


def run(*args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, list(args), env=env)


def shown(*args: str, env: dict[str, str] | None = None) -> Any:
    result = run("config", "show", "--json", *args, env=env)
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def refused(*args: str, env: dict[str, str] | None = None) -> str:
    """What `main` prints before it ends with 2."""
    result = run("config", "show", *args, env=env)
    if isinstance(result.exception, ConfigError):
        return result.exception.message
    assert result.exit_code == 2, result.output
    return result.output


def test_help_lists_every_command_without_importing_them() -> None:
    text = run("--help").output
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_exists_and_has_help(name: str) -> None:
    module, attribute, _ = COMMANDS[name]
    assert getattr(importlib.import_module(module), attribute)
    assert run(name, "--help").exit_code == 0


def test_an_unknown_command_or_flag_names_the_nearest() -> None:
    assert "did you mean 'serve'?" in run("srve").output
    assert "--policy" in run("serve", "--polcy", "x").output


def test_serve_help_is_grouped_and_short_and_help_all_is_whole() -> None:
    short, whole = run("serve", "--help").output, run("serve", "--help-all").output
    for group in ("Server:", "Admission:", "Identity:", "Observability:", "vllm-router's names:"):
        assert group in short
    assert "--engines-kv-replay-timeout-s" not in short
    assert [leaf.flag for leaf in leaves().values() if leaf.flag not in whole] == []


@pytest.mark.parametrize(
    "args",
    [
        ["--worker-urls", "http://a", "http://b", "--port", "1"],
        ["--port", "1", "--worker-urls", "http://a", "http://b"],
        ["--worker-urls", "http://a", "--worker-urls", "http://b"],
        ["--worker-urls", "http://a,http://b"],
        ["--worker-urls=http://a", "--worker-urls=http://b"],
        ["--server-worker-urls", "http://a", "http://b"],
    ],
)
def test_worker_urls_may_be_given_in_any_of_the_usual_ways(args: list[str]) -> None:
    assert shown(*args)["server.worker_urls"]["value"] == ["http://a", "http://b"]


def test_a_command_line_of_prime_rl_works() -> None:
    line = "--policy consistent_hash --host 0.0.0.0 --port 8000 --worker-urls http://a http://b"
    rows = shown(*line.split(), "--request-id-headers", "x-session-id", "--prometheus-port", "29000")
    assert rows["server.host"] == {"value": "0.0.0.0", "origin": "flag --host"}
    assert rows["identity.session_headers"]["value"] == ["x-session-id"]
    assert rows["server.prometheus_port"]["value"] == 29000
    assert rows["policy"]["value"] == "consistent_hash"


def test_flags_of_one_meaning_agree_or_are_refused() -> None:
    assert shown("--hold-timeout", "3", "--queue-timeout-secs", "3")["core.admission.hold_timeout_s"]["value"] == 3.0
    assert "both set core.admission.hold_timeout_s" in refused("--hold-timeout", "3", "--queue-timeout-secs", "4")
    assert shown("--disable-retries")["server.max_attempts"]["value"] == 1


def test_each_origin_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "gate.toml"
    file.write_text("seed = 4\n")
    rows = shown("--config", str(file), "--port", "9", env={"TIDEGATE_LOG_LEVEL": "debug"})
    origins = {path: rows[path]["origin"] for path in ("seed", "server.port", "log.level", "policy")}
    assert origins == {
        "seed": f"file {file}",
        "server.port": "flag --port",
        "log.level": "environment TIDEGATE_LOG_LEVEL",
        "policy": "default",
    }
    text = run("config", "show", "--port", "9").output
    assert "9  (flag --port)" in text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--policy", "stiky_least_loaded"], "did you mean 'sticky_least_loaded'?"),
        (["--port", "x"], "flag --port: server.port: Expected `int`"),
        (["--overload", "rejct"], "did you mean 'reject'?"),
        (["--intra-node-data-parallel-size", "2"], "list each data-parallel rank's own URL"),
        (["--vllm-pd-disaggregation"], "prefill/decode disaggregation is not supported"),
        (["--prefill", "http://a", "9000"], "prefill/decode disaggregation is not supported"),
        (["--service-discovery"], "Kubernetes discovery is not supported"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(args: list[str], said: str) -> None:
    assert said in refused(*args)


def test_flags_without_effect_are_taken_and_said() -> None:
    result = run("config", "show", "--worker-startup-timeout-secs", "60", "--intra-node-data-parallel-size", "1")
    assert result.exit_code == 0
    assert "--worker-startup-timeout-secs has no effect" in result.output


def test_a_config_error_ends_serve_with_one_line_and_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidegate.cli.main import main

    monkeypatch.setattr("sys.argv", ["tidegate", "serve", "--port", "x"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("tidegate: flag --port: ")


# --- commands on a running gate --------------------------------------------------------------------------------------
@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    engines = EnginesConfig(scrape_period_s=0.05, health_period_s=0.1)
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(EngineServer(EngineConfig(kv_tokens=8192, time_scale=50.0)))
        server = ServerConfig(worker_urls=(engine.url, "http://127.0.0.1:9"), port=0)
        gate = await stack.enter_async_context(Gate(Config(policy="static_cap", server=server, engines=engines)))
        await gate.replicas.wait_probed()
        async with aiohttp.ClientSession() as client:
            body = {"model": "tidegate", "prompt": "hello", "max_tokens": 2}
            headers = {"X-Session-ID": "s", "X-Workload-Class": "agentic"}
            async with client.post(f"{gate.url}/v1/completions", json=body, headers=headers) as reply:
                assert reply.status == 200
        yield gate


async def test_top_shows_the_pool(gate: Gate) -> None:
    result = await asyncio.to_thread(run, "top", gate.url, "--once", env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "static_cap" in result.output
    assert "agentic" in result.output
    assert all(url in result.output for url in gate.replicas.urls)


async def test_doctor_says_what_is_well_and_what_is_not(gate: Gate) -> None:
    result = await asyncio.to_thread(run, "doctor", gate.url, "--json")
    findings = json.loads(result.output)
    up, down = gate.replicas.urls
    by_place = {place: {f["what"]: f["grade"] for f in findings if f["where"] == place} for place in (up, down)}
    assert by_place[up]["vllm answers"] == "ok"
    assert any("KV capacity" in what and grade == "ok" for what, grade in by_place[up].items())
    assert by_place[up]["it publishes no KV events"] == "warn"
    assert set(by_place[down].values()) == {"fail"}
    assert result.exit_code == 1
    text = (await asyncio.to_thread(run, "doctor", gate.url)).output
    assert f"✗ {down}" in text


async def test_top_gives_the_state_to_scripts(gate: Gate) -> None:
    result = await asyncio.to_thread(run, "top", gate.url, "--once", "--json")
    assert json.loads(result.stdout)["policy"] == gate.config.policy


def test_what_does_not_speak_http_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            side, _ = server.accept()
            side.sendall(b"SSH-2.0-x\r\n")
            side.close()

        thread = threading.Thread(target=greet)
        thread.start()
        result = run("top", f"127.0.0.1:{server.getsockname()[1]}", "--once")
        thread.join()
    assert result.exit_code == 1
    assert "no gate answers" in result.output
    assert "SSH-2.0-x" in result.output or "reset" in result.output


@pytest.mark.parametrize("command", ["top", "doctor"])
def test_no_gate_there_is_said_in_one_line(command: str) -> None:
    result = run(command, "http://127.0.0.1:9", *(["--once"] if command == "top" else []))
    assert result.exit_code == 1
    assert "no gate answers" in result.output
