"""Message heads: llhttp reads them, and a second, independent look at the raw lines closes what llhttp lets through.

A head is given whole, from its first byte to the empty line, and both looks must agree on where it ends and how many
lines it has. llhttp (strict mode) refuses obs-fold, bare CR or LF, control characters, space before a colon, and
Content-Length that is repeated, signed, listed or beside Transfer-Encoding. What it accepts and we do not: several
spaces in the start line, HTTP/0.9 and HTTP/2.0, RTSP and ICE, a fragment in the target, more than one empty line
before a request, control characters in a reason phrase.

The raw lines are kept beside the parsed headers, one line a header, so that what passes on is what came in. Values
may end in white space, which llhttp leaves to its user.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import httptools

HEADERS_MAX: Final = 256  # each costs a callback; Apache allows 100, Node.js 2000
BARE_ENDING = re.compile(rb"(?<!\r)\n|\r[^\n]")  # of a line: what comes after it will never end the head
BAD_REASON = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class InvalidHead(ValueError):
    """The bytes are not a message head. The text may be shown to the peer."""


class TooManyHeaders(InvalidHead):
    pass


class Lines:
    """What llhttp tells while it reads a head, the raw lines beside it, and what `framing` makes of them."""

    __slots__ = ("complete", "headers", "http_1_0", "keep_alive", "length", "lines", "onward")
    lines: list[bytes]  # the start line, one for each header, and two empty ones from CRLF CRLF
    http_1_0: bool
    # by `framing`
    length: int  # of the body; CHUNKED, UNTIL_CLOSE
    keep_alive: bool  # whether the sender will keep the connection
    onward: bytes  # the lines that go on

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.complete = True


class RequestLines(Lines):
    __slots__ = ("expects_continue", "method", "target")
    method: str
    target: bytes  # after `framing`: in origin form, or *
    expects_continue: bool

    def on_url(self, target: bytes) -> None:
        self.target = target


class ResponseLines(Lines):
    __slots__ = ("status",)
    status: int


def _read(parser: httptools.HttpRequestParser | httptools.HttpResponseParser, seen: Lines, raw: bytes) -> bytes:
    """The start line."""
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # CONNECT, Upgrade and 101: `framing` decides
    except httptools.HttpParserError as error:
        raise InvalidHead(str(error)) from None
    if not seen.complete:
        raise InvalidHead("Unexpected end of headers")
    seen.lines = lines = raw.split(b"\r\n")
    count = len(seen.headers)
    if len(lines) != count + 3:
        raise InvalidHead("Invalid header lines")
    if count > HEADERS_MAX:
        raise TooManyHeaders(f"More than {HEADERS_MAX} headers")
    return lines[0]


def parse_request(raw: bytes) -> RequestLines:
    """`raw` ends with the first CRLF CRLF of the message. Raises InvalidHead."""
    seen = RequestLines()
    parser = httptools.HttpRequestParser(seen)
    start = _read(parser, seen, raw)
    method: bytes = parser.get_method()
    seen.method = method.decode("ascii")
    seen.http_1_0 = start != b"%b %b HTTP/1.1" % (method, seen.target)
    if seen.http_1_0 and start != b"%b %b HTTP/1.0" % (method, seen.target):
        raise InvalidHead("Invalid request line or HTTP version")
    if b"#" in seen.target:
        raise InvalidHead("Fragment in request target")
    return seen


def parse_response(raw: bytes) -> ResponseLines:
    """`raw` ends with the first CRLF CRLF of the message. Raises InvalidHead."""
    seen = ResponseLines()
    parser = httptools.HttpResponseParser(seen)
    seen.http_1_0 = _is_http_1_0(_read(parser, seen, raw))
    seen.status = parser.get_status_code()
    return seen


@lru_cache(1024)  # replicas use few status lines
def _is_http_1_0(status_line: bytes) -> bool:
    if not status_line.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")):
        raise InvalidHead("Invalid HTTP version")
    if BAD_REASON.search(status_line):
        raise InvalidHead("Control character in reason phrase")
    return status_line.startswith(b"HTTP/1.0")
