"""The client's side of the gate: one HTTP/1.1 connection, one request at a time.

    HEAD -> (route) -> BODY and RESPONSE, in either order -> HEAD ... -> LINGER -> closed

The connection frames messages and keeps time; a `Stream` (relay or ASGI) says what the response is. Pipelined requests
wait as raw bytes behind the current one. Reading goes on while a response is awaited, since that is how the client's
leaving is seen; when reading is paused (back-pressure, or too much pipelined), `hangup` watches instead. A client that
closes its sending side has left: as for nginx and Go's net/http, half-closed requests are not served.

When an answer is final but request bytes are still to come, the connection lingers: our side is closed, what arrives
is thrown away for a moment, and so the client can read the answer instead of getting a reset.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import struct
from typing import TYPE_CHECKING, Final, Protocol

from tidegate.errors import (
    AdmissionError,
    BodyTooLarge,
    HeadersTooLarge,
    MalformedRequest,
    RequestError,
    RequestTimeout,
    TidegateError,
)
from tidegate.proxy import replies
from tidegate.proxy.chunked import InvalidChunk
from tidegate.proxy.framing import request_framing
from tidegate.proxy.http1_body import BodyReader, FixedBody, body_reader
from tidegate.proxy.http1_head import BARE_ENDING, InvalidHead, RequestLines, TooManyHeaders, parse_request

if TYPE_CHECKING:
    from tidegate.proxy.relay import Listener
    from tidegate.proxy.seam import Chunk

log = logging.getLogger("tidegate.proxy")

LINGER_S: Final = 2.0  # enough for a round trip and the client's read of the answer; Apache's short linger
WRITE_STALL_S: Final = 300.0  # a client that takes no byte of its response for this long is gone, whatever TCP says
COPIED_BYTES: Final = 16_384  # a longer body goes on as a view of what was read: copying it costs as much as the rest
NEVER: Final = math.inf


class Stream(Protocol):
    """What answers a request. Each call may write to the connection."""

    def open(self) -> None: ...
    def request_data(self, data: bytes, complete: bool) -> None: ...
    def request_failed(self, error: TidegateError) -> bool:
        """The rest of the body cannot be had. True: nothing was sent yet, answer with the error."""
        ...

    def client_gone(self) -> None: ...
    def pause_response(self) -> None: ...
    def resume_response(self) -> None: ...


class ClientConnection:
    # No subclass of asyncio.Protocol, which no loop asks for: a compiled class inherits from compiled ones only.
    __slots__ = (
        "_advancing",
        "_body",
        "_body_bytes",
        "_buffer",
        "_expecting",
        "_head_begun",
        "_keep_alive",
        "_listener",
        "_paused",
        "_stream",
        "closing",
        "http_1_0",
        "method",
        "read_deadline_s",
        "transport",
        "write_deadline_s",
        "write_paused",
    )
    transport: asyncio.Transport

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._stream: Stream | None = None
        self._buffer = b""  # bytes that are not the current request's
        self._head_begun = False
        self._body: BodyReader | None = None  # of an unfinished body
        self._body_bytes = 0  # that have come
        self._expecting = False  # the client waits for 100 Continue
        self._keep_alive = True
        self._paused = False  # reading
        self._advancing = False
        self.closing = False  # nothing more will be written
        self.method = ""
        self.http_1_0 = False
        self.write_paused = False
        self.read_deadline_s = NEVER
        self.write_deadline_s = NEVER

    # --- the transport ------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's is no subclass of asyncio.Transport
        config = self._listener.config
        self.transport.set_write_buffer_limits(high=config.buffer_bytes)
        self.read_deadline_s = self._listener.now_s + config.keep_alive_s
        if not self._listener.connected(self):
            self.reply_error(AdmissionError("Too many connections", reason="too_many_connections", retry_after_s=1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.disconnected(self)
        self._client_left()

    def eof_received(self) -> None:
        self._client_left()  # returning None closes the transport

    def hung_up(self) -> None:
        """The client left while we were not reading."""
        self._client_left()
        self.transport.abort()

    def _client_left(self) -> None:
        stream, self._stream = self._stream, None
        self.closing = True
        if stream is not None:
            stream.client_gone()

    def pause_writing(self) -> None:
        self.write_paused = True
        self.write_deadline_s = self._listener.now_s + WRITE_STALL_S
        if self._stream is not None:
            self._stream.pause_response()

    def resume_writing(self) -> None:
        self.write_paused = False
        self.write_deadline_s = NEVER
        if self._stream is not None:
            self._stream.resume_response()
        self._advance()

    def data_received(self, data: bytes) -> None:
        self._listener.bytes_in += len(data)
        if self.closing:
            return  # lingering
        if self._body is not None:
            try:
                self._read_body(data)
            except Exception:  # a fault of ours must not leave the exchange unaccounted
                self._fault()
            return
        self._buffer = self._buffer + data if self._buffer else data
        if self._stream is None:
            self._advance()
        elif len(self._buffer) > self._listener.config.buffer_bytes:
            self._pause()

    # --- requests -----------------------------------------------------------------------------------------------
    def _advance(self) -> None:
        """Start the requests whose heads are here, each when the one before is answered. Not re-entered: a stream
        that answers at once comes back to this loop instead of recursing."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._stream is None and self._buffer and not self.write_paused and not self.closing:
                if not self._read_head():
                    break
        except RequestError as error:
            self.reply_error(error)
        except Exception:
            self._fault()
        finally:
            self._advancing = False

    def _read_head(self) -> bool:
        """False: the head is not all here yet. Raises RequestError."""
        config = self._listener.config
        buffer = self._buffer
        start = 2 if buffer.startswith(b"\r\n") else 0  # RFC 9112, 2.2: an empty line before a request is ignored
        end = buffer.find(b"\r\n\r\n", start) + 4
        if (end if end > 3 else len(buffer)) - start > config.max_header_bytes:
            raise HeadersTooLarge(f"Request line and headers exceed {config.max_header_bytes} bytes")
        if end < 4:
            if BARE_ENDING.search(buffer):
                raise MalformedRequest("Malformed HTTP request: a line that does not end with CR LF")
            if not self._head_begun:
                self._head_begun = True
                self.read_deadline_s = self._listener.now_s + config.header_timeout_s
            return False
        self.method = ""
        try:
            request = request_framing(parse_request(buffer[start:end]))
        except TooManyHeaders as error:
            raise HeadersTooLarge(str(error)) from None
        except InvalidHead as invalid:
            raise MalformedRequest(f"Malformed HTTP request: {invalid}") from None
        self.method = request.method
        is_long = COPIED_BYTES < len(buffer) - end <= request.length
        self._start(request, memoryview(buffer)[end:] if is_long else buffer[end:])
        return True

    def _start(self, request: RequestLines, rest: Chunk) -> None:
        listener = self._listener
        length = request.length
        if length > listener.config.max_body_bytes:
            raise BodyTooLarge(f"The body exceeds {listener.config.max_body_bytes} bytes")
        self._head_begun = False
        self.http_1_0 = request.http_1_0
        self._keep_alive = request.keep_alive
        self.read_deadline_s = NEVER
        body, complete, self._buffer = rest, True, b""
        if length < 0:
            self._body, self._body_bytes = body_reader(length), 0
            body, complete = self._take(bytes(rest)) if rest else (b"", False)
        elif length < len(rest):
            body, self._buffer = rest[:length], bytes(rest[length:])
        elif length > len(rest):
            self._body, self._body_bytes = FixedBody(length - len(rest)), 0
            complete = False
        if not complete:
            self._expecting = request.expects_continue and not body
            if not self._expecting:
                self.read_deadline_s = listener.now_s + listener.config.body_timeout_s
        self._stream = stream = listener.stream(self, request, body, complete)
        stream.open()

    def _take(self, data: bytes) -> tuple[bytes, bool]:
        """The payload in `data`, and whether it is the last. Raises RequestError."""
        reader = self._body
        assert reader is not None
        try:
            payload = reader.feed(data)
        except InvalidChunk as error:
            raise MalformedRequest(f"Malformed HTTP request: {error}") from None
        self._body_bytes += len(payload)
        limit = self._listener.config.max_body_bytes
        if self._body_bytes > limit:
            raise BodyTooLarge(f"The body exceeds {limit} bytes")
        if reader.done:
            self._body, self._buffer = None, reader.rest
        return payload, reader.done

    def _read_body(self, data: bytes) -> None:
        self._expecting = False
        try:
            payload, complete = self._take(data)
        except RequestError as error:
            self._fail(error)
            return
        listener = self._listener
        self.read_deadline_s = NEVER if complete else listener.now_s + listener.config.body_timeout_s
        if self._stream is not None and (payload or complete):
            self._stream.request_data(payload, complete)

    def _fail(self, error: TidegateError) -> None:
        """The current request cannot go on: answer, or cut what has been begun."""
        stream, self._stream = self._stream, None
        if stream is None or stream.request_failed(error):
            self.reply_error(error)
        else:
            self.cut()

    def _fault(self) -> None:
        log.exception("fault while serving a client")
        self._fail(TidegateError("Internal error"))

    # --- what a stream may ask ----------------------------------------------------------------------------------
    def write(self, data: bytes) -> None:
        if not self.closing:
            self._listener.bytes_out += len(data)
            self._listener.outbox.write(self.transport, data)

    def send_continue(self) -> None:
        """The client may send its body now."""
        if self._expecting:
            self._expecting = False
            self.write(replies.CONTINUE)
            self.read_deadline_s = self._listener.now_s + self._listener.config.body_timeout_s

    def pause_body(self) -> None:
        if self._body is not None:
            self._pause()

    def resume_body(self) -> None:
        if self._paused and not self.closing:
            self._resume()
            if self._body is not None:
                self.read_deadline_s = self._listener.now_s + self._listener.config.body_timeout_s

    def will_close(self) -> bool:
        """Whether the connection ends with this response; asked when its head is written."""
        if self._listener.draining:
            self._keep_alive = False
        return not self._keep_alive

    def response_done(self, *, keep_alive: bool = True) -> None:
        """The whole response is written."""
        self._stream = None
        if self.closing:
            return
        if self._body is not None:
            self._linger()
        elif not keep_alive or not self._keep_alive or self._listener.draining:
            self._close()
        else:
            self.read_deadline_s = self._listener.now_s + self._listener.config.keep_alive_s
            if self._paused:
                self._resume()
            if self._buffer:
                self._advance()

    def reply_error(self, error: TidegateError, *, keep_alive: bool = False) -> None:
        """The whole answer to the current request. Without `keep_alive` the connection ends: what follows in it can
        not be told from the failed request."""
        self._stream = None
        if self._body is not None or self.will_close():
            keep_alive = False
        self.write(replies.error_reply(error, close=not keep_alive, without_body=self.method == "HEAD"))
        if self.closing:
            return
        if keep_alive:
            self.response_done()
        else:
            self._linger()

    def cut(self, *, reset: bool = False) -> None:
        """End a response that has begun and cannot be finished. What was written still goes out; `reset` ends with a
        TCP reset, for a response that ends with its connection and would otherwise look whole."""
        self._stream = None
        if self.closing:
            return
        self.closing = True
        if reset:
            self._listener.outbox.flush()
            sock: socket.socket = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self._close()

    # --- ends ---------------------------------------------------------------------------------------------------
    def close_if_idle(self) -> None:
        """Draining: nothing is lost by closing now."""
        if self._stream is None and not self.closing:
            self._close()

    def shut(self) -> None:
        """The listener closes: what is open is aborted, what is written still goes out if the client takes it."""
        self._listener.outbox.flush()
        if self._stream is None:
            self.transport.close()
        else:
            self.abort()

    def abort(self) -> None:
        self._client_left()
        self.transport.abort()

    def _close(self) -> None:
        self.closing = True
        self._resume()
        self.read_deadline_s = self._listener.now_s + WRITE_STALL_S  # close() first waits for the client to read
        self._listener.outbox.flush()
        self.transport.close()

    def _linger(self) -> None:
        self.closing = True
        self._buffer = b""
        self._resume()
        self.read_deadline_s = self._listener.now_s + LINGER_S
        self._listener.outbox.flush()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _pause(self) -> None:
        if not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()
            self.read_deadline_s = NEVER
            self._listener.hangups.watch(self)

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._listener.hangups.forget(self)
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def on_deadline(self) -> None:
        """A deadline has passed."""
        if self.closing or self.write_deadline_s <= self._listener.now_s:
            self.abort()
        elif self._stream is None and not self._buffer:
            self._close()
        else:
            self._fail(RequestTimeout(f"No progress with the request's {'body' if self._stream else 'headers'}"))
