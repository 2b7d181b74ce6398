from __future__ import annotations

import pytest

from tidegate.errors import RequestError
from tidegate.proxy.framing import CHUNKED, UNTIL_CLOSE, VIA, request_framing, response_framing
from tidegate.proxy.http1_head import HEADERS_MAX, InvalidHead, TooManyHeaders, parse_request, parse_response

HOST = b"Host: gate\r\n"


def head(*lines: bytes) -> bytes:
    return b"".join(line + b"\r\n" for line in lines) + b"\r\n"


START_LINES = [
    b"GET  / HTTP/1.1",
    b"GET / HTTP/1.1 ",
    b"GET\t/ HTTP/1.1",
    b"GET / HTTP/2.0",
    b"GET / HTTP/0.9",
    b"GET / HTTP/1.2",
    b"GET / HTTP/1.10",
    b"GET / http/1.1",
    b"GET /",
    b"GET /a b HTTP/1.1",
    b"GET /a#b HTTP/1.1",
    b"GET /\x01 HTTP/1.1",
    b"GET /\x80 HTTP/1.1",
    b"get / HTTP/1.1",
    b"SOURCE / ICE/1.0",
    b"SETUP / RTSP/1.0",
    b"\nGET / HTTP/1.1",
    b" GET / HTTP/1.1",
    b"",
]
HEADER_LINES = [
    b"Content-Length: 5\r\nContent-Length: 5",
    b"Content-Length: 5\r\nContent-Length: 6",
    b"Content-Length: 5\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: chunked\r\nContent-Length: 5",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding: chunkedx",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding: chunked;q=1",
    b"Transfer-Encoding: \x0bchunked",
    b'Transfer-Encoding: "chunked"',
    b"Transfer-Encoding:",
    b"Transfer-Encoding : chunked",
    b"Content-Length : 5",
    b"Content-Length: +5",
    b"Content-Length: -5",
    b"Content-Length: 0x5",
    b"Content-Length: 5,5",
    b"Content-Length: 5 5",
    b"Content-Length: ",
    b"Content-Length: 5\x0b",
    b"Content-Length: 1234567890123456",
    b"Content-Length: 99999999999999999999999",
    b"A: b\r\n c",
    b"A: b\r\n\tc",
    b" A: b",
    b"A: b\rc",
    b"A: b\nc: d",
    b"A: b\x00",
    b"A: b\x1f",
    b"A: b\x7f",
    b"A\x00: b",
    b"A\xff: b",
    b"A(: b",
    b": b",
    b"no colon",
    b"Host: other",
    b"Host: gate",
]


@pytest.mark.parametrize("start", START_LINES)
def test_a_request_line_that_is_not_exactly_one_is_refused(start: bytes) -> None:
    with pytest.raises((InvalidHead, RequestError)):
        request_framing(parse_request(start + b"\r\n" + HOST + b"\r\n"))


@pytest.mark.parametrize("line", HEADER_LINES)
def test_a_header_that_two_parsers_may_read_differently_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidHead):
        request_framing(parse_request(b"POST / HTTP/1.1\r\n" + HOST + line + b"\r\n\r\n"))


@pytest.mark.parametrize(
    "host", [b"", b"Host: a b\r\n", b"Host: a,b\r\n", b"Host: a/b\r\n", b"Host: u@a\r\n", HOST * 2]
)
def test_a_request_needs_exactly_one_valid_host(host: bytes) -> None:
    with pytest.raises(InvalidHead):
        request_framing(parse_request(b"GET / HTTP/1.1\r\n" + host + b"\r\n"))


@pytest.mark.parametrize("host", [b"a", b"a:80", b"[::1]:80", b"", b"1.2.3.4", b"a_b.c"])
def test_valid_hosts_are_accepted(host: bytes) -> None:
    request_framing(parse_request(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"))


def test_http_1_0_needs_no_host_and_has_no_chunked_bodies() -> None:
    assert not request_framing(parse_request(head(b"GET / HTTP/1.0"))).keep_alive
    assert request_framing(parse_request(head(b"GET / HTTP/1.0", b"Connection: Keep-Alive"))).keep_alive
    with pytest.raises(InvalidHead):
        request_framing(parse_request(head(b"POST / HTTP/1.0", b"Transfer-Encoding: chunked")))


def test_headers_that_stay_keep_their_order_case_white_space_and_duplicates() -> None:
    lines = (b"x-B:  two  words ", b"X-A: 1", b"x-a: 2", b"Content-length: 3", b"X_Session_ID: s", b"Accept:\t*/*")
    framing = request_framing(parse_request(head(b"POST /p?q=%20 HTTP/1.1", b"Host: gate", *lines)))
    assert framing.onward == VIA + b"\r\n" + b"\r\n".join(lines) + b"\r\n\r\n"
    assert framing.target == b"/p?q=%20"
    assert framing.length == 3


def test_white_space_around_a_framing_value_does_not_count() -> None:
    request = head(b"POST / HTTP/1.1", b"Host: \t gate \t", b"Content-Length:  5 ", b"Connection: close\t")
    framing = request_framing(parse_request(request))
    assert (framing.length, framing.keep_alive) == (5, False)


def test_hop_by_hop_headers_stay_here() -> None:
    request = head(
        b"POST / HTTP/1.1",
        b"Host: gate",
        b"Connection: close, X-Mine",
        b"X-Mine: 1",
        b"x-mine: 2",
        b"Keep-Alive: timeout=5",
        b"TE: trailers",
        b"Trailer: X",
        b"Upgrade: h2c",
        b"Proxy-Authorization: secret",
        b"Proxy-Connection: keep-alive",
        b"Expect: 100-Continue",
        b"X-Kept: 1",
        b"Transfer-Encoding: Chunked",
    )
    framing = request_framing(parse_request(request))
    assert framing.onward == VIA + b"\r\nX-Kept: 1\r\nTransfer-Encoding: Chunked\r\n\r\n"
    assert framing.length == CHUNKED
    assert framing.expects_continue
    assert not framing.keep_alive


def test_connection_cannot_take_the_framing_away() -> None:
    named = b"Connection: content-length, host, transfer-encoding"
    framing = request_framing(parse_request(head(b"POST / HTTP/1.1", b"Host: gate", named, b"Content-Length: 5")))
    assert b"Content-Length: 5\r\n" in framing.onward


@pytest.mark.parametrize(
    ("target", "origin"),
    [
        (b"http://other:1/a?b", b"/a?b"),
        (b"https://other", b"/"),
        (b"HTTP://other?q", b"/?q"),
        (b"/http://x", b"/http://x"),
    ],
)
def test_an_absolute_target_becomes_an_origin_form(target: bytes, origin: bytes) -> None:
    assert request_framing(parse_request(b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n")).target == origin


@pytest.mark.parametrize("target", [b"ftp://a/b", b"http://u:p@a/b", b"http:///b", b"*", b"a/b"])
def test_other_targets_are_refused(target: bytes) -> None:
    with pytest.raises(InvalidHead):
        request_framing(parse_request(b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n"))


@pytest.mark.parametrize(
    ("lines", "status", "reason"),
    [
        ((b"CONNECT a:80 HTTP/1.1", b"Host: a:80"), 405, "connect_not_supported"),
        ((b"GET / HTTP/1.1", b"Host: a", b"Connection: Upgrade", b"Upgrade: websocket"), 400, "upgrade_not_supported"),
        ((b"GET / HTTP/1.1", b"Host: a", b"Expect: tea"), 417, "expectation_failed"),
        ((b"GET / HTTP/1.1", b"Host: a", b"Via: 1.0 x, " + VIA[5:]), 508, "loop_detected"),
    ],
)
def test_what_is_understood_and_not_served_says_so(lines: tuple[bytes, ...], status: int, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        request_framing(parse_request(head(*lines)))
    assert (caught.value.status, caught.value.reason) == (status, reason)


def test_h2c_upgrades_are_ignored() -> None:
    lines = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: x")
    framing = request_framing(parse_request(head(b"GET / HTTP/1.1", b"Host: a", *lines)))
    assert framing.onward == VIA + b"\r\n\r\n"


def test_the_number_of_headers_is_bounded() -> None:
    with pytest.raises(TooManyHeaders):
        parse_request(head(b"GET / HTTP/1.1", *([b"a: b"] * (HEADERS_MAX + 1))))


RESPONSES = [
    (b"HTTP/1.1 200 OK", b"Content-Length: 5", b"Content-Length: 5"),
    (b"HTTP/1.1 200 OK", b"Content-Length: 5", b"Transfer-Encoding: chunked"),
    (b"HTTP/1.1 200 OK", b"Transfer-Encoding: gzip"),
    (b"HTTP/1.1 200 OK", b"Transfer-Encoding: chunked, gzip"),
    (b"HTTP/1.1 200 OK", b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    (b"HTTP/1.1 200 OK", b"Content-Length: +5"),
    (b"HTTP/1.1 200 OK", b"A: b\x00"),
    (b"HTTP/1.1 200 OK", b"A: b", b" folded"),
    (b"HTTP/1.1 200 O\x00K",),
    (b"HTTP/1.1 200 O\nK",),
    (b"HTTP/1.1 99 OK",),
    (b"HTTP/1.1 2000 OK",),
    (b"HTTP/2.0 200 OK",),
    (b"ICY 200 OK",),
    (b"garbage",),
    (b"HTTP/1.1 101 Switching Protocols", b"Upgrade: x", b"Connection: upgrade"),
]


@pytest.mark.parametrize("lines", RESPONSES)
def test_an_invalid_response_is_refused(lines: tuple[bytes, ...]) -> None:
    with pytest.raises(InvalidHead):
        response_framing(parse_response(head(*lines)), "GET", client_1_0=False)


def test_a_response_without_framing_ends_with_the_connection() -> None:
    framing = response_framing(parse_response(head(b"HTTP/1.1 200 OK")), "GET", client_1_0=False)
    assert framing.length == UNTIL_CLOSE


@pytest.mark.parametrize(("method", "status"), [("HEAD", b"200"), ("GET", b"204"), ("GET", b"304")])
@pytest.mark.parametrize("line", [b"Content-Length: 5", b"Transfer-Encoding: chunked", b"X: y"])
def test_responses_that_have_no_body(method: str, status: bytes, line: bytes) -> None:
    framing = response_framing(parse_response(head(b"HTTP/1.1 " + status + b" X", line)), method, client_1_0=False)
    assert framing.length == 0
    allowed = status != b"204" and not (status == b"304" and line.startswith(b"Tr"))
    assert (line in framing.onward) == (allowed or line == b"X: y")


def test_a_response_goes_on_as_it_came() -> None:
    lines = (b"HTTP/1.1 299 Odd  reason", b"x-a: 1", b"X-A:2", b"Content-Encoding: gzip", b"content-length: 7")
    framing = response_framing(parse_response(head(*lines, b"Connection: keep-alive")), "GET", client_1_0=False)
    assert framing.onward == head(*lines)[:-2]
    assert framing.length == 7
    assert framing.keep_alive
