"""What passes: bytes, framing, connections."""

from __future__ import annotations

import asyncio

import pytest

HEAD = b"Host: gate\r\n"
POST = b"POST /v1/completions?x=%2F HTTP/1.1\r\n" + HEAD


async def test_a_request_passes_unchanged_and_names_the_replica(bench, handler_type) -> None:
    replica = await bench.echo()
    listener = await bench.gate(handler_type(replica.url + "/base/"))
    client = await bench.client(listener)
    body = bytes(range(256)) * 3
    lines = b"x-B:  two  words \r\nX-A: 1\r\nx-a: 2\r\nX_Session_ID: s\r\nContent-Length: %d\r\n" % len(body)
    client.send(POST + lines + b"\r\n" + body)
    reply = await client.reply()
    assert reply.body == body
    head, seen = replica.seen[0]
    start, host, via, rest = head.split(b"\r\n", 3)
    assert start == b"POST /base/v1/completions?x=%2F HTTP/1.1"
    assert host == b"Host: " + replica.url.removeprefix("http://").encode()
    assert via.startswith(b"Via: 1.1 tidegate-")
    assert rest == lines + b"\r\n"
    assert seen == body


async def test_chunked_requests_pass(bench, handler_type) -> None:
    replica = await bench.echo()
    listener = await bench.gate(handler_type(replica.url))
    client = await bench.client(listener)
    client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel")
    await asyncio.sleep(0.05)
    client.send(b"lo\r\n6;ext=1\r\n world\r\n0\r\nTrailer: dropped\r\n\r\n")
    assert (await client.reply()).body == b"hello world"
    assert b"Transfer-Encoding: chunked\r\n" in replica.seen[0][0]


RESPONSES = [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-a: 1\r\nx-A: 2\r\n\r\nhello", b"hello"),
    (b"HTTP/1.1 404 Gone Fishing\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", b"hello"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    (b"HTTP/1.1 204 No Content\r\nX: y\r\n\r\n", b""),
    (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n\r\n", b""),
]


@pytest.mark.parametrize(("raw", "body"), RESPONSES)
async def test_responses_keep_their_framing_and_both_connections_live_on(bench, handler_type, raw, body) -> None:
    async def script(side, number: int) -> None:
        while True:
            await side.request()
            side.send(raw)

    replica = await bench.replica(script)
    listener = await bench.gate(handler_type(replica.url))
    client = await bench.client(listener)
    for _ in range(3):
        client.send(b"GET / HTTP/1.1\r\n" + HEAD + b"\r\n")
        reply = await client.reply()
        assert reply.body == body
        assert raw.startswith(b"HTTP/1.1 %d" % reply.status)
        sent = [line.split(b": ", 1) for line in raw.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]]
        assert [list(header) for header in reply.headers] == sent
    assert (replica.connections, listener.pool.opened, listener.pool.reused) == (1, 1, 2)
    assert listener.connections_total == 1


@pytest.mark.parametrize("framing", [b"Content-Length: 5", b"Transfer-Encoding: chunked"])
async def test_a_response_to_head_has_headers_alone(bench, handler_type, framing: bytes) -> None:
    async def script(side, number: int) -> None:
        while True:
            await side.head()
            side.send(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n")

    replica = await bench.replica(script)
    client = await bench.client(await bench.gate(handler_type(replica.url)))
    for _ in range(2):
        client.send(b"HEAD / HTTP/1.1\r\n" + HEAD + b"\r\n")
        reply = await client.reply(b"HEAD")
        assert (reply.status, reply.body) == (200, b"")
        assert [b": ".join(header) for header in reply.headers] == [framing]
    assert replica.connections == 1


async def test_a_response_that_ends_with_its_connection_stays_so(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        side.send(b"HTTP/1.1 200 OK\r\n\r\nhel")
        await asyncio.sleep(0.05)
        side.send(b"lo")

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    client = await bench.client(await bench.gate(handler))
    client.send(b"GET / HTTP/1.1\r\n" + HEAD + b"\r\n")
    reply = await client.reply()
    assert reply.body == b"hello"
    assert reply.header(b"connection") == b"close"
    assert handler.ends == [("ok", None)]


async def test_an_http_1_0_client_gets_no_chunks(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        while True:
            await side.request()
            side.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")

    replica = await bench.replica(script)
    client = await bench.client(await bench.gate(handler_type(replica.url)))
    client.send(b"GET / HTTP/1.0\r\n\r\n")
    assert await client.rest() == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"


async def test_an_http_1_0_client_may_keep_its_connection(bench, handler_type) -> None:
    replica = await bench.echo()
    client = await bench.client(await bench.gate(handler_type(replica.url)))
    for _ in range(2):
        client.send(b"POST / HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nhi")
        reply = await client.reply()
        assert (reply.body, reply.header(b"connection")) == (b"hi", b"keep-alive")


async def test_informational_responses_pass_but_100(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        side.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n")
        await asyncio.sleep(0.05)
        side.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

    replica = await bench.replica(script)
    client = await bench.client(await bench.gate(handler_type(replica.url)))
    client.send(b"GET / HTTP/1.1\r\nConnection: close\r\n" + HEAD + b"\r\n")
    assert await client.rest() == (
        b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    )


async def test_pipelined_requests_are_answered_in_order(bench, handler_type) -> None:
    replica = await bench.echo()
    listener = await bench.gate(handler_type(replica.url))
    client = await bench.client(listener)
    bodies = [b"%d" % i for i in range(50)]
    fixed = [POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body) for body in bodies]
    chunked = [POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(b), b) for b in bodies]
    client.send(b"".join(a + b for a, b in zip(fixed, chunked, strict=True)))
    for body in bodies:
        assert (await client.reply()).body == body
        assert (await client.reply()).body == body
    assert replica.connections == 1


async def test_more_pipelined_than_the_buffer_waits_in_the_socket(bench, handler_type) -> None:
    replica = await bench.echo()
    handler = handler_type(replica.url)
    handler.hold = True
    client = await bench.client(await bench.gate(handler, buffer_bytes=4096))
    request = POST + b"Content-Length: 3\r\n\r\nabc"
    client.send(request * 2000)
    await handler.until(lambda: handler.held)
    handler.hold = False
    handler.held[0].place(replica.url)
    for _ in range(2000):
        assert (await client.reply()).body == b"abc"


async def test_an_empty_line_before_a_request_is_ignored(bench, handler_type) -> None:
    replica = await bench.echo()
    client = await bench.client(await bench.gate(handler_type(replica.url)))
    client.send(b"\r\n" + POST + b"Content-Length: 2\r\n\r\nhi\r\n" + POST + b"Content-Length: 2\r\n\r\nho")
    assert (await client.reply()).body == b"hi"
    assert (await client.reply()).body == b"ho"


async def test_a_chunk_goes_out_as_soon_as_it_comes_in(bench, handler_type) -> None:
    turn = asyncio.Queue[None]()

    async def script(side, number: int) -> None:
        await side.request()
        side.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for i in range(3):
            await turn.get()
            side.send(b"9\r\ndata: %d\n\n\r\n" % i)
        await turn.get()
        side.send(b"0\r\n\r\n")

    replica = await bench.replica(script)
    client = await bench.client(await bench.gate(handler_type(replica.url)))
    client.send(b"GET / HTTP/1.1\r\n" + HEAD + b"\r\n")
    assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    for i in range(3):  # each must arrive before the next is sent
        turn.put_nowait(None)
        assert await client.reader.readexactly(14) == b"9\r\ndata: %d\n\n\r\n" % i
    turn.put_nowait(None)
    assert await client.reader.readexactly(5) == b"0\r\n\r\n"


async def test_a_held_request_that_expects_100_does_not_upload(bench, handler_type) -> None:
    replica = await bench.echo()
    handler = handler_type(replica.url)
    handler.hold = True
    client = await bench.client(await bench.gate(handler))
    client.send(POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
    await handler.until(lambda: handler.held)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.reader.read(1), 0.1)
    handler.held[0].place(replica.url)
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"hello")
    assert (await client.reply()).body == b"hello"
    assert b"Expect" not in replica.seen[0][0]


async def test_a_body_that_is_wanted_whole_is_asked_for_and_given(bench, handler_type) -> None:
    replica = await bench.echo()
    handler = handler_type(replica.url)
    handler.whole_bodies = True
    client = await bench.client(await bench.gate(handler, buffer_bytes=4096, replay_bytes=0))
    body = b"x" * 1_000_000
    client.send(POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(body)
    assert (await client.reply()).body == body
    assert handler.bodies == [body]


async def test_an_early_answer_leaves_both_connections_in_use(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        while True:
            await side.head()
            side.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await side.reader.readexactly(10)

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    client = await bench.client(await bench.gate(handler))
    for _ in range(2):
        client.send(POST + b"Content-Length: 10\r\n\r\n12345")
        assert (await client.reply()).body == b"ok"
        client.send(b"67890")
    await handler.until(lambda: len(handler.ends) == 2)
    assert replica.connections == 1


async def test_an_early_answer_of_a_replica_that_closes_reaches_the_client(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.head()
        side.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    client = await bench.client(await bench.gate(handler))
    client.send(POST + b"Content-Length: 1000000\r\n\r\n12345")
    reply = await client.reply()
    assert (reply.status, reply.body) == (413, b"no")
    client.send(b"x" * 100_000)
    assert await client.rest() == b""
    assert handler.ends == [("error", None)]


@pytest.mark.parametrize(
    ("location", "passed_on"),
    [
        ("{url}/v1/completions", "/v1/completions"),
        ("{url}", "/"),
        ("{url}?a=1", "/?a=1"),
        ("{url}0/v1/completions", "{url}0/v1/completions"),  # another port
        ("/v1/completions", "/v1/completions"),
        ("https://elsewhere/x", "https://elsewhere/x"),
    ],
)
async def test_a_redirect_does_not_lead_a_client_past_the_gate(bench, handler_type, location: str, passed_on: str):
    async def script(side, number: int) -> None:
        await side.request()
        target = location.format(url=replica.url).encode()
        side.send(b"HTTP/1.1 307 Temporary Redirect\r\nlocation: " + target + b"\r\nContent-Length: 0\r\n\r\n")
        await side.gone()

    replica = await bench.replica(script)
    client = await bench.client(await bench.gate(handler_type(replica.url)))
    client.send(b"POST /v1/completions/ HTTP/1.1\r\nHost: gate\r\nContent-Length: 0\r\n\r\n")
    reply = await client.reply(b"POST")
    assert (reply.status, reply.header(b"location")) == (307, passed_on.format(url=replica.url).encode())
