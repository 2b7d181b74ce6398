"""A server under test as a process of its own: started, waited for, killed with all that it started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

POLL_S = 0.05


def free_ports(count: int) -> list[int]:
    """Distinct ports that nothing listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


class Process:
    """A command in a process group of its own, its output in `log`. It dies with the test run, also a killed one."""

    def __init__(self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.command = [str(part) for part in command]
        self.log = log
        self.environment = {**os.environ, **(environment or {})}
        self.child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        die_with_parent = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with self.log.open("ab") as output:
            self.child = subprocess.Popen(
                [*die_with_parent, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.pid

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """To the process alone, as a supervisor sends SIGTERM."""
        os.kill(self.pid, number)

    def terminate(self, within_s: float = 30.0) -> None:
        """SIGTERM, and wait for its end."""
        self.signal(signal.SIGTERM)
        assert self.child is not None
        self.child.wait(within_s)

    def kill(self) -> None:
        """The whole group, at once."""
        if self.child is None:
            return
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def wait_healthy(self, url: str, within_s: float) -> None:
        """Until GET answers 200; a process that ends before is an error at once, with the end of its log."""
        deadline = time.monotonic() + within_s
        while not answers(url):
            if not self.alive:
                raise RuntimeError(f"{self.command[0]} ended before {url} answered:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} did not answer in {within_s:.0f} s:\n{self.tail()}")
            time.sleep(POLL_S)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
