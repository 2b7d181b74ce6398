"""Carries a request to an ASGI 3 application on the same port: the gate's own routes, off the relay's path.

The `http` scope only: bodies are streamed both ways with back-pressure, and `http.disconnect` is told. An application
that fails before its response has begun gives a 500 in the gate's shape; after that its connection is cut.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tidegate.errors import TidegateError
from tidegate.proxy import chunked, replies
from tidegate.proxy.framing import has_no_body
from tidegate.proxy.http1_server import ClientConnection
from tidegate.proxy.seam import AsgiApp, Chunk, RequestHead

if TYPE_CHECKING:
    from tidegate.proxy.relay import Listener

log = logging.getLogger("tidegate.proxy")

Message = MutableMapping[str, Any]


class AsgiExchange:
    def __init__(
        self,
        listener: Listener,
        client: ClientConnection,
        head: RequestHead,
        app: AsgiApp,
        body: Chunk,
        complete: bool,
    ) -> None:
        self._listener = listener
        self._client = client
        self._head = head
        self._app = app
        self._body = bytearray(body)
        self._body_complete = complete
        self._body_told = False  # the application has the whole body
        self._arrived = asyncio.Event()  # body bytes, or the client's leaving
        self._writable = asyncio.Event()
        self._writable.set()
        self._gone = False
        self._start: Message | None = None  # kept until the first body message
        self._begun = False
        self._chunked = False
        self._left: int | None = None  # of the announced Content-Length
        self._finished = False

    # --- from the client ----------------------------------------------------------------------------------------
    def open(self) -> None:
        task = asyncio.get_running_loop().create_task(self._run())
        self._listener.asgi_tasks.add(task)
        task.add_done_callback(self._listener.asgi_tasks.discard)

    def request_data(self, data: bytes, complete: bool) -> None:
        self._body += data
        self._body_complete = complete
        self._arrived.set()
        if len(self._body) > self._listener.config.buffer_bytes:
            self._client.pause_body()

    def request_failed(self, error: TidegateError) -> bool:
        self.client_gone()
        return not self._begun

    def client_gone(self) -> None:
        self._gone = True
        self._arrived.set()
        self._writable.set()

    def pause_response(self) -> None:
        self._writable.clear()

    def resume_response(self) -> None:
        self._writable.set()

    # --- the application ----------------------------------------------------------------------------------------
    def _scope(self) -> Message:
        head, transport = self._head, self._client.transport
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.0" if self._client.http_1_0 else "1.1",
            "method": head.method,
            "scheme": "http",
            "path": unquote(head.path),
            "raw_path": head.path.encode("latin-1"),
            "query_string": head.query.encode("latin-1"),
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in head.headers],
            "client": tuple((transport.get_extra_info("peername") or ())[:2]),
            "server": tuple((transport.get_extra_info("sockname") or ())[:2]),
            "state": {},
        }

    async def _run(self) -> None:
        try:
            await self._app(self._scope(), self._receive, self._send)
            if not self._finished and not self._gone:
                raise RuntimeError("the application returned without a whole response")
        except Exception:
            log.exception("fault in an application")
            if not (self._gone or self._finished):
                self._fail()
        finally:
            self._listener.exchange_ended()

    def _fail(self) -> None:
        if self._begun:
            self._client.cut()
        else:
            self._client.reply_error(TidegateError("Internal error"))

    async def _receive(self) -> Message:
        if not self._body_complete:
            self._client.send_continue()
        while not self._gone and not self._finished:
            if self._body or (self._body_complete and not self._body_told):
                body = bytes(self._body)
                self._body.clear()
                self._body_told = self._body_complete
                self._client.resume_body()
                return {"type": "http.request", "body": body, "more_body": not self._body_complete}
            self._arrived.clear()
            await self._arrived.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if not self._writable.is_set():
            await self._writable.wait()
        if self._gone:
            return
        kind = message["type"]
        if kind == "http.response.start" and self._start is None:
            self._start = message
        elif kind == "http.response.body" and self._start is not None and not self._finished:
            self._send_body(message.get("body", b""), complete=not message.get("more_body", False))
        else:
            raise RuntimeError(f"unexpected ASGI message {kind!r}")

    def _send_body(self, body: bytes, *, complete: bool) -> None:
        head = b""
        if not self._begun:
            assert self._start is not None
            self._begun = True
            head = self._response_head(self._start["status"], self._start.get("headers", ()))
        if self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (complete and self._left):
                raise RuntimeError("the response's body is not as long as its Content-Length")
        if has_no_body(self._head.method, self._start["status"] if self._start else 200):
            body = b""
        elif self._chunked:
            body = (chunked.encode(body) if body else b"") + (chunked.LAST_CHUNK if complete else b"")
        if head or body:
            self._client.write(head + body)
        if complete:
            self._finished = True
            self._arrived.set()
            self._client.response_done(
                keep_alive=self._left is not None or self._chunked or not self._framed_by_close()
            )

    def _framed_by_close(self) -> bool:
        assert self._start is not None
        return not has_no_body(self._head.method, self._start["status"])

    def _response_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        lines = [replies.status_line(status)]
        no_body = has_no_body(self._head.method, status)
        for name, value in headers:
            lower = bytes(name).lower()
            if lower in (b"connection", b"transfer-encoding", b"keep-alive"):
                continue  # framing is ours
            if lower == b"content-length" and not no_body:
                self._left = int(value)
            lines.append(b"%b: %b\r\n" % (name, value))
        if self._left is None and not no_body and not self._client.http_1_0:
            self._chunked = True
            lines.append(b"Transfer-Encoding: chunked\r\n")
        until_close = self._left is None and not self._chunked and not no_body
        if self._client.will_close() or until_close:
            lines.append(b"Connection: close\r\n")
        elif self._client.http_1_0:
            lines.append(b"Connection: keep-alive\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)
