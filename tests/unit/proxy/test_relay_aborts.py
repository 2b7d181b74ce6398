"""The client leaves, at each phase. Accounting is checked by the fixture's end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

HEAD = b"POST / HTTP/1.1\r\nHost: gate\r\n"
HELLO = HEAD + b"Content-Length: 5\r\n\r\nhello"
OK = b"HTTP/1.1 200 OK\r\n"


class WaitingMeter:
    def request_body(self, chunk: bytes) -> None: ...
    def response_head(self, status: int, headers: object) -> str:
        return "wait"

    def response_body(self, chunk: bytes) -> str:
        return "wait"

    def response_end(self) -> str:
        return "wait"


PHASES = ["held", "held_uploading", "held_with_full_buffer", "connecting", "uploading", "stalled_upload", "waiting"]
PHASES += ["kept_back", "streaming", "stalled_stream"]


@pytest.fixture
def silent(bench) -> Iterator[str]:
    with bench.silent_port() as url:
        yield url


@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves_is_seen_at_once_and_the_replica_told(bench, handler_type, silent, phase) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def script(side, number: int) -> None:
        await side.head()
        asked.set()
        if phase in ("waiting", "kept_back"):
            await side.reader.readexactly(5)
        if phase == "kept_back":
            side.send(OK + b"Content-Length: 9\r\n\r\nhel")
        if phase == "streaming":
            side.send(OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        if phase == "stalled_stream":
            side.send(OK + b"Content-Length: 100000000\r\n\r\n" + b"x" * 99_000_000)
        if phase == "stalled_upload":
            await handler.until(lambda: handler.ends)
        await side.gone()
        left.set()

    replica = await bench.replica(script)
    handler = handler_type(silent if phase == "connecting" else replica.url)
    handler.hold = phase.startswith("held")
    handler.meter = WaitingMeter if phase == "kept_back" else None
    listener = await bench.gate(handler, buffer_bytes=4096, replay_bytes=4096)
    client = await bench.client(listener)
    if phase in ("held", "waiting", "kept_back", "streaming", "stalled_stream", "connecting"):
        client.send(HELLO)
    elif phase in ("held_uploading", "uploading"):
        client.send(HEAD + b"Content-Length: 500\r\n\r\nhello")
    else:
        client.send(HEAD + b"Content-Length: 100000000\r\n\r\n")
        while not listener.hangups.watching:  # until the gate stops to read
            client.send(b"x" * 16_384)
            await asyncio.sleep(0.001)
    await handler.until(lambda: handler.opened_ids)
    if not (handler.hold or phase == "connecting"):
        await asyncio.wait_for(asked.wait(), 10)
    if phase == "streaming":
        await client.reader.readuntil(b"hello\r\n")
    await asyncio.sleep(0.1)
    assert bool(listener.hangups.watching) == (phase in ("held_with_full_buffer", "stalled_upload"))
    assert handler.ends == []
    await client.close()
    await handler.until(lambda: handler.ends)
    assert handler.ends == [("aborted", None)]
    if asked.is_set():
        await asyncio.wait_for(left.wait(), 10)
    for exchange in handler.held:
        exchange.place(replica.url)  # too late: ignored
    assert replica.connections == (0 if handler.hold or phase == "connecting" else 1)


async def test_a_client_that_leaves_does_not_run_its_pipelined_requests(bench, handler_type) -> None:
    replica = await bench.echo()
    handler = handler_type(replica.url)
    handler.hold = True
    client = await bench.client(await bench.gate(handler))
    client.send(HELLO * 5)
    await handler.until(lambda: handler.held)
    await client.close()
    await handler.until(lambda: handler.ends)
    assert len(handler.opened_ids) == 1
