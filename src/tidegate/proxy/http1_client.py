"""The replica's side of the gate: one HTTP/1.1 connection, one exchange at a time.

Reads responses and tells the exchange; knows nothing of clients. A response that is not valid HTTP, and any byte that
comes without having been asked for, ends the connection: it is never put back into the pool.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

from tidegate.errors import ReplicaError
from tidegate.proxy.chunked import InvalidChunk
from tidegate.proxy.framing import response_framing, stay_here
from tidegate.proxy.http1_body import BodyReader, BodyUntilClose, body_reader
from tidegate.proxy.http1_head import BARE_ENDING, InvalidHead, ResponseLines, parse_response
from tidegate.proxy.keepalive import probe_when_silent

if TYPE_CHECKING:
    from tidegate.proxy.pool import Pool, ReplicaPool
    from tidegate.proxy.seam import Chunk, Headers
    from tidegate.types import ReplicaId

JOIN_BYTES: Final = 16_384  # head and body in one buffer, and so in one simple system call, while copying costs less

log = logging.getLogger("tidegate.proxy")


class ResponseReader(Protocol):
    """Who a connection works for."""

    method: str
    http_1_0: bool  # the client's version

    def informational(self, response: ResponseLines) -> None:
        """A 1xx response other than 100 and 101."""
        ...

    def response_head(self, response: ResponseLines, *, complete: bool) -> bool:
        """False: the reader has left, and may already be waiting for another response on this very connection."""
        ...

    def response_data(self, data: bytes, *, complete: bool) -> None: ...
    def flush(self) -> None:
        """All that has arrived so far has been told."""
        ...

    def upstream_lost(self, error: ReplicaError, *, silent: bool) -> None:
        """The connection is gone or useless before the end of the response. `silent`: not a byte of one came."""
        ...

    def response_owed(self) -> bool:
        """Whether the request is wholly sent."""
        ...

    def pause_request(self) -> None: ...
    def resume_request(self) -> None: ...


class UpstreamConnection:
    # No subclass of asyncio.Protocol, as `ClientConnection` is none.
    __slots__ = (
        "_body",
        "_buffer",
        "_given_up",
        "_heard_s",
        "_keep_alive",
        "_paused",
        "_pool",
        "_reader",
        "_whole",
        "closed",
        "idle_since_s",
        "replica",
        "reused",
        "transport",
    )
    transport: asyncio.Transport

    def __init__(self, pool: Pool, replica: ReplicaPool) -> None:
        self._pool = pool
        self._reader: ResponseReader | None = None
        self._buffer = b""  # of an unfinished head
        self._body: BodyReader | None = None  # of an unfinished body
        self._whole = False  # the response; the reader stays until it releases
        self._keep_alive = False
        self._paused = False
        self._heard_s = 0.0
        self.replica = replica
        self.reused = False
        self.closed = True  # until it is made
        self._given_up = False
        self.idle_since_s = 0.0

    # --- the transport ------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's is no subclass of asyncio.Transport
        self.transport.set_write_buffer_limits(high=self._pool.config.buffer_bytes)
        if self._given_up:
            self.transport.abort()
            return
        probe_when_silent(transport)
        self.replica.connections.add(self)
        self.closed = False

    def eof_received(self) -> None:
        """Returning None closes the transport. The end of the connection may be the end of the response."""
        reader = self._reader
        if reader is not None and isinstance(self._body, BodyUntilClose):
            self._keep_alive = False
            self._complete(b"")
            reader.response_data(b"", complete=True)
            reader.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.replica.connections.discard(self)
        if self._reader is None:
            if self in self.replica.idle:
                self.replica.idle.remove(self)
            return
        self._lose(ReplicaError(f"{self.replica.url} closed the connection", reason="replica_closed"))

    def pause_writing(self) -> None:
        if self._reader is not None:
            self._reader.pause_request()

    def resume_writing(self) -> None:
        if self._reader is not None:
            self._reader.resume_request()

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        self._pool.bytes_in += len(data)
        if reader is None or self._whole:
            self._lose(ReplicaError(f"{self.replica.url} sent bytes unasked", reason="invalid_response"))
            return
        self._heard_s = self._pool.now_s
        try:
            if self._body is not None:
                self._read_body(reader, self._body, data)
            else:
                self._read_head(reader, self._buffer + data if self._buffer else data)
        except (InvalidHead, InvalidChunk) as error:
            self._lose(ReplicaError(f"Invalid response from {self.replica.url}: {error}", reason="invalid_response"))
        except Exception:  # a fault of ours must not leave the exchange unaccounted
            log.exception("fault while reading a response")
            self._lose(ReplicaError("Internal error", status=500, reason="internal_error"))
        if not self._whole:
            reader.flush()

    # --- responses ----------------------------------------------------------------------------------------------
    def _read_head(self, reader: ResponseReader, data: bytes) -> None:
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(data) > self._pool.config.max_header_bytes:
                    raise InvalidHead("Headers too large")
                if BARE_ENDING.search(data):
                    raise InvalidHead("A line that does not end with CR LF")
                self._buffer = data
                return
            response = parse_response(data[:end])
            response_framing(response, reader.method, reader.http_1_0)
            if 300 <= response.status < 400:
                stay_here(response, self.replica.url)
            data = data[end:]
            if response.status >= 200:
                break
            if response.status != 100:
                reader.informational(response)
            if not data:
                self._buffer = b""
                return
        self._buffer = b""
        self._keep_alive = response.keep_alive
        length = response.length
        if 0 <= length <= len(data):  # all of it is here: the way of most short responses
            self._complete(data[length:])
            stays = reader.response_head(response, complete=not length)
            if stays and length:
                reader.response_data(data[:length], complete=True)
            return
        self._body = body = body_reader(length)
        stays = reader.response_head(response, complete=False)
        if stays and data:
            self._read_body(reader, body, data)

    def _read_body(self, reader: ResponseReader, body: BodyReader, data: bytes) -> None:
        data = body.feed(data)
        complete = body.done
        if complete:
            self._complete(body.rest)
        if data or complete:
            reader.response_data(data, complete=complete)

    def _complete(self, rest: bytes) -> None:
        """The response is whole. `rest` came after it, unasked: the connection cannot be trusted with another."""
        if rest:
            self._keep_alive = False
        self._body = None
        self._whole = True

    def _lose(self, error: ReplicaError) -> None:
        reader = self._reader
        silent = self._body is None and not self._buffer and error.reason in SILENT
        self.abort()
        if reader is not None:
            reader.upstream_lost(error, silent=silent)

    # --- what an exchange may ask -------------------------------------------------------------------------------
    def begin(self, reader: ResponseReader, head: bytes, body: Chunk) -> None:
        """Send a request, with as much of its body as is there."""
        self._reader = reader
        self._whole = False
        self._heard_s = self._pool.now_s
        if len(body) < JOIN_BYTES:
            self.write(b"".join((head, body)))
        else:
            self._pool.bytes_out += len(head) + len(body)
            self._pool.outbox.write(self.transport, head, body)

    def write(self, data: Chunk) -> None:
        self._pool.bytes_out += len(data)
        self._pool.outbox.write(self.transport, data)

    def can_be_kept(self) -> bool:
        return self._keep_alive and self._whole and not self.closed

    def release(self, *, request_sent: bool) -> None:
        """After the end of the response."""
        if request_sent and self.can_be_kept():
            self._reader = None
            if self._paused:
                self.resume_reading()
            self._pool.put_back(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once. The exchange is not told: it asked, or has been told."""
        self._reader = None
        self._body = None
        self._given_up = True
        if not self.closed:
            self.closed = True
            self.replica.connections.discard(self)  # here too: uvloop may close one in the making without a word
            self.transport.abort()

    def pause_reading(self) -> None:
        if not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._heard_s = self._pool.now_s
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def check_silence(self, since_s: float) -> None:
        reader = self._reader
        if reader is None or self._whole or self._paused:
            return
        if not reader.response_owed():
            self._heard_s = self._pool.now_s
        elif self._heard_s <= since_s:
            self._lose(
                ReplicaError(f"{self.replica.url} sent nothing for too long", status=504, reason="response_timeout")
            )


SILENT = frozenset(("replica_closed", "response_timeout"))


def refusal(url: ReplicaId, status: int, headers: Headers) -> ReplicaError:
    """What a response that shall be had from another replica amounts to, should there be none."""
    error = ReplicaError(f"{url} answered {status}", reason="replica_refused")
    if status >= 400:
        error.status = status
    for name, value in headers:
        if name.lower() == b"retry-after" and value.isdigit():
            error.retry_after_s = float(value)
    return error
