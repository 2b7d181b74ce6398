"""A gate that runs out of open files says so, waits, and blames no replica."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.conftest import Replica, StartGate
from tests.e2e.gate import Gate, replica_of
from tests.e2e.inference import completion, encode
from tests.e2e.waiting import until

pytestmark = pytest.mark.embedded


def starve(pid: int) -> tuple[int, int]:
    """Not one file more for the process. Its limits before."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(set(range(len(taken) + 1)) - taken), before[1]))
    return before


class Connection:
    """One that is open before the files run out."""

    async def open(self, gate: Gate) -> None:
        host, port = gate.url.removeprefix("http://").split(":")
        self.reader, self.writer = await asyncio.open_connection(host, int(port))
        # Answered, so accepted: one that still lies in the backlog would be reset for want of a file.
        self.writer.write(b"GET /health HTTP/1.1\r\nHost: gate\r\n\r\n")
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await self.reader.readexactly(length)

    def send(self, session: str) -> None:
        body = encode(completion("x"))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: gate\r\nX-Session-ID: {session}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)

    async def status(self) -> int:
        return int((await self.reader.readuntil(b"\r\n"))[9:12])


@pytest.fixture
def connections() -> Iterator[list[Connection]]:
    opened = [Connection() for _ in range(8)]
    yield opened
    for connection in opened:
        connection.writer.transport.abort()


async def test_requests_wait_for_a_file_and_the_replica_is_not_left(
    start_gate: StartGate,
    replicas: list[Replica],
    client: aiohttp.ClientSession,
    connections: list[Connection],
    tmp_path: Path,
) -> None:
    gate = start_gate([replicas[0].url])
    await gate.ready(client, 1)
    for connection in connections:
        await connection.open(gate)
    await gate.state(client)  # by the connection that the client keeps
    limits = starve(gate.process.pid)
    for number, connection in enumerate(connections):
        connection.send(f"s{number}")

    def starved(state: Any) -> bool:
        return any(alarm.startswith("open_files") for alarm in state["alarms"])

    await until(lambda: gate.state(client), starved)
    await asyncio.sleep(1.0)  # five health periods
    state = await gate.state(client)
    assert replica_of(state, replicas[0].url)["health"]["state"] == "healthy"
    resource.prlimit(gate.process.pid, resource.RLIMIT_NOFILE, limits)
    statuses = await asyncio.wait_for(asyncio.gather(*(connection.status() for connection in connections)), 30)
    assert statuses == [200] * len(connections)
    async with client.get(f"{gate.url}/metrics") as reply:
        text = await reply.text()
    assert 'tidegate_alarms{alarm="open_files"} 1.0' in text
    assert "connect_failed" not in text
