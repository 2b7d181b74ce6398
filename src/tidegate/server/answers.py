"""Answers of the gate's own routes: JSON by msgspec, errors in the OpenAI shape."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tidegate.errors import BodyTooLarge, InvalidBody, RequestError, TidegateError

MAX_BODY_BYTES = 1_048_576  # of a call to the gate's own routes
MAX_COUNT = 2**53  # exact in a float, and in any reader of the decision log


def answer(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def error_response(request: Request, exc: Exception) -> Response:
    """Of any exception: one that is not ours to explain is a fault, and says no more than that."""
    if isinstance(exc, HTTPException):
        exc = RequestError(exc.detail, status=exc.status_code)
    elif not isinstance(exc, TidegateError):
        exc = TidegateError("the gate failed on this request")
    headers = {} if exc.retry_after_s is None else {"Retry-After": str(max(1, round(exc.retry_after_s)))}
    return Response(exc.body(), status_code=exc.status, media_type="application/json", headers=headers)


async def read_body(request: Request, limit_bytes: int = MAX_BODY_BYTES) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit_bytes:
            raise BodyTooLarge(f"the body of {request.url.path} is longer than {limit_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


async def read_fields(request: Request) -> dict[str, Any]:
    """The query's fields, over those of a JSON body if there is one."""
    body = await read_body(request)
    fields: Any = {}
    if body.strip():
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise InvalidBody(f"not JSON: {exc}") from exc
        if not isinstance(fields, dict):
            raise InvalidBody("not a JSON object")
    return {**fields, **request.query_params}


def text_field(fields: dict[str, Any], *names: str) -> str | None:
    """The first that is given; numbers are taken as text."""
    for name in names:
        value = fields.get(name)
        if value is None or value == "":
            continue
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise RequestError(f"{name} must be text", reason="invalid_field", param=name)
        return str(value)
    return None


def count_field(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None or value == "":
        return None
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = -1
    if not 0 <= count <= MAX_COUNT or isinstance(value, bool):
        raise RequestError(f"{name} must be a count", reason="invalid_field", param=name)
    return count
