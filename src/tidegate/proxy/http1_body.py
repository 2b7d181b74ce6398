"""Message bodies that do not come with their head in one read: by length, chunked, or until the connection ends."""

from __future__ import annotations

from typing import Protocol

from tidegate.proxy.chunked import ChunkedDecoder
from tidegate.proxy.framing import CHUNKED, UNTIL_CLOSE


class BodyReader(Protocol):
    done: bool
    rest: bytes  # after the end: the bytes that are not the body's

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`, possibly empty."""
        ...


class FixedBody:
    __slots__ = ("_left", "done", "rest")

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        left = self._left
        self._left = left - len(data)
        if self._left > 0:
            return data
        self.done = True
        if self._left:
            self.rest = data[left:]
            return data[:left]
        return data


class BodyUntilClose:
    __slots__ = ("done", "rest")

    def __init__(self) -> None:
        self.done = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        return data


def body_reader(length: int) -> BodyReader:
    """`length`: in bytes, CHUNKED or UNTIL_CLOSE."""
    if length == CHUNKED:
        return ChunkedDecoder()
    if length == UNTIL_CLOSE:
        return BodyUntilClose()
    return FixedBody(length)
