"""A tap between a gate and a replica: what went over the wire, without reading it differently than it was sent."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

import httptools

PIECE_BYTES = 65_536


@dataclass
class Seen:
    """One request and its reply: bodies with the framing taken off, all else dropped."""

    target: str = ""
    request: bytes = b""
    reply: bytes = b""
    reply_pieces: int = 0
    complete: bool = False


class Wire:
    """`async with Wire(replica_url) as wire`: give the gate `wire.url`."""

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream)
        self._server: asyncio.Server | None = None
        self.url = ""
        self.seen: list[Seen] = []

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()

    def exchanges(self, path: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.target == path]

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        tap = _Tap(self.seen)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(
                _pump(reader, upstream_writer, httptools.HttpRequestParser(tap.requests)),
                _pump(upstream_reader, writer, httptools.HttpResponseParser(tap.replies)),
            )


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    parser: httptools.HttpRequestParser | httptools.HttpResponseParser,
) -> None:
    try:
        while piece := await reader.read(PIECE_BYTES):
            parser.feed_data(piece)
            writer.write(piece)
            await writer.drain()
    finally:
        writer.close()


@dataclass
class _Requests:
    seen: list[Seen]
    mine: list[Seen] = field(default_factory=list)

    def on_url(self, url: bytes) -> None:
        self.mine.append(Seen(url.decode()))
        self.seen.append(self.mine[-1])

    def on_body(self, body: bytes) -> None:
        self.mine[-1].request += body


@dataclass
class _Replies:
    """Without pipelining, a reply belongs to the connection's last request."""

    mine: list[Seen]

    def on_body(self, body: bytes) -> None:
        self.mine[-1].reply += body
        self.mine[-1].reply_pieces += 1

    def on_message_complete(self) -> None:
        self.mine[-1].complete = True


class _Tap:
    def __init__(self, seen: list[Seen]) -> None:
        self.requests = _Requests(seen)
        self.replies = _Replies(self.requests.mine)
