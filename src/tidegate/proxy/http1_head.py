"""Message heads: llhttp reads them, and a second, independent look at the raw lines closes what llhttp lets through.

A head is given whole, from its first byte to the empty line, and both looks must agree on where it ends and how many
lines it has. llhttp (strict mode) refuses obs-fold, bare CR or LF, control characters, space before a colon, and
Content-Length that is repeated, signed, listed or beside Transfer-Encoding. What it accepts and we do not: several
spaces in the start line, HTTP/0.9 and HTTP/2.0, RTSP and ICE, a fragment in the target, more than one empty line
before a request, control characters in a reason phrase.

The raw lines are kept beside the parsed headers, one line a header, so that what passes on is what came in.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import httptools

HEADERS_MAX = 256  # each costs a callback; Apache allows 100, Node.js 2000
BAD_REASON = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class InvalidHead(ValueError):
    """The bytes are not a message head. The text may be shown to the peer."""


class TooManyHeaders(InvalidHead):
    pass


class RequestLines(NamedTuple):
    method: str
    target: bytes
    http_1_0: bool
    headers: list[tuple[bytes, bytes]]
    lines: list[bytes]  # lines[0] is the start line, lines[i + 1] is headers[i]


class ResponseLines(NamedTuple):
    status: int
    http_1_0: bool
    headers: list[tuple[bytes, bytes]]
    lines: list[bytes]


class _Collector:
    __slots__ = ("complete", "headers", "target")

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.target = b""
        self.complete = False

    def on_url(self, target: bytes) -> None:
        self.target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.complete = True


def _collect(parser: httptools.HttpRequestParser | httptools.HttpResponseParser, seen: _Collector, raw: bytes) -> None:
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # CONNECT, Upgrade and 101: `framing` decides
    except httptools.HttpParserError as error:
        raise InvalidHead(str(error)) from None
    if not seen.complete:
        raise InvalidHead("Unexpected end of headers")


def _matched(raw: bytes, seen: _Collector) -> list[bytes]:
    lines = raw[:-4].split(b"\r\n")
    count = len(seen.headers)
    if len(lines) != count + 1:
        raise InvalidHead("Invalid header lines")
    if count > HEADERS_MAX:
        raise TooManyHeaders(f"More than {HEADERS_MAX} headers")
    if b" \r\n" in raw or b"\t\r\n" in raw:  # llhttp leaves trailing white space to us
        seen.headers = [(name, value.rstrip(b" \t")) for name, value in seen.headers]
    return lines


def parse_request(raw: bytes) -> RequestLines:
    """`raw` ends with the first CRLF CRLF of the message."""
    seen = _Collector()
    parser = httptools.HttpRequestParser(seen)
    _collect(parser, seen, raw)
    lines = _matched(raw, seen)
    method: bytes = parser.get_method()
    start = lines[0]
    request = b"%b %b HTTP/1." % (method, seen.target)
    if start == request + b"1":
        http_1_0 = False
    elif start == request + b"0":
        http_1_0 = True
    else:
        raise InvalidHead("Invalid request line or HTTP version")
    if b"#" in seen.target:
        raise InvalidHead("Fragment in request target")
    return RequestLines(method.decode("ascii"), seen.target, http_1_0, seen.headers, lines)


def parse_response(raw: bytes) -> ResponseLines:
    """`raw` ends with the first CRLF CRLF of the message."""
    seen = _Collector()
    parser = httptools.HttpResponseParser(seen)
    _collect(parser, seen, raw)
    lines = _matched(raw, seen)
    start = lines[0]
    if start.startswith(b"HTTP/1.1 "):
        http_1_0 = False
    elif start.startswith(b"HTTP/1.0 "):
        http_1_0 = True
    else:
        raise InvalidHead("Invalid HTTP version")
    if BAD_REASON.search(start):
        raise InvalidHead("Control character in reason phrase")
    return ResponseLines(parser.get_status_code(), http_1_0, seen.headers, lines)
