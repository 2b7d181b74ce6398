"""The seam between the HTTP data path (http1, pool, relay) and whoever decides (server.driver).

The data path moves bytes and tells what happened; it decides nothing. Every call here is synchronous and runs on the
event loop's thread: a request that can be placed at once is placed before `Handler.opened` returns.

The life of an exchange, as the handler sees it:

    opened --> (place | reject), now or later
    placed --> returned            the replica failed before the first response byte: place or reject again
           --> ended(outcome)      exactly once, on every path after `opened`, also when the client leaves while held;
                                   not after a reject
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

from tidegate.errors import ReplicaError, TidegateError
from tidegate.types import Outcome

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]  # as received: order, case and duplicates kept
AsgiApp: TypeAlias = Any
Chunk: TypeAlias = bytes | memoryview  # a long body is not copied out of what was read

Verdict: TypeAlias = Literal["wait", "pass", "retry"]
"""On a response whose head is still kept back: wait for more, send it on, or give the request to another replica."""


class RequestHead:
    """A parsed request line and headers. `path` is the target without query, percent-encoding kept; a router that knows
    the path under another spelling puts that in its place. `target` goes on as it came."""

    __slots__ = ("content_length", "headers", "method", "path", "query", "tag", "target", "_index")

    def __init__(self, method: str, target: bytes, headers: Headers, content_length: int | None) -> None:
        self.method = method
        self.target = target
        path, _, query = target.partition(b"?")
        self.path = path.decode("latin-1")
        self.query = query.decode("latin-1")
        self.headers = headers
        self.content_length = content_length  # None: chunked or no body
        self.tag: object = None  # the handler's own, between `wants_body` and `opened`
        self._index: dict[bytes, bytes] | None = None

    def get(self, name: bytes) -> bytes | None:
        """The first value of a header; `name` in lower case with hyphens. Names sent with _ for - are found too."""
        index = self._index
        if index is None:
            index = {}
            for key, value in self.headers:
                index.setdefault(key.lower().replace(b"_", b"-"), value)
            self._index = index
        return index.get(name)


class Meter(Protocol):
    """Watches the bytes of one exchange pass, to learn what it cost. Never changes them."""

    def request_body(self, chunk: Chunk) -> None: ...
    def response_head(self, status: int, headers: Headers) -> Verdict:
        """`wait` keeps the head back until `response_body` says otherwise (at most 16 KiB of body are kept back; past
        that the head is sent on)."""
        ...

    def response_body(self, chunk: bytes) -> Verdict:
        """Called for each chunk; its verdict counts only while the head is kept back."""
        ...

    def response_end(self) -> Verdict:
        """The body is whole. `retry` is possible only while the head is kept back."""
        ...


class Exchange(Protocol):
    """One request, as the handler holds it. Implemented by the relay."""

    id: int  # unique for the life of the process
    head: RequestHead
    meter: Meter | None  # set by the handler in `opened`; None: the bytes pass unwatched

    def place(self, replica: str) -> None:
        """Relay to this replica's base URL. Ignored when the client has gone."""
        ...

    def reject(self, error: TidegateError) -> None:
        """Answer with the error; `ended` is not called for it."""
        ...

    def name_session(self, session: bytes) -> None:
        """The replica is told of it in X-Session-ID, a header that the client did not send. Before `place`."""
        ...

    def recall(self, error: ReplicaError) -> None:
        """The replica will not answer: leave it, as if it had failed now. Ignored once its response has begun."""
        ...


class Handler(Protocol):
    """What the data path asks and tells. Implemented by the server's driver."""

    def route(self, head: RequestHead) -> AsgiApp | None:
        """An ASGI app for a path that the gate answers itself, or None: relay it."""
        ...

    def wants_body(self, head: RequestHead) -> bool:
        """Whether `opened` needs the whole body (up to `http.max_body_bytes`; else a 413)."""
        ...

    def opened(self, exchange: Exchange, body: bytes | None) -> None: ...

    def returned(self, exchange: Exchange, replica: str, error: TidegateError) -> None:
        """`replica` failed, or the meter said `retry`, before any byte went to the client."""
        ...

    def ended(self, exchange: Exchange, outcome: Outcome, error: TidegateError | None) -> None: ...
