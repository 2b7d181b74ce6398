from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tidegate.bench.processes import Server, ServerError, Servers, free_ports, sigterm_ends

SERVE = "import http.server, sys; http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]))"
WITH_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"


def start(servers: Servers, code: str) -> Server:
    (port,) = free_ports(1)
    return servers.start("server", [sys.executable, "-c", code, str(port)], f"http://127.0.0.1:{port}")


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_server_is_waited_for_and_gone_after_the_context(tmp_path: Path) -> None:
    with Servers(tmp_path) as servers:
        server = start(servers, SERVE)
        await server.ready("/", 60)
    assert server.child.returncode is not None


async def test_a_server_that_ends_at_its_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    with Servers(tmp_path) as servers:
        server = start(servers, "print('no such model'); raise SystemExit(3)")
        with pytest.raises(ServerError, match=r"ended with 3(?s:.*)no such model"):
            await server.ready("/", 60)


async def test_a_server_that_never_answers_is_an_error(tmp_path: Path) -> None:
    with Servers(tmp_path) as servers:
        server = start(servers, "import time; time.sleep(600)")
        with pytest.raises(ServerError, match="did not answer / in 0 s"):
            await server.ready("/", 0.2)


def test_what_a_server_started_dies_with_it_also_on_an_error(tmp_path: Path) -> None:
    started: list[Server] = []

    def interrupted() -> None:
        with Servers(tmp_path) as servers:
            started.append(start(servers, WITH_CHILD))
            pid = started[0].child.pid
            while not Path(f"/proc/{pid}/task/{pid}/children").read_text():
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    deadline_s = time.monotonic() + 60
    while not group_is_gone(started[0].child.pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert group_is_gone(started[0].child.pid)


def test_sigterm_unwinds_the_stack() -> None:
    def terminated() -> None:
        with sigterm_ends():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        terminated()
    assert signal.getsignal(signal.SIGTERM) is before


def test_free_ports_are_distinct() -> None:
    assert len(set(free_ports(20))) == 20
