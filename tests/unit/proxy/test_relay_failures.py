"""The replica dies, at each phase. Accounting is checked by the fixture's end."""

from __future__ import annotations

import asyncio
import json

import h11
import pytest

from tidegate.errors import ReplicaError

HEAD = b"POST / HTTP/1.1\r\nHost: gate\r\n"
HELLO = HEAD + b"Content-Length: 5\r\n\r\nhello"
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("how", ["refuses", "closes_at_accept", "resets_at_accept", "closes_after_request"])
async def test_without_a_byte_of_response_the_request_goes_elsewhere(bench, handler_type, how: str) -> None:
    async def script(side, number: int) -> None:
        if how == "resets_at_accept":
            side.reset()
        elif how == "closes_after_request":
            await side.request()

    bad = bench.closed_port() if how == "refuses" else (await bench.replica(script)).url
    good = await bench.echo()
    handler = handler_type(bad, good.url)
    client = await bench.client(await bench.gate(handler))
    client.send(HELLO)
    assert (await client.reply()).body == b"hello"
    assert handler.returns == [(bad, "connect_failed" if how == "refuses" else "replica_closed")]
    assert handler.ends == [("ok", None)]


LOST = ReplicaError("it will not answer", reason="replica_lost_request")


async def test_a_request_recalled_before_a_byte_of_response_goes_elsewhere(bench, handler_type) -> None:
    seen = asyncio.Event()

    async def never_answers(side, number: int) -> None:
        await side.request()
        seen.set()
        await side.reader.read()

    bad, good = await bench.replica(never_answers), await bench.echo()
    handler = handler_type(bad.url, good.url)
    handler.hold = True
    client = await bench.client(await bench.gate(handler))
    client.send(HELLO)
    await handler.until(lambda: handler.held)
    (exchange,) = handler.held
    exchange.recall(LOST)  # not placed yet: nothing to leave
    exchange.place(bad.url)
    await seen.wait()
    exchange.recall(LOST)
    assert (await client.reply()).body == b"hello"
    assert handler.returns == [(bad.url, "replica_lost_request")]
    assert handler.ends == [("ok", None)]
    exchange.recall(LOST)  # it is over


async def test_a_response_that_has_begun_is_not_recalled(bench, handler_type) -> None:
    go_on = asyncio.Event()

    async def begins(side, number: int) -> None:
        await side.request()
        side.send(OK + b"Content-Length: 10\r\n\r\nfirst")
        await go_on.wait()
        side.send(b"later")

    replica = await bench.replica(begins)
    handler = handler_type(replica.url)
    handler.hold = True
    client = await bench.client(await bench.gate(handler))
    client.send(HELLO)
    await handler.until(lambda: handler.held)
    (exchange,) = handler.held
    exchange.place(replica.url)
    await client.reader.readuntil(b"first")
    exchange.recall(LOST)
    go_on.set()
    await client.reader.readuntil(b"later")
    assert handler.ends == [("ok", None)]


async def test_a_body_still_coming_follows_to_the_next_replica(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.head()
        await side.reader.readexactly(5)

    bad, good = await bench.replica(script), await bench.echo()
    handler = handler_type(bad.url, good.url)
    client = await bench.client(await bench.gate(handler))
    client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
    await handler.until(lambda: handler.returns)
    client.send(b"6\r\n world\r\n0\r\n\r\n")
    assert (await client.reply()).body == b"hello world"


async def test_a_replica_that_does_not_answer_the_connection_is_left(bench, handler_type) -> None:
    good = await bench.echo()
    with bench.silent_port() as silent:
        handler = handler_type(silent, good.url)
        client = await bench.client(await bench.gate(handler, connect_timeout_s=0.1))
        client.send(HELLO)
        assert (await client.reply()).body == b"hello"
    assert handler.returns == [(silent, "connect_timeout")]


async def test_the_handlers_refusal_is_the_answer_when_no_replica_is_left(bench, handler_type) -> None:
    bad = bench.closed_port()
    handler = handler_type(bad)
    client = await bench.client(await bench.gate(handler))
    for _ in range(2):  # the body was read: the connection lives on
        client.send(HELLO)
        reply = await client.reply()
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (502, "connect_failed")


async def test_the_keep_alive_race_is_retried_on_the_same_replica(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        side.send(OK + b"Content-Length: 2\r\n\r\nok")
        if number == 0:
            await side.head()  # takes the next request and dies, as a server whose idle timer has just run out

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    client = await bench.client(await bench.gate(handler))
    for _ in range(2):
        client.send(HELLO)
        assert (await client.reply()).body == b"ok"
    assert handler.returns == []
    assert replica.connections == 2


async def test_a_fresh_connection_that_fails_after_the_race_is_given_back(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        if number == 0:
            side.send(OK + b"Content-Length: 2\r\n\r\nok")
            await side.head()

    bad, good = await bench.replica(script), await bench.echo()
    handler = handler_type(bad.url, good.url)
    client = await bench.client(await bench.gate(handler))
    client.send(HELLO)
    assert (await client.reply()).body == b"ok"
    client.send(HELLO)
    assert (await client.reply()).body == b"hello"
    assert handler.returns == [(bad.url, "replica_closed")]
    assert bad.connections == 2


@pytest.mark.parametrize("limit", ["replay_bytes", "replay_total_bytes"])
async def test_a_body_too_long_to_keep_is_not_replayed(bench, handler_type, limit: str) -> None:
    async def script(side, number: int) -> None:
        await side.request()

    bad, good = await bench.replica(script), await bench.echo()
    handler = handler_type(bad.url, good.url)
    client = await bench.client(await bench.gate(handler, **{limit: 1000}))
    client.send(HEAD + b"Content-Length: 2000\r\n\r\n" + b"x" * 2000)
    reply = await client.reply()
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (502, "replica_closed")
    assert handler.ends == [("replica_lost", "replica_closed")]
    assert handler.returns == []


@pytest.mark.parametrize("framing", [b"Content-Length: 10", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("reset", [False, True])
async def test_a_begun_response_is_cut_and_nothing_made_up(bench, handler_type, framing: bytes, reset: bool) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        side.send(OK + framing + b"\r\n\r\n" + (b"5\r\nhello\r\n" if b"chunked" in framing else b"hello"))
        await asyncio.sleep(0.05)
        if reset:
            side.reset()

    bad, good = await bench.replica(script), await bench.echo()
    handler = handler_type(bad.url, good.url)
    client = await bench.client(await bench.gate(handler))
    client.send(HELLO)
    with pytest.raises(h11.RemoteProtocolError):
        await client.reply()
    assert handler.ends == [("replica_lost", "replica_closed")]
    assert handler.returns == []


async def test_a_lost_response_that_would_look_whole_ends_with_a_reset(bench, handler_type) -> None:
    """Chunked towards an HTTP/1.0 client: only the connection's end marks the body's."""

    async def script(side, number: int) -> None:
        await side.request()
        side.send(OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await asyncio.sleep(0.05)

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    client = await bench.client(await bench.gate(handler))
    client.send(b"GET / HTTP/1.0\r\n\r\n")
    with pytest.raises(ConnectionResetError):
        await client.reader.read()
    assert handler.ends == [("replica_lost", "replica_closed")]


async def test_a_silent_replica_is_left_after_the_response_timeout(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        await side.gone()

    bad, good = await bench.replica(script), await bench.echo()
    handler = handler_type(bad.url, good.url)
    client = await bench.client(await bench.gate(handler, response_timeout_s=0.2))
    client.send(HELLO)
    assert (await client.reply()).body == b"hello"
    assert handler.returns == [(bad.url, "response_timeout")]


async def test_a_stream_that_falls_silent_is_cut_after_the_response_timeout(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        side.send(OK + b"Content-Length: 10\r\n\r\nhello")
        await side.gone()

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    client = await bench.client(await bench.gate(handler, response_timeout_s=0.2))
    client.send(HELLO)
    with pytest.raises(h11.RemoteProtocolError):
        await client.reply()
    assert handler.ends == [("replica_lost", "response_timeout")]


async def test_a_slow_upload_is_not_the_replicas_silence(bench, handler_type) -> None:
    replica = await bench.echo()
    handler = handler_type(replica.url)
    client = await bench.client(await bench.gate(handler, response_timeout_s=0.3))
    client.send(HEAD + b"Content-Length: 10\r\n\r\nhello")
    await asyncio.sleep(0.8)
    client.send(b"world")
    assert (await client.reply()).body == b"helloworld"
    assert handler.returns == []


async def test_a_body_that_will_not_be_kept_gets_a_fresh_connection(bench, handler_type) -> None:
    replica = await bench.echo()
    client = await bench.client(await bench.gate(handler_type(replica.url), replay_bytes=4))
    for _ in range(2):
        client.send(HELLO)
        assert (await client.reply()).body == b"hello"
    assert replica.connections == 2


async def test_a_replica_that_answers_early_and_then_closes(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.head()
        side.send(OK + b"Content-Length: 2\r\n\r\nok")
        await asyncio.sleep(0.05)

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    client = await bench.client(await bench.gate(handler))
    client.send(HEAD + b"Content-Length: 10\r\n\r\nhello")
    assert (await client.reply()).body == b"ok"
    assert await client.rest() == b""
    assert handler.ends == [("ok", None)]


async def test_a_fault_in_the_handler_of_a_return_is_answered_500(bench, handler_type) -> None:
    handler = handler_type(bench.closed_port())
    handler.returned = lambda exchange, replica, error: 1 / 0
    client = await bench.client(await bench.gate(handler))
    client.send(HELLO)
    assert (await client.reply()).status == 500
    assert handler.ends == [("replica_lost", "internal_error")]


async def test_a_recalled_request_whose_bytes_are_gone_is_answered_502(bench, handler_type) -> None:
    asked = asyncio.Event()

    async def script(side, number: int) -> None:
        await side.request()
        asked.set()
        await side.gone()

    handler = handler_type((await bench.replica(script)).url)
    handler.hold = True
    client = await bench.client(await bench.gate(handler, replay_bytes=2))
    client.send(HELLO)
    await handler.until(lambda: handler.held)
    handler.held[0].place(handler.replicas[0])
    await asyncio.wait_for(asked.wait(), 10)
    handler.held[0].recall(LOST)
    assert (await client.reply()).status == 502
    assert handler.ends == [("replica_lost", LOST.reason)]


async def test_a_fault_in_the_handler_is_answered_500(bench, handler_type) -> None:
    handler = handler_type("not a url")
    client = await bench.client(await bench.gate(handler))
    client.send(HELLO)
    assert (await client.reply()).status == 500
    assert [outcome for outcome, _ in handler.ends] == ["aborted"]
