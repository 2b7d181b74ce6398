"""The few pieces of ASGI that the engine's endpoints need: a call, its body, JSON and event-stream answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

import msgspec

from tidegate.errors import RequestError

Scope: TypeAlias = dict[str, Any]
Message: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ExtraHeaders: TypeAlias = Iterable[tuple[bytes, bytes]]

_JSON = (b"content-type", b"application/json")


class Refusal(RequestError):
    """An error in vLLM's shape: `type` is a name like BadRequestError, `code` the status."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message, status=status, param=param)
        self.kind = kind

    def body(self) -> bytes:
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}
        )


class Call:
    """One HTTP request and the way to answer it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # the first of a repeated one
        self._query: bytes = scope["query_string"]
        self._receive = receive
        self._send = send
        self.status = 0  # of the answer, once it is sent

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self._query.decode("latin-1")))

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return value.decode("latin-1") if value else None

    async def body(self) -> bytes:
        message = await self._receive()
        if not message.get("more_body"):
            return bytes(message.get("body", b""))
        chunks = [message["body"]]
        while message.get("more_body"):
            message = await self._receive()
            chunks.append(message.get("body", b""))
        return b"".join(chunks)

    async def disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def on_disconnect(self, callback: Callable[[], object]) -> asyncio.Task[None]:
        """Cancel the returned task when the answer is complete."""
        watch = asyncio.ensure_future(self.disconnected())
        watch.add_done_callback(lambda task: None if task.cancelled() else callback())
        return watch

    # --- answers ----------------------------------------------------------------------------------------------
    async def start(self, status: int, headers: ExtraHeaders) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, chunk: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})

    async def raw(self, status: int, body: bytes, headers: ExtraHeaders = ()) -> None:
        await self.start(status, [(b"content-length", str(len(body)).encode()), *headers])
        await self.write(body, more=False)

    async def json(self, value: Any, *, status: int = 200, headers: ExtraHeaders = ()) -> None:
        await self.raw(status, msgspec.json.encode(value), [_JSON, *headers])

    async def refuse(self, error: RequestError) -> None:
        await self.raw(error.status, error.body(), [_JSON])

    async def start_events(self, headers: ExtraHeaders = ()) -> None:
        await self.start(200, [(b"content-type", b"text/event-stream; charset=utf-8"), *headers])

    async def event(self, value: Any, *, name: str | None = None) -> None:
        head = b"" if name is None else b"event: " + name.encode() + b"\n"
        await self.write(head + b"data: " + msgspec.json.encode(value) + b"\n\n")


def decode_body(body: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Errors name the field, as far as msgspec does."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise Refusal(f"1 validation error:\n  {error}", kind="Bad Request", param="body") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"1 validation error:\n  JSON decode error: {error}", kind="Bad Request", param="body") from error
