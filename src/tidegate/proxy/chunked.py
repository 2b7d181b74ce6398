"""The chunked transfer coding (RFC 9112, 7.1), decoded strictly.

    chunk = size [extension] CRLF data CRLF ... "0" CRLF *(trailer CRLF) CRLF

Stricter than the RFC's recipient: no white space around the size, no bare CR or LF anywhere, sizes of at most 15 hex
digits. Extensions are checked and dropped, as are trailers: the coding belongs to one hop.
"""

from __future__ import annotations

import re

SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\x20\x21-\x7e\x80-\xff\t]*)?\Z")
TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\x20-\x7e\x80-\xff\t]*\Z")
LINE_MAX_BYTES = 4096  # a size line or a trailer; extensions are unused in practice
TRAILERS_MAX_BYTES = 16_384

LAST_CHUNK = b"0\r\n\r\n"


class InvalidChunk(ValueError):
    pass


def encode(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class ChunkedDecoder:
    """Give it bytes as they come; it gives back payload, and after the end the bytes that are not its own."""

    __slots__ = ("_closing_crlf", "_left", "_line", "_trailer_bytes", "done", "rest")

    def __init__(self) -> None:
        self._left = 0  # of the current chunk's data
        self._closing_crlf = False  # data read, its CRLF not yet
        self._line = b""  # an unfinished line
        self._trailer_bytes = -1  # -1: not in the trailers
        self.done = False
        self.rest = b""  # what follows the last chunk

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`, possibly empty. Raises InvalidChunk."""
        if self._line:
            data = self._line + data
            self._line = b""
        parts: list[bytes] = []
        at, end = 0, len(data)
        while at < end:
            if self._left:
                piece = data[at : at + self._left]
                parts.append(piece)
                at += len(piece)
                self._left -= len(piece)
                self._closing_crlf = not self._left
                continue
            stop = data.find(b"\r\n", at)
            if stop < 0:
                self._keep(data[at:])
                break
            line = data[at:stop]
            at = stop + 2
            if self._closing_crlf:
                if line:
                    raise InvalidChunk("Chunk longer than its size")
                self._closing_crlf = False
            elif self._trailer_bytes < 0:
                self._size(line)
            elif line:
                self._trailer(line)
            else:
                self.done = True
                self.rest = data[at:]
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _keep(self, line: bytes) -> None:
        if self._closing_crlf and line != b"\r":
            raise InvalidChunk("Chunk longer than its size")
        if len(line) > LINE_MAX_BYTES:
            raise InvalidChunk("Chunk header too long")
        if b"\n" in line or b"\r" in line[:-1]:
            raise InvalidChunk("Bare CR or LF in chunk header")
        self._line = line

    def _size(self, line: bytes) -> None:
        match = SIZE_LINE.match(line)
        if match is None or len(line) > LINE_MAX_BYTES:
            raise InvalidChunk("Invalid chunk size")
        self._left = int(match[1], 16)
        if not self._left:
            self._trailer_bytes = 0

    def _trailer(self, line: bytes) -> None:
        self._trailer_bytes += len(line)
        if self._trailer_bytes > TRAILERS_MAX_BYTES or TRAILER_LINE.match(line) is None:
            raise InvalidChunk("Invalid trailer")
