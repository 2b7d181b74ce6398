"""The meter's verdicts: a response kept back, sent on, or had from another replica."""

from __future__ import annotations

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


class AbortMeter(WaitingMeter):
    """A draining engine says finish_reason abort: not a result."""

    def response_head(self, status: int, headers: object) -> str:
        self.body = b""
        return "wait"

    def response_body(self, chunk: bytes) -> str:
        self.body += chunk
        return "wait"

    def response_end(self) -> str:
        return "retry" if b'"abort"' in self.body else "pass"


class RefusingMeter(WaitingMeter):
    def response_head(self, status: int, headers: object) -> str:
        return "retry" if status == 503 else "pass"


ABORT = b'{"finish_reason": "abort"}'


def answer(status: bytes, body: bytes, *, chunked: bool) -> bytes:
    if chunked:
        return status + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return status + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("meter", "status", "body"),
    [
        (AbortMeter, OK, ABORT),
        (RefusingMeter, b"HTTP/1.1 503 Busy\r\n", b"busy"),
        (RefusingMeter, b"HTTP/1.1 503 Busy\r\n", b""),
    ],
)
async def test_a_retry_goes_elsewhere_unseen(bench, handler_type, meter, status, body, chunked: bool) -> None:
    async def script(side, number: int) -> None:
        while True:
            await side.request()
            side.send(answer(status, body, chunked=chunked))

    bad, good = await bench.replica(script), await bench.echo()
    handler = handler_type(bad.url, good.url)
    handler.meter = meter
    client = await bench.client(await bench.gate(handler))
    client.send(HELLO)
    reply = await client.reply()
    assert (reply.status, reply.body) == (200, b"hello")
    assert handler.returns == [(bad.url, "replica_refused")]
    assert handler.ends == [("ok", None)]


async def test_a_refusal_that_nobody_takes_over_keeps_its_status(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        side.send(b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n")

    handler = handler_type((await bench.replica(script)).url)
    handler.meter = RefusingMeter
    client = await bench.client(await bench.gate(handler))
    client.send(HELLO)
    reply = await client.reply()
    assert (reply.status, reply.header(b"retry-after")) == (503, b"7")


async def test_a_retry_of_a_request_whose_bytes_are_gone_passes_on(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        side.send(answer(OK, ABORT, chunked=False))

    bad = await bench.replica(script)
    handler = handler_type(bad.url)
    handler.meter = AbortMeter
    client = await bench.client(await bench.gate(handler, replay_bytes=2))
    client.send(HELLO)
    assert (await client.reply()).body == ABORT


async def test_a_response_kept_back_too_long_is_sent_on(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        side.send(OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"64\r\n%b\r\n" % (b"x" * 100) * 200)
        await side.gone()

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    handler.meter = WaitingMeter
    client = await bench.client(await bench.gate(handler))
    client.send(HELLO)
    assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(OK)
    await client.close()
    await handler.until(lambda: handler.ends)


async def test_a_replica_lost_while_its_head_is_kept_back_is_answered_502(bench, handler_type) -> None:
    async def script(side, number: int) -> None:
        await side.request()
        side.send(OK + b"Content-Length: 10\r\n\r\nhello")

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    handler.meter = WaitingMeter
    client = await bench.client(await bench.gate(handler))
    client.send(HELLO)
    assert (await client.reply()).status == 502
    assert handler.ends == [("replica_lost", "replica_closed")]


class SeeingMeter(WaitingMeter):
    seen: list[object]

    def request_body(self, chunk: bytes) -> None:
        self.seen.append(("request", chunk))

    def response_head(self, status: int, headers: object) -> str:
        self.seen.append(("head", status))
        return "pass"

    def response_body(self, chunk: bytes) -> str:
        self.seen.append(("body", chunk))
        return "pass"

    def response_end(self) -> str:
        self.seen.append(("end", None))
        return "pass"


async def test_a_meter_sees_each_byte_once(bench, handler_type) -> None:
    bad, good = bench.closed_port(), await bench.echo()
    handler = handler_type(bad, good.url)
    SeeingMeter.seen = []
    handler.meter = SeeingMeter
    client = await bench.client(await bench.gate(handler))
    client.send(HEAD + b"Content-Length: 10\r\n\r\nhello")
    await handler.until(lambda: handler.returns)
    client.send(b"world")
    assert (await client.reply()).body == b"helloworld"
    assert SeeingMeter.seen == [
        ("request", b"hello"),
        ("request", b"world"),
        ("head", 200),
        ("body", b"helloworld"),
        ("end", None),
    ]


class FaultyMeter(WaitingMeter):
    def response_body(self, chunk: bytes) -> str:
        raise RuntimeError("a fault in the meter")


async def test_a_fault_in_a_meter_ends_its_exchange_and_no_other(bench, handler_type) -> None:
    replica = await bench.echo()
    handler = handler_type(replica.url)
    handler.meter = FaultyMeter
    client = await bench.client(await bench.gate(handler))
    client.send(HELLO)
    assert (await client.reply()).status == 500
    handler.meter = None
    client.send(HELLO)
    assert (await client.reply()).body == b"hello"
