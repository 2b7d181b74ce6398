"""Limits of size, time and number; slow and hostile clients; drain."""

from __future__ import annotations

import asyncio
import json
import resource

import pytest

HEAD = b"POST / HTTP/1.1\r\nHost: gate\r\n"
HELLO = HEAD + b"Content-Length: 5\r\n\r\nhello"
OK = b"HTTP/1.1 200 OK\r\n"


def code(reply) -> str:
    return json.loads(reply.body)["error"]["code"]


@pytest.mark.parametrize("whole", [True, False])
async def test_headers_over_the_limit_are_answered_431(bench, handler_type, whole: bool) -> None:
    client = await bench.client(await bench.gate(handler_type(), max_header_bytes=2000))
    client.send(HEAD + b"A: " + b"b" * 2000 + (b"\r\n\r\n" if whole else b""))
    reply = await client.reply()
    assert (reply.status, code(reply)) == (431, "headers_too_large")
    assert await client.rest() == b""


async def test_a_body_announced_too_long_is_refused_before_it_is_read(bench, handler_type) -> None:
    handler = handler_type()
    client = await bench.client(await bench.gate(handler, max_body_bytes=1000))
    client.send(HEAD + b"Content-Length: 1001\r\nExpect: 100-continue\r\n\r\n")
    reply = await client.reply()
    assert (reply.status, code(reply)) == (413, "body_too_large")
    assert handler.opened_ids == []


async def test_the_answer_reaches_a_client_that_is_still_uploading(bench, handler_type) -> None:
    client = await bench.client(await bench.gate(handler_type(), max_body_bytes=1000))
    client.send(HEAD + b"Content-Length: 3000000\r\n\r\n" + b"x" * 3_000_000)
    await client.writer.drain()
    assert (await client.reply()).status == 413
    assert await client.rest() == b""


@pytest.mark.parametrize("whole_bodies", [False, True])
async def test_a_chunked_body_is_refused_when_it_passes_the_limit(bench, handler_type, whole_bodies: bool) -> None:
    replica = await bench.echo()
    handler = handler_type(replica.url)
    handler.whole_bodies = whole_bodies
    client = await bench.client(await bench.gate(handler, max_body_bytes=1000))
    client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"64\r\n%b\r\n" % (b"x" * 100))
    await asyncio.sleep(0.05)
    client.send(b"64\r\n%b\r\n" % (b"x" * 100) * 10)
    reply = await client.reply()
    assert (reply.status, code(reply)) == (413, "body_too_large")
    assert handler.ends == ([] if whole_bodies else [("aborted", "body_too_large")])
    assert replica.seen == []


async def test_slow_headers_are_answered_408_however_steadily_they_drip(bench, handler_type) -> None:
    client = await bench.client(await bench.gate(handler_type(), header_timeout_s=0.3))

    async def drip() -> None:
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\n")
        while True:
            client.send(b"a: b\r\n")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    reply = await client.reply()
    dripping.cancel()
    assert (reply.status, code(reply)) == (408, "request_timeout")


@pytest.mark.parametrize("hold", [False, True])
async def test_a_body_that_stops_is_answered_408(bench, handler_type, hold: bool) -> None:
    replica = await bench.echo()
    handler = handler_type(replica.url)
    handler.hold = hold
    client = await bench.client(await bench.gate(handler, body_timeout_s=0.3))
    client.send(HEAD + b"Content-Length: 10\r\n\r\nhello")
    reply = await client.reply()
    assert (reply.status, code(reply)) == (408, "request_timeout")
    assert handler.ends == [("aborted", "request_timeout")]


async def test_a_held_client_that_waits_for_100_continue_is_not_timed_out(bench, handler_type) -> None:
    replica = await bench.echo()
    handler = handler_type(replica.url)
    handler.hold = True
    client = await bench.client(await bench.gate(handler, body_timeout_s=0.3, header_timeout_s=0.3, keep_alive_s=0.3))
    client.send(HEAD + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
    await asyncio.sleep(0.6)
    handler.held[0].place(replica.url)
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"hello")
    assert (await client.reply()).body == b"hello"


@pytest.mark.parametrize("used", [False, True])
async def test_an_idle_connection_is_closed_quietly(bench, handler_type, used: bool) -> None:
    replica = await bench.echo()
    client = await bench.client(await bench.gate(handler_type(replica.url), keep_alive_s=0.2))
    if used:
        client.send(HELLO)
        assert (await client.reply()).body == b"hello"
    assert await client.rest() == b""


async def test_no_time_limit_falls_on_a_response_that_takes_long(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        await asyncio.sleep(0.5)
        side.send(OK + b"Content-Length: 2\r\n\r\nok")

    replica = await bench.replica(script)
    limits = {"keep_alive_s": 0.1, "header_timeout_s": 0.1, "body_timeout_s": 0.1, "upstream_keep_alive_s": 0.1}
    client = await bench.client(await bench.gate(handler_type(replica.url), **limits))
    client.send(HELLO)
    assert (await client.reply()).body == b"ok"


async def test_idle_connections_to_a_replica_are_closed_first_by_us(bench, handler_type) -> None:
    closed = asyncio.Event()

    async def script(side, number: int) -> None:
        await side.request()
        side.send(OK + b"Content-Length: 2\r\n\r\nok")
        await side.gone()
        closed.set()

    replica = await bench.replica(script)
    client = await bench.client(await bench.gate(handler_type(replica.url), upstream_keep_alive_s=0.2))
    client.send(HELLO)
    await client.reply()
    await asyncio.wait_for(closed.wait(), 10)


async def test_connections_over_the_limit_are_answered_503(bench, handler_type) -> None:
    replica = await bench.echo()
    listener = await bench.gate(handler_type(replica.url), max_connections=2)
    first, second = await bench.client(listener), await bench.client(listener)
    first.send(HELLO)
    second.send(HELLO)
    assert (await first.reply()).status == (await second.reply()).status == 200
    third = await bench.client(listener)
    third.send(HELLO)
    reply = await third.reply()
    assert (reply.status, code(reply), reply.header(b"retry-after")) == (503, "too_many_connections", b"1")
    assert await third.rest() == b""
    assert listener.refused_total == 1
    first.send(HELLO)
    assert (await first.reply()).body == b"hello"


async def test_a_client_that_does_not_read_stops_the_replica(bench, handler_type) -> None:
    sent = 0

    async def script(side, number: int) -> None:
        nonlocal sent
        await side.request()
        side.send(OK + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(500):
            side.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await side.writer.drain()
            sent += 65536
        side.send(b"0\r\n\r\n")
        await side.gone()

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    listener = await bench.gate(handler, buffer_bytes=65536)
    client = await bench.client(listener)
    client.reader._limit = 1  # the stream reader stops its transport at twice this
    client.send(HELLO)
    await handler.until(lambda: handler.opened_ids)
    before = -1
    while sent != before or not sent:  # until the replica is stopped
        before = sent
        await asyncio.sleep(0.2)
    assert sent < 500 * 65536
    held = sum(c.transport.get_write_buffer_size() for c in listener._connections)
    assert held < 1_000_000
    client.reader._limit = 65536
    reply = await client.reply()
    assert len(reply.body) == 500 * 65536
    assert handler.ends == [("ok", None)]


async def test_a_replica_that_does_not_read_stops_the_client(bench, handler_type) -> None:
    go = asyncio.Event()

    async def script(side, number: int) -> None:
        await side.head()
        side.writer.transport.pause_reading()
        await go.wait()
        side.writer.transport.resume_reading()
        left = 50_000_000
        while left:
            left -= len(await side.reader.read(left))
        side.send(OK + b"Content-Length: 2\r\n\r\nok")

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    listener = await bench.gate(handler, buffer_bytes=65536, replay_bytes=65536)
    client = await bench.client(listener)
    client.send(HEAD + b"Content-Length: 50000000\r\n\r\n" + b"x" * 50_000_000)
    before = -1
    while listener.bytes_in != before or not before:
        before = listener.bytes_in
        await asyncio.sleep(0.2)
    assert listener.bytes_in < 50_000_000
    assert listener.replay_bytes <= 65536
    go.set()
    assert (await client.reply()).body == b"ok"


async def test_a_held_body_is_read_up_to_what_is_kept_for_a_replay(bench, handler_type) -> None:
    replica = await bench.echo()
    handler = handler_type(replica.url)
    handler.hold = True
    listener = await bench.gate(handler, buffer_bytes=65536, replay_bytes=200_000)
    client = await bench.client(listener)
    body = b"x" * 20_000_000
    client.send(HEAD + b"Content-Length: 20000000\r\n\r\n" + body)
    await handler.until(lambda: handler.held)
    await asyncio.sleep(0.3)
    assert 200_000 < listener.replay_bytes < 600_000
    handler.held[0].place(replica.url)
    assert (await client.reply()).body == body


async def test_thousands_of_idle_connections_do_not_slow_a_request(bench, handler_type) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(2000, (hard - 200) // 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count * 2 + 200), hard))
    replica = await bench.echo()
    handler = handler_type(replica.url)
    listener = await bench.gate(handler)
    idle = []
    for _ in range(count // 100):
        idle += await asyncio.gather(*(asyncio.open_connection("127.0.0.1", listener.port) for _ in range(100)))
    client = await bench.client(listener)
    client.send(HELLO)
    assert (await client.reply()).body == b"hello"
    assert listener.connections == len(idle) + 1
    for _, writer in idle:
        writer.transport.abort()


# --- drain --------------------------------------------------------------------------------------------------------
async def test_drain_lets_exchanges_end_and_takes_no_new_ones(bench, handler_type) -> None:
    finish = asyncio.Event()

    async def script(side, number: int) -> None:
        await side.request()
        side.send(OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await finish.wait()
        side.send(b"0\r\n\r\n")

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    listener = await bench.gate(handler)
    port = listener.port
    idle, busy = await bench.client(listener), await bench.client(listener)
    busy.send(HELLO)
    await busy.reader.readuntil(b"hello\r\n")
    draining = asyncio.create_task(listener.drain(10))
    assert await idle.rest() == b""
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    finish.set()
    assert await busy.rest() == b"0\r\n\r\n"
    await draining
    assert handler.ends == [("ok", None)]


async def test_a_response_that_begins_while_draining_says_close(bench, handler_type) -> None:
    replica = await bench.echo()
    handler = handler_type(replica.url)
    handler.hold = True
    listener = await bench.gate(handler)
    client = await bench.client(listener)
    client.send(HELLO * 2)
    await handler.until(lambda: handler.held)
    draining = asyncio.create_task(listener.drain(10))
    await asyncio.sleep(0)
    handler.held[0].place(replica.url)
    reply = await client.reply()
    assert (reply.body, reply.header(b"connection")) == (b"hello", b"close")
    assert await client.rest() == b""
    await draining
    assert len(handler.opened_ids) == 1


async def test_drain_aborts_what_outlasts_it(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        await side.gone()

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    listener = await bench.gate(handler)
    client = await bench.client(listener)
    client.send(HELLO)
    await handler.until(lambda: handler.opened_ids)
    await listener.drain(0.1)
    assert handler.ends == [("aborted", None)]
    assert await client.rest() == b""
