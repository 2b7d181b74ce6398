"""What a failed probe says about a replica."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from tests.unit.engines.stub import stub_replica

from tidegate.config.engines import EnginesConfig
from tidegate.engines.control import control_session
from tidegate.engines.probe import Answer, Unanswered, get


async def probe(url: str, *, timeout_s: float = 20.0, connect_timeout_s: float = 20.0, limit_bytes: int = 1000):
    async with control_session(EnginesConfig()) as session:
        return await get(
            session, url, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, limit_bytes=limit_bytes
        )


@contextlib.asynccontextmanager
async def raw_server(answer: bytes) -> AsyncIterator[str]:
    """Answers each connection with these bytes and closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"


async def test_an_answer_is_its_status_and_body() -> None:
    async with stub_replica() as replica:
        replica.answers["/health"] = (503, "busy")
        assert await probe(f"{replica.url}/health") == Answer(503, b"busy")


async def test_a_refused_connection_is_connect() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        failed = await probe(f"http://127.0.0.1:{unused.getsockname()[1]}/")
    assert isinstance(failed, Unanswered)
    assert failed.kind == "connect"
    assert failed.error


async def test_a_name_that_does_not_exist_is_connect() -> None:
    failed = await probe("http://no-such-host.invalid/")
    assert isinstance(failed, Unanswered)
    assert failed.kind == "connect"


async def test_taking_the_connection_and_not_answering_is_hang() -> None:
    async with stub_replica() as replica:
        replica.hanging.add("/health")
        failed = await probe(f"{replica.url}/health", timeout_s=0.1)
        assert failed == Unanswered("hang", "no answer within 0.1 s")


async def test_a_connection_that_is_never_taken_is_connect() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # and nobody accepts: what exceeds the backlog waits in SYN
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        failed = await probe(f"http://127.0.0.1:{address[1]}/", connect_timeout_s=0.2)
        for filler in fillers:
            filler.close()
    assert isinstance(failed, Unanswered)
    assert failed.kind == "connect"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "connect"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", "connect"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "status"),
    ],
)
async def test_broken_connections_and_other_protocols_are_told_apart(answer: bytes, kind: str) -> None:
    async with raw_server(answer) as url:
        failed = await probe(url)
        assert isinstance(failed, Unanswered)
        assert failed.kind == kind


async def test_an_endless_body_is_read_up_to_the_limit() -> None:
    async with stub_replica() as replica:
        replica.answers["/metrics"] = (200, "x" * 100_000)
        answer = await probe(f"{replica.url}/metrics", limit_bytes=100)
        assert isinstance(answer, Answer)
        assert len(answer.body) == 100
