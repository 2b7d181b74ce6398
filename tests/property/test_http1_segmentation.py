"""However the bytes are cut on their way, the same bytes are relayed: the gate against h11 and against itself whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import h11
import httptools
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate.config.tree import HttpConfig
from tidegate.errors import TidegateError
from tidegate.proxy.chunked import LAST_CHUNK, ChunkedDecoder, InvalidChunk
from tidegate.proxy.http1_client import UpstreamConnection
from tidegate.proxy.http1_server import ClientConnection
from tidegate.proxy.pool import Pool
from tidegate.proxy.relay import Listener
from tidegate.proxy.seam import Exchange, RequestHead

REPLICA = "http://replica:1"


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, chunks: Iterable[bytes]) -> None:
        self.written += b"".join(chunks)

    def set_write_buffer_limits(self, high: int) -> None: ...
    def get_extra_info(self, name: str) -> None:
        return None  # no socket, as an in-memory transport says

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    abort = close


class PlacingHandler:
    def route(self, head: RequestHead) -> None:
        return None

    def wants_body(self, head: RequestHead) -> bool:
        return False

    def opened(self, exchange: Exchange, body: bytes | None) -> None:
        exchange.place(REPLICA)

    def returned(self, exchange: Exchange, replica: str, error: TidegateError) -> None:
        raise AssertionError(error)

    def ended(self, exchange: Exchange, outcome: str, error: TidegateError | None) -> None:
        assert (outcome, error) == ("ok", None)


@dataclass
class Message:
    body: bytes
    pieces: list[int]  # lengths of its chunks; none: Content-Length

    def framed(self, start: bytes) -> bytes:
        if not self.pieces:
            return start + b"Content-Length: %d\r\n\r\n%b" % (len(self.body), self.body)
        raw, at = start + b"Transfer-Encoding: chunked\r\n\r\n", 0
        for length in [*self.pieces, len(self.body)]:
            piece = self.body[at : at + length]
            at += length
            if piece:
                raw += b"%X;x=y\r\n%b\r\n" % (len(piece), piece)
        return raw + LAST_CHUNK


bodies = st.binary(max_size=300) | st.sampled_from([b"x" * 16_384, bytes(range(256)) * 80])
messages = st.builds(Message, bodies, st.lists(st.integers(1, 50), max_size=5))
cuts = st.lists(st.integers(1, 60), max_size=40)


def segments(raw: bytes, lengths: list[int]) -> list[bytes]:
    parts, at = [], 0
    for length in lengths:
        if at < len(raw):
            parts.append(raw[at : at + length])
            at += length
    return [*parts, raw[at:]] if at < len(raw) else parts


def read_by_h11(raw: bytes, role: type[h11.Connection] | object) -> tuple[bytes, bytes]:
    """The one body in `raw`, and what follows it."""
    machine = h11.Connection(role)
    if role is h11.CLIENT:
        machine.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
        machine.send(h11.EndOfMessage())
    machine.receive_data(raw)
    body = b""
    while True:
        event = machine.next_event()
        assert event is not h11.NEED_DATA
        if isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return body, machine.trailing_data[0]


async def relay(requests: list[bytes], responses: list[bytes]) -> tuple[bytes, bytes]:
    """What reaches the replica and the client when their bytes come in these segments."""
    config = HttpConfig()
    listener = Listener(PlacingHandler(), config, Pool(config))  # type: ignore[arg-type]
    client, upstream = Wire(), Wire()
    replica = listener.pool.replica(REPLICA)
    far, near = UpstreamConnection(listener.pool, replica), ClientConnection(listener)
    far.connection_made(upstream)  # type: ignore[arg-type]
    near.connection_made(client)  # type: ignore[arg-type]
    far.idle_since_s = listener.now_s + 1000
    replica.idle.append(far)
    for data in requests:
        near.data_received(data)
    for data in responses:
        far.data_received(data)
    listener.outbox.flush()
    assert not client.closed
    assert not upstream.closed
    assert listener.exchanges == listener.replay_bytes == 0
    near.connection_lost(None)
    listener.hangups.close()
    return upstream.written, client.written


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(request=messages, response=messages, request_cuts=cuts, response_cuts=cuts)
def test_segmentation_changes_no_byte(request: Message, response: Message, request_cuts, response_cuts) -> None:
    sent = request.framed(b"POST /x HTTP/1.1\r\nHost: gate\r\nA:  b \r\n")
    answered = response.framed(b"HTTP/1.1 200 OK\r\nX-a: 1\r\n")

    async def both() -> list[tuple[bytes, bytes]]:
        whole = await relay([sent], [answered])
        return [whole, await relay(segments(sent, request_cuts), segments(answered, response_cuts))]

    results = asyncio.run(both())
    for to_replica, to_client in results:
        assert read_by_h11(to_replica, h11.SERVER) == (request.body, b"")
        assert read_by_h11(to_client, h11.CLIENT) == (response.body, b"")
        assert to_replica.partition(b"\r\n\r\n")[0] == results[0][0].partition(b"\r\n\r\n")[0]
        assert to_client.partition(b"\r\n\r\n")[0] == answered.partition(b"\r\n\r\n")[0]


class ByLlhttp:
    """The naive twin of the decoder: llhttp on a request with the same coding."""

    def __init__(self) -> None:
        self.body = b""
        self.done = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.done = True


junk = st.sampled_from(
    [b"0", b"5", b"a", b"F", b"\r\n", b"\r", b"\n", b";", b" ", b"x", b":", b"hello", b"\x00", b"\t"]
)
codings = st.one_of(
    messages.map(lambda message: Message(message.body, message.pieces or [7]).framed(b"").partition(b"\r\n\r\n")[2]),
    st.lists(junk, max_size=12).map(b"".join),
    st.lists(junk, max_size=6).map(lambda parts: b"5\r\nhello\r\n" + b"".join(parts)),
)


@settings(max_examples=500, deadline=None)
@given(raw=codings, lengths=cuts)
def test_what_the_decoder_takes_llhttp_takes_and_reads_alike(raw: bytes, lengths: list[int]) -> None:
    decoder, twin, body, fed = ChunkedDecoder(), ByLlhttp(), b"", 0
    try:
        for data in segments(raw, lengths):
            body += decoder.feed(data)
            fed += len(data)
            if decoder.done:
                break
    except InvalidChunk:
        return  # the decoder is the stricter of the two
    if decoder.done:
        twin.parser.feed_data(raw[: fed - len(decoder.rest)])
        assert twin.done
        assert twin.body == body
