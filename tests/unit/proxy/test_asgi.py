"""Applications on the gate's own port."""

from __future__ import annotations

import asyncio
import json

import h11
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

HOST = b"Host: gate\r\n"


async def hello(request: Request) -> Response:
    body = await request.body()
    return JSONResponse({"path": request.url.path, "query": request.url.query, "length": len(body)})


async def stream(request: Request) -> Response:
    async def parts():
        for i in range(3):
            yield b"part %d;" % i

    return StreamingResponse(parts(), media_type="text/plain")


async def broken(request: Request) -> Response:
    raise RuntimeError("a fault in the application")


async def half(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"half", "more_body": True})
    raise RuntimeError("a fault in the application")


async def empty(request: Request) -> Response:
    return Response(status_code=204)


app = Starlette(
    routes=[
        Route("/app/hello world", hello, methods=["GET", "POST"]),
        Route("/app/stream", stream),
        Route("/app/broken", broken),
        Route("/app/empty", empty),
        Route("/app/text", lambda request: PlainTextResponse("text")),
    ]
)


@pytest.fixture
async def gate(bench, handler_type):
    handler = handler_type((await bench.echo()).url)
    handler.app = app
    return await bench.gate(handler, buffer_bytes=4096)


async def test_requests_to_an_app_and_to_a_replica_share_a_connection(bench, gate) -> None:
    client = await bench.client(gate)
    for _ in range(2):
        client.send(
            b"POST /app/hello%20world?a=b HTTP/1.1\r\n" + HOST + b"Content-Length: 100000\r\n\r\n" + b"x" * 100_000
        )
        reply = await client.reply()
        assert json.loads(reply.body) == {"path": "/app/hello world", "query": "a=b", "length": 100_000}
        client.send(b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\nhi")
        assert (await client.reply()).body == b"hi"


async def test_chunked_and_expecting_requests(bench, gate) -> None:
    client = await bench.client(gate)
    client.send(
        b"POST /app/hello%20world HTTP/1.1\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n" + HOST + b"\r\n"
    )
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"5\r\nhello\r\n0\r\n\r\n")
    assert json.loads((await client.reply()).body)["length"] == 5


async def test_pipelined_requests_are_answered_in_order(bench, gate) -> None:
    client = await bench.client(gate)
    client.send(
        b"".join(b"GET /app/%b HTTP/1.1\r\n" % name + HOST + b"\r\n" for name in (b"stream", b"text", b"empty", b"no"))
    )
    replies = [await client.reply() for _ in range(4)]
    assert [reply.status for reply in replies] == [200, 200, 204, 404]
    assert replies[0].header(b"transfer-encoding") == b"chunked"
    assert [reply.body for reply in replies] == [b"part 0;part 1;part 2;", b"text", b"", b"Not Found"]


async def test_head(bench, gate) -> None:
    client = await bench.client(gate)
    client.send(b"HEAD /app/text HTTP/1.1\r\n" + HOST + b"\r\n")
    reply = await client.reply(b"HEAD")
    assert (reply.body, reply.header(b"content-length")) == (b"", b"4")


async def test_http_1_0(bench, gate) -> None:
    client = await bench.client(gate)
    client.send(b"GET /app/stream HTTP/1.0\r\n\r\n")
    head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert body == b"part 0;part 1;part 2;"


async def test_a_fault_before_the_response_is_answered_500(bench, gate) -> None:
    client = await bench.client(gate)
    client.send(b"GET /app/broken HTTP/1.1\r\n" + HOST + b"\r\n")
    assert (await client.reply()).status == 500


async def test_a_fault_within_the_response_cuts_it(bench, handler_type) -> None:
    handler = handler_type()
    handler.app = half
    client = await bench.client(await bench.gate(handler))
    client.send(b"GET /app HTTP/1.1\r\n" + HOST + b"\r\n")
    with pytest.raises(h11.RemoteProtocolError):
        await client.reply()


async def test_a_fault_after_the_response_harms_nothing(bench, handler_type) -> None:
    async def late(scope, receive, send) -> None:
        await app({**scope, "path": "/app/text"}, receive, send)
        raise RuntimeError("a fault in the application")

    handler = handler_type()
    handler.app = late
    client = await bench.client(await bench.gate(handler))
    client.send(b"GET /app HTTP/1.1\r\n" + HOST + b"\r\n" + b"GET /app HTTP/1.1\r\n" + HOST + b"\r\n")
    assert [(await client.reply()).body for _ in range(2)] == [b"text"] * 2


async def test_an_app_is_told_of_the_clients_leaving(bench, handler_type) -> None:
    told = asyncio.Event()

    async def waits(scope, receive, send) -> None:
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"
        told.set()

    handler = handler_type()
    handler.app = waits
    client = await bench.client(await bench.gate(handler))
    client.send(b"GET /app HTTP/1.1\r\n" + HOST + b"\r\n")
    await asyncio.sleep(0.05)
    await client.close()
    await asyncio.wait_for(told.wait(), 10)


async def test_an_app_that_outlives_the_gate_is_cancelled(bench, handler_type) -> None:
    async def sleeps(scope, receive, send) -> None:
        await asyncio.sleep(1000)

    handler = handler_type()
    handler.app = sleeps
    listener = await bench.gate(handler)
    client = await bench.client(listener)
    client.send(b"GET /app HTTP/1.1\r\n" + HOST + b"\r\n")
    await asyncio.sleep(0.05)
    await listener.drain(0.05)
    assert listener.asgi_tasks == set()


async def test_an_app_waits_for_a_client_that_does_not_read(bench, handler_type) -> None:
    sent = 0

    async def pours(scope, receive, send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(300):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            sent += 1
        await send({"type": "http.response.body"})

    handler = handler_type()
    handler.app = pours
    client = await bench.client(await bench.gate(handler))
    client.reader._limit = 1
    client.send(b"GET /app HTTP/1.1\r\n" + HOST + b"\r\n")
    before = -1
    while sent != before or not sent:
        before = sent
        await asyncio.sleep(0.2)
    assert sent < 300
    client.reader._limit = 65536
    assert len((await client.reply()).body) == 300 * 65536
