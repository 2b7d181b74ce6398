"""Hostile and broken peers: what a client may not send, what a replica may not answer."""

from __future__ import annotations

import asyncio
import json

import pytest

HEAD = b"POST / HTTP/1.1\r\nHost: gate\r\n"

SMUGGLING = {
    "cl_te": HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "te_cl": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "two_lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "two_equal_lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "length_list": HEAD + b"Content-Length: 5,5\r\n\r\nhello",
    "signed_length": HEAD + b"Content-Length: +5\r\n\r\nhello",
    "huge_length": HEAD + b"Content-Length: 99999999999999999999\r\n\r\nhello",
    "te_list": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "te_identity": HEAD + b"Transfer-Encoding: identity\r\n\r\n",
    "te_obscured": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "te_space": HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "te_folded": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "fold": HEAD + b"A: b\r\n c\r\n\r\n",
    "bare_cr": HEAD + b"A: b\rContent-Length: 5\r\n\r\nhello",
    "bare_lf": HEAD + b"A: b\nContent-Length: 5\r\n\r\nhello",
    "nul": HEAD + b"A: b\x00c\r\n\r\n",
    "control": HEAD + b"A: b\x01c\r\n\r\n",
    "no_host": b"GET / HTTP/1.1\r\n\r\n",
    "two_hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    "bad_target": b"GET nowhere HTTP/1.1\r\nHost: a\r\n\r\n",
    "http_2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "chunk_size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
    "chunk_size_space": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5 \r\nhello\r\n0\r\n\r\n",
    "chunk_too_long": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello!\r\n0\r\n\r\n",
    "chunk_bare_lf": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n",
    "chunk_overflow": HEAD + b"Transfer-Encoding: chunked\r\n\r\n10000000000000005\r\nhello\r\n0\r\n\r\n",
}


UNENDING = {
    "bare_lf": b"GET / HTTP/1.1\nHost: gate\n\n",
    "bare_lf_after_a_header": HEAD + b"A: b\n\n",
    "bare_cr": b"GET / HTTP/1.1\rHost: gate\r\r",
    "lf_cr": b"GET / HTTP/1.1\n\rHost: gate\n\r\n\r",
}


@pytest.mark.parametrize("name", UNENDING)
async def test_a_head_that_can_never_end_is_answered_400_at_once(bench, handler_type, name: str) -> None:
    client = await bench.client(await bench.gate(handler_type(), header_timeout_s=3600.0))
    client.send(UNENDING[name])
    reply = await client.reply()
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (400, "malformed_http")
    assert await client.rest() == b""


async def test_a_head_that_is_cut_within_a_line_ending_is_waited_for(bench, handler_type) -> None:
    replica = await bench.echo()
    client = await bench.client(await bench.gate(handler_type(replica.url)))
    for part in (b"POST / HTTP/1.1\r", b"\nHost: gate\r", b"\nContent-Length: 2\r\n\r", b"\nok"):
        client.send(part)
        await asyncio.sleep(0.02)
    assert (await client.reply()).body == b"ok"


@pytest.mark.parametrize("name", SMUGGLING)
async def test_malformed_requests_are_answered_400_and_the_connection_ends(bench, handler_type, name: str) -> None:
    replica = await bench.echo()
    handler = handler_type(replica.url)
    client = await bench.client(await bench.gate(handler))
    client.send(SMUGGLING[name] + HEAD + b"X-Smuggled: 1\r\nContent-Length: 0\r\n\r\n")
    reply = await client.reply()
    assert reply.status == 400
    assert reply.header(b"content-type") == b"application/json"
    assert reply.header(b"connection") == b"close"
    error = json.loads(reply.body)["error"]
    assert (error["code"], error["type"]) == ("malformed_http", "invalid_request_error")
    assert await client.rest() == b""
    assert replica.seen == []
    assert handler.opened_ids == []


async def test_the_answer_to_a_malformed_request_after_a_head_has_its_body(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.head()
        side.send(OK + b"Content-Length: 5\r\n\r\n")
        await side.gone()

    client = await bench.client(await bench.gate(handler_type((await bench.replica(script)).url)))
    client.send(b"HEAD / HTTP/1.1\r\nHost: gate\r\n\r\n")
    assert (await client.reply(b"HEAD")).status == 200
    client.send(b"nonsense\r\n\r\n")
    assert (await client.reply()).status == 400


async def test_a_chunk_that_turns_bad_midway_aborts_the_exchange(bench, handler_type) -> None:
    replica = await bench.echo()
    handler = handler_type(replica.url)
    client = await bench.client(await bench.gate(handler))
    client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
    await handler.until(lambda: handler.opened_ids)
    await asyncio.sleep(0.05)
    client.send(b"zz\r\n")
    assert (await client.reply()).status == 400
    assert handler.ends == [("aborted", "malformed_http")]
    assert replica.seen == []


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n", 405, "connect_not_supported"),
        (
            b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
            400,
            "upgrade_not_supported",
        ),
        (b"GET / HTTP/1.1\r\nHost: a\r\nExpect: tea\r\n\r\n", 417, "expectation_failed"),
    ],
)
async def test_what_is_not_served_says_so(bench, handler_type, raw: bytes, status: int, code: str) -> None:
    client = await bench.client(await bench.gate(handler_type()))
    client.send(raw)
    reply = await client.reply()
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (status, code)
    assert await client.rest() == b""


async def test_a_gate_that_is_its_own_replica_is_seen(bench, handler_type) -> None:
    handler = handler_type()
    listener = await bench.gate(handler)
    handler.replicas.append(f"http://127.0.0.1:{listener.port}")
    client = await bench.client(listener)
    client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    reply = await client.reply()
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (508, "loop_detected")
    assert len(handler.opened_ids) == 1


OK = b"HTTP/1.1 200 OK\r\n"
BROKEN = {
    "garbage": b"garbage\r\n\r\n",
    "not_http": b"SSH-2.0-OpenSSH\r\n" + b"x" * 100 + b"\r\n\r\n",
    "cl_te": OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
    "two_lengths": OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "te_gzip": OK + b"Transfer-Encoding: gzip\r\n\r\n",
    "nul": OK + b"A: b\x00\r\nContent-Length: 0\r\n\r\n",
    "split": OK + b"A: b\nContent-Length: 0\r\n\r\n",
    "switch": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    "endless_head": OK + b"A: " + b"b" * 100_000,
    "bare_lf": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "bare_cr": b"HTTP/1.1 200 OK\rContent-Length: 0\r\r",
    "mid_head": OK + b"Content-Le",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_an_invalid_response_is_answered_502_and_never_retried(bench, handler_type, name: str) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        side.send(BROKEN[name])
        if name == "mid_head":
            return
        await side.gone()

    replica, other = await bench.replica(script), await bench.echo()
    handler = handler_type(replica.url, other.url)
    listener = await bench.gate(handler)
    client = await bench.client(listener)
    client.send(HEAD + b"Content-Length: 2\r\n\r\nhi")
    reply = await client.reply()
    assert reply.status == 502
    reason = "replica_closed" if name == "mid_head" else "invalid_response"
    assert json.loads(reply.body)["error"]["code"] == reason
    assert handler.ends == [("replica_lost", reason)]
    assert handler.returns == []
    assert listener.pool.open_connections == 0


async def test_a_bad_chunk_in_a_response_cuts_it(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        side.send(OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await asyncio.sleep(0.05)
        side.send(b"zz\r\n")
        await side.gone()

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    listener = await bench.gate(handler)
    client = await bench.client(listener)
    client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert await client.rest() == OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    assert handler.ends == [("replica_lost", "invalid_response")]
    assert listener.pool.open_connections == 0


@pytest.mark.parametrize("extra", [b"x", OK + b"Content-Length: 6\r\n\r\nforged"])
@pytest.mark.parametrize("late", [False, True])
async def test_bytes_after_a_response_never_reach_another_request(bench, handler_type, extra, late: bool) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        answer = OK + b"Content-Length: 4\r\n\r\nreal"
        side.send(answer if late else answer + extra)
        if late:
            await asyncio.sleep(0.05)
            side.send(extra)
        await side.gone()

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    listener = await bench.gate(handler)
    client = await bench.client(listener)
    for _ in range(2):
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await client.reply()).body == b"real"
        await asyncio.sleep(0.1)
    assert replica.connections == 2
    assert listener.pool.open_connections == 0
    assert handler.ends == [("ok", None)] * 2
