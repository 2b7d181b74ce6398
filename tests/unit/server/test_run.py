"""`tidegate serve` as a process: how it starts, what it says, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tidegate.observe.replay import replay

TIDEGATE = str(Path(sys.executable).with_name("tidegate"))
NOWHERE = "http://127.0.0.1:9"

Start: TypeAlias = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[subprocess.Popen[str]] = []

    def begin(*args: str, **environment: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [TIDEGATE, "serve", "--policy", "round_robin", "--port", "0", "--log-format", "json", *args],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        children.append(child)
        return child

    yield begin
    for child in children:
        child.kill()
        child.wait()
        assert child.stderr is not None
        child.stderr.close()


def line_with(child: subprocess.Popen[str], event: str) -> Any:
    """The first log line of this event; the end of the process is a failure."""
    assert child.stderr is not None
    seen = []
    for text in child.stderr:
        seen.append(text)
        line = json.loads(text)
        if line["event"] == event:
            return line
    raise AssertionError(f"ended without {event!r}: {seen}")


def get(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_it_starts_with_an_unreachable_worker_says_so_and_ends_clean(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    child = start("--worker-urls", NOWHERE, "--record", str(log))
    listening = line_with(child, "listening")
    assert list(listening)[:3] == ["timestamp", "level", "event"]
    assert listening["policy"] == "round_robin"
    unusable = line_with(child, "replica is not usable")
    assert (unusable["replica"], unusable["level"]) == (NOWHERE, "warning")
    assert unusable["error"]
    assert line_with(child, "pool")["usable"] == 0
    assert get(listening["url"] + "/health") == 200
    assert get(listening["url"] + "/readiness") == 503
    child.send_signal(signal.SIGTERM)
    assert line_with(child, "draining")["running"] == 0
    assert line_with(child, "stopped")["cut"] == 0
    assert child.wait(30) == 0
    report = replay(log)
    assert report.same
    assert not report.truncated
    assert report.events > 0


def test_a_hangup_begins_the_decision_log_anew_where_it_was_moved_away(start: Start, tmp_path: Path) -> None:
    log, moved = tmp_path / "decisions.jsonl", tmp_path / "decisions.jsonl.1"
    child = start("--worker-urls", NOWHERE, "--record", str(log), "--record-flush-s", "0.01")
    line_with(child, "pool")
    log.rename(moved)
    child.send_signal(signal.SIGHUP)
    assert line_with(child, "decision log reopened")["part"] == 1
    child.send_signal(signal.SIGTERM)
    line_with(child, "stopped")
    assert child.wait(30) == 0
    report = replay(moved, log)
    assert report.same
    assert not report.truncated


def test_interrupt_ends_it_too(start: Start) -> None:
    child = start()
    line_with(child, "no replicas are listed: add some with POST /workers")
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 0


def test_too_few_open_files_are_said_at_start_with_the_remedy(start: Start) -> None:
    child = start("--http-max-connections", "1000000000")
    line = line_with(child, "too few open files for http.max_connections")
    assert line["connections_that_fit"] < line["needed"]
    assert "ulimit -n" in line["remedy"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--worker-urls", "ftp://x"], "worker URL 'ftp://x' is not usable"),
        (["--worker-urls", "http://a:1", "a:1"], "stands twice"),
        (["--record", "/proc/nowhere/log"], "record.path '/proc/nowhere/log' cannot be written"),
        (["--config", "/nowhere.toml"], "No such file"),
    ],
)
def test_what_keeps_it_from_starting_is_one_line(start: Start, args: list[str], said: str) -> None:
    child = start(*args)
    assert child.stderr is not None
    text = child.stderr.read()
    assert child.wait(30) == 2
    last = text.splitlines()[-1]
    assert last.startswith("tidegate: ")
    assert said in last
    assert "Traceback" not in text


def test_a_port_that_is_taken_is_one_line(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        child = start("--server-port", str(port))
        assert child.stderr is not None
        assert "both set server.port" in child.stderr.read()  # the fixture's --port 0
        child = start(TIDEGATE_SERVER_PORT=str(port), TIDEGATE_SERVER_HOST="127.0.0.1")
        line_with(child, "listening")  # a flag wins over the environment
        child = start(TIDEGATE_SERVER_PROMETHEUS_PORT=str(port))
        assert child.stderr is not None
        assert f"tidegate: cannot listen on 127.0.0.1:{port}: " in child.stderr.read()
        assert child.wait(30) == 2
