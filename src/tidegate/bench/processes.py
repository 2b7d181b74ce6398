"""Servers that a measurement starts: each in its own process group with its own log, all gone at the end.

The end is any: a normal one, an error, Ctrl-C, SIGTERM. A killed parent takes them along where util-linux's setpriv is
installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import aiohttp

POLL_S = 0.1
STOP_S = 10.0  # from SIGTERM to SIGKILL


class Server:
    def __init__(self, name: str, url: str, child: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.url = url
        self.child = child
        self.log = log

    async def ready(self, path: str, within_s: float) -> None:
        """Until GET answers 200. A process that ends before is an error at once, with the end of its log."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + within_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
            while not await _answers(http, self.url + path):
                if self.child.poll() is not None:
                    raise ServerError(f"{self.name} ended with {self.child.returncode} at its start\n{self._tail()}")
                if loop.time() > deadline_s:
                    raise ServerError(f"{self.name} did not answer {path} in {within_s:.0f} s\n{self._tail()}")
                await asyncio.sleep(POLL_S)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of the group has ended
            os.killpg(self.child.pid, number)

    def _tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class ServerError(Exception):
    pass


class Servers:
    """A context: what was started in it does not outlive it."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._running: list[Server] = []

    def __enter__(self) -> Servers:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(*self._running)

    def start(
        self, name: str, command: Sequence[str], url: str, environment: Mapping[str, str] | None = None
    ) -> Server:
        die_with_parent = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        log = self._log_dir / f"{name}.log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*die_with_parent, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        server = Server(name, url, child, log)
        self._running.append(server)
        return server

    def stop(self, *servers: Server) -> None:
        """SIGTERM to all, then SIGKILL to what is left of their groups."""
        for server in servers:
            server.terminate()
        for server in servers:
            try:
                server.child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                server.kill()
                server.child.wait()
        self._running = [server for server in self._running if server not in servers]


@contextlib.contextmanager
def sigterm_ends() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that contexts end what they started."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_ports(count: int) -> list[int]:
    """Distinct ports that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
