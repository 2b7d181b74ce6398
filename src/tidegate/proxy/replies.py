"""Replies that the gate writes itself: errors in the OpenAI shape, 100 Continue."""

from __future__ import annotations

import math
from http import HTTPStatus

from tidegate.errors import TidegateError

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


def status_line(status: int) -> bytes:
    return STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n".encode()


def error_reply(error: TidegateError, *, close: bool, without_body: bool = False) -> bytes:
    """`without_body`: the answer to a HEAD."""
    body = error.body()
    head = status_line(error.status) + b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    if error.retry_after_s is not None:
        head += b"Retry-After: %d\r\n" % max(1, math.ceil(error.retry_after_s))
    if close:
        head += b"Connection: close\r\n"
    return head + b"\r\n" + (b"" if without_body else body)
