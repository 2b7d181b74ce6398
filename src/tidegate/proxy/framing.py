"""Header rules, pure: where a message's body ends, what belongs to one hop only, and what goes on.

Requests (RFC 9112, 3 and 6):
- HTTP/1.1 needs exactly one valid Host; HTTP/1.0 at most one. An absolute-form target is accepted for http and https:
  its authority counts and the rest becomes the origin form. CONNECT and Upgrade are refused, but for `Upgrade: h2c`,
  which is ignored as RFC 9110, 7.8 allows: Java's stock client always sends it.
- Transfer-Encoding must be one header that says exactly `chunked`; never in HTTP/1.0, never beside Content-Length.
- Expect: 100-continue is answered by the gate and not forwarded; any other expectation is 417.
- Going on: all lines as they came but Host (set for the replica), the hop-by-hop ones, and those that Connection names
  (Host, Content-Length and Transfer-Encoding cannot be removed that way). A Via line is added, as a gateway must; a
  request that already carries this process's own Via has come round in a circle and is refused. X-Forwarded-For is
  neither added nor changed: engines do not use it and the bytes stay the client's.

Responses (RFC 9112, 6.3): HEAD, 204 and 304 have no body; else `chunked`, else Content-Length, else until the
connection closes. Anything else in Transfer-Encoding, or 101, is an invalid response. The framing is kept towards the
client; an HTTP/1.0 client gets a chunked body without its framing, ended by the connection's close. A redirect of a
replica to itself (engines send them for a slash too many) becomes one within the gate, or its client would leave it.
"""

from __future__ import annotations

import re
import secrets
from functools import lru_cache
from typing import Final

from tidegate.errors import RequestError
from tidegate.proxy.http1_head import InvalidHead, Lines, RequestLines, ResponseLines

LENGTH_MAX_DIGITS: Final = 15  # a petabyte; no overflow in any peer
HOST = re.compile(rb"(?:[A-Za-z0-9\-._~!$&'()*+;=%]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?\Z")
ABSOLUTE = re.compile(rb"https?://([^/?]+)(.*)\Z", re.IGNORECASE | re.DOTALL)
PSEUDONYM: Final = b"tidegate-" + secrets.token_hex(4).encode()  # this process in a Via line
VIA: Final = b"Via: 1.1 " + PSEUDONYM
# On calls of the gate's own; lower-case, to stand beside a client's.
VIA_HEADER: Final = {"via": VIA[len(b"Via: ") :].decode()}
UNTIL_CLOSE: Final = -1
CHUNKED: Final = -2
NO_FRAMING: Final = -3


# What a header name means to a hop. Plain numbers: they are compared for each header of each message.
PASS: Final = 0
DROP: Final = 1
HOST_IS: Final = 2
LENGTH_IS: Final = 3
CODING_IS: Final = 4
CONNECTION_IS: Final = 5
EXPECT_IS: Final = 6
UPGRADE_IS: Final = 7
VIA_IS: Final = 8
NAMES_MAX: Final = 4096  # spellings remembered; peers use few, and hostile ones shall not fill the memory


class Rules(dict[bytes, int]):
    """By header name as it is spelled: looking up a spelling again saves its folding."""

    def __init__(self, rules: dict[bytes, int]) -> None:
        self._by_lower = rules

    def __missing__(self, name: bytes) -> int:
        rule = self._by_lower.get(name.lower(), PASS)
        if len(self) < NAMES_MAX:
            self[name] = rule
        return rule


HOP_BY_HOP = {
    b"connection": CONNECTION_IS,
    b"transfer-encoding": CODING_IS,
    b"content-length": LENGTH_IS,
    b"keep-alive": DROP,
    b"te": DROP,
    b"trailer": DROP,
    b"proxy-authenticate": DROP,
    b"proxy-authentication-info": DROP,
    b"proxy-authorization": DROP,
    b"proxy-connection": DROP,
}
REQUEST_RULES: Final = Rules(
    {
        **HOP_BY_HOP,
        b"host": HOST_IS,
        b"expect": EXPECT_IS,
        b"upgrade": UPGRADE_IS,
        b"via": VIA_IS,
    }
)
RESPONSE_RULES: Final = Rules({**HOP_BY_HOP, b"upgrade": DROP})
NEVER_NAMED: Final = frozenset((b"host", b"content-length", b"transfer-encoding", b"close", b"keep-alive", b""))


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip(b" \t").lower() for token in value.split(b",")]


@lru_cache(1024)
def _valid_host(value: bytes) -> bool:
    return HOST.match(value) is not None


def _length(value: bytes) -> int:
    if not value.isdigit() or len(value) > LENGTH_MAX_DIGITS:
        raise InvalidHead("Invalid Content-Length")
    return int(value)


def _drop(message: Lines, drop: list[int], named: list[bytes]) -> None:
    """Take away the lines at `drop` (rising) and those that Connection named."""
    lines = message.lines
    if named:
        extra = [name for name in named if name not in NEVER_NAMED]
        if extra:
            found = {at for at, (name, _) in enumerate(message.headers, 1) if name.lower() in extra}
            drop = sorted(found.union(drop))
    for at in reversed(drop):
        del lines[at]


def _origin_form(target: bytes, method: str) -> bytes:
    if target == b"*" and method == "OPTIONS":
        return target
    match = ABSOLUTE.match(target)
    if match is None or not _valid_host(match[1]):
        raise InvalidHead("Invalid request target")
    rest = match[2]
    return rest if rest.startswith(b"/") else b"/" + rest


def request_framing(request: RequestLines) -> RequestLines:
    """Raises InvalidHead, or a RequestError for what is valid but not served."""
    if request.method == "CONNECT":
        raise RequestError("CONNECT is not supported", status=405, reason="connect_not_supported")
    hosts, length, keep_alive, expects, upgrade = 0, NO_FRAMING, not request.http_1_0, False, b""
    drop: list[int] = []
    named: list[bytes] = []
    for at, (name, value) in enumerate(request.headers, 1):
        rule = REQUEST_RULES[name]
        if rule == PASS:
            continue
        value = value.rstrip(b" \t")
        if rule == LENGTH_IS:
            if length != NO_FRAMING:
                raise InvalidHead("More than one framing of the body")
            length = _length(value)
            continue
        if rule == CODING_IS:
            if length != NO_FRAMING or value.lower() != b"chunked" or request.http_1_0:
                raise InvalidHead("Transfer-Encoding must be exactly chunked")
            length = CHUNKED
            continue
        if rule == VIA_IS:
            if PSEUDONYM in value:
                raise RequestError("The request has passed this gate before", status=508, reason="loop_detected")
            continue
        drop.append(at)
        if rule == HOST_IS:
            hosts += 1
            if not _valid_host(value):
                raise InvalidHead("Invalid Host")
        elif rule == CONNECTION_IS:
            if value != b"keep-alive" or request.http_1_0:
                named += _tokens(value)
        elif rule == EXPECT_IS:
            if value.lower() != b"100-continue":
                raise RequestError("Unknown expectation", status=417, reason="expectation_failed")
            expects = not request.http_1_0
        elif rule == UPGRADE_IS:
            upgrade = value.lower()
    if hosts != 1 and (hosts or not request.http_1_0):
        raise InvalidHead("Exactly one Host header is needed")
    if upgrade and upgrade != b"h2c" and b"upgrade" in named:
        raise RequestError("Upgrade is not supported", reason="upgrade_not_supported")
    if named:
        keep_alive = (keep_alive or b"keep-alive" in named) and b"close" not in named
    if not request.target.startswith(b"/"):
        request.target = _origin_form(request.target, request.method)
    _drop(request, drop, named)
    request.lines[0] = VIA
    request.onward = b"\r\n".join(request.lines)  # from after Host to the empty line
    request.length = 0 if length == NO_FRAMING else length
    request.keep_alive = keep_alive
    request.expects_continue = expects
    return request


def has_no_body(method: str, status: int) -> bool:
    return method == "HEAD" or status == 204 or status == 304 or status < 200


def response_framing(response: ResponseLines, method: str, client_1_0: bool) -> ResponseLines:
    """Raises InvalidHead."""
    status = response.status
    if status == 101:
        raise InvalidHead("Unasked switch of protocols")
    no_body = has_no_body(method, status)
    length, keep_alive = NO_FRAMING, not response.http_1_0
    drop: list[int] = []
    named: list[bytes] = []
    for at, (name, value) in enumerate(response.headers, 1):
        rule = RESPONSE_RULES[name]
        if rule == PASS:
            continue
        value = value.rstrip(b" \t")
        if rule == LENGTH_IS:
            if length != NO_FRAMING:
                raise InvalidHead("More than one framing of the body")
            length = _length(value)
            if status == 204 or status < 200:
                drop.append(at)
        elif rule == CODING_IS:
            if length != NO_FRAMING or value.lower() != b"chunked":
                raise InvalidHead("Transfer-Encoding must be exactly chunked")
            length = CHUNKED
            if client_1_0 or (no_body and method != "HEAD"):
                drop.append(at)
        else:
            drop.append(at)
            if rule == CONNECTION_IS and (value != b"keep-alive" or response.http_1_0):
                named += _tokens(value)
    if named:
        keep_alive = (keep_alive or b"keep-alive" in named) and b"close" not in named
    _drop(response, drop, named)
    lines = response.lines
    if response.http_1_0:
        lines[0] = b"HTTP/1.1" + lines[0][8:]
    lines.pop()  # the second empty line: its CRLF comes when the last header is known
    response.onward = b"\r\n".join(lines)  # status and headers, each with its CRLF
    response.length = 0 if no_body else UNTIL_CLOSE if length == NO_FRAMING else length
    response.keep_alive = keep_alive
    return response


def stay_here(response: ResponseLines, replica_url: str) -> None:
    """Of a redirect: a Location at the replica becomes the path alone, which the client takes for one of the gate's."""
    base = replica_url.encode("latin-1")
    lines = response.onward.split(b"\r\n")
    for at, line in enumerate(lines):
        name, _, value = line.partition(b":")
        target = value.strip(b" \t")
        if name.lower() == b"location" and target.startswith(base) and target[len(base) :][:1] in (b"", b"/", b"?"):
            rest = target[len(base) :]
            lines[at] = name + b": " + (rest if rest.startswith(b"/") else b"/" + rest)
    response.onward = b"\r\n".join(lines)
