"""Keep-alive connections to each replica.

An exchange takes an idle connection (the last one put back, whose congestion window is warm) or opens one. A connection
serves one exchange at a time and is put back only after a whole response to a wholly sent request. Idle connections are
closed before the replica would do it; bytes or an end on an idle one close it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tidegate.config.tree import HttpConfig
from tidegate.errors import ReplicaError
from tidegate.open_files import out_of_files
from tidegate.proxy.http1_client import UpstreamConnection
from tidegate.proxy.outbox import Outbox

if TYPE_CHECKING:
    from tidegate.types import ReplicaId


UNSENT = frozenset({"connect_failed", "connect_timeout"})  # reasons of errors of requests that no replica has seen


STARVED_S = 0.25  # between two tries to open a connection that no file was left for
STARVED_LOG_S = 10.0

log = logging.getLogger("tidegate.proxy")


class ReplicaPool:
    """The connections to one replica."""

    __slots__ = ("connections", "forgotten", "head_prefix", "host", "idle", "port", "prefix", "tls", "url")

    def __init__(self, url: ReplicaId, added_headers: bytes = b"") -> None:
        """Raises ValueError for a URL that is not http(s)://host[:port][/prefix]."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"not a replica URL: {url!r}")
        self.url = url
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.host = parts.hostname
        self.port = parts.port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/").encode("ascii")
        authority = parts.netloc.rpartition("@")[2].encode("idna" if not parts.netloc.isascii() else "ascii")
        self.head_prefix = b" HTTP/1.1\r\nHost: " + authority + b"\r\n" + added_headers
        self.idle: list[UpstreamConnection] = []
        self.connections: set[UpstreamConnection] = set()
        self.forgotten = False


class Pool:
    def __init__(self, config: HttpConfig, added_headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """`added_headers` go with each request to a replica."""
        self.config = config
        self._added_headers = b"".join(b"%b: %b\r\n" % header for header in added_headers)
        self.outbox = Outbox(asyncio.get_running_loop())
        self.now_s = time.monotonic()  # coarse: moved by `sweep`
        self.opened = 0  # connections opened, since the start
        self.reused = 0  # exchanges that found an idle connection
        self.failed = 0  # attempts to connect that failed
        self.starved = 0  # for want of open files; they are made again
        self.starved_s: float | None = None  # the last time
        self.bytes_in = 0
        self.bytes_out = 0
        self._replicas: dict[ReplicaId, ReplicaPool] = {}

    def replica(self, url: ReplicaId) -> ReplicaPool:
        replica = self._replicas.get(url)
        if replica is None:
            replica = self._replicas[url] = ReplicaPool(url, self._added_headers)
        return replica

    @property
    def open_connections(self) -> int:
        return sum(len(replica.connections) for replica in self._replicas.values())

    @property
    def idle_connections(self) -> int:
        return sum(len(replica.idle) for replica in self._replicas.values())

    def take(self, replica: ReplicaPool) -> UpstreamConnection | None:
        """An idle connection that is still good."""
        idle = replica.idle
        while idle:
            connection = idle.pop()
            if connection.idle_since_s + self.config.upstream_keep_alive_s > self.now_s and not connection.closed:
                self.reused += 1
                connection.reused = True
                return connection
            connection.abort()
        return None

    async def connect(self, replica: ReplicaPool) -> UpstreamConnection:
        """A new connection. Raises ReplicaError: connect_failed or connect_timeout. Where this process has no file left
        for it, it waits for one: that says nothing of the replica."""
        while True:
            try:
                return await self._connect(replica)
            except OSError as error:
                self._starved(error)
                await asyncio.sleep(STARVED_S)

    def _starved(self, error: OSError) -> None:
        if self.starved_s is None or self.now_s - self.starved_s > STARVED_LOG_S:
            log.error("no open file left for a connection to a replica: %s", error)
        self.starved += 1
        self.starved_s = self.now_s
        for replica in self._replicas.values():
            for connection in replica.idle[:]:  # each is a file that somebody waits for
                connection.abort()
            replica.idle.clear()

    async def _connect(self, replica: ReplicaPool) -> UpstreamConnection:
        """Raises OSError for a limit of our own."""
        loop = asyncio.get_running_loop()
        connection = UpstreamConnection(self, replica)
        factory: Any = lambda: connection  # noqa: E731 - Any: it is no subclass of asyncio.Protocol
        try:
            async with asyncio.timeout(self.config.connect_timeout_s):
                await loop.create_connection(factory, replica.host, replica.port, ssl=replica.tls)
        except (OSError, asyncio.CancelledError) as error:  # OSError: TimeoutError too
            connection.abort()  # it may still be made, in this very turn of the loop
            if isinstance(error, asyncio.CancelledError):
                raise
            if out_of_files(error):
                raise
            self.failed += 1
            if isinstance(error, TimeoutError):
                text = f"No connection to {replica.url} within {self.config.connect_timeout_s} s"
                raise ReplicaError(text, status=504, reason="connect_timeout") from None
            raise ReplicaError(f"No connection to {replica.url}: {error}", reason="connect_failed") from None
        self.opened += 1
        return connection

    def put_back(self, connection: UpstreamConnection) -> None:
        if connection.replica.forgotten or connection.closed:
            connection.abort()
            return
        connection.idle_since_s = self.now_s
        connection.replica.idle.append(connection)

    def forget(self, url: ReplicaId) -> None:
        """The replica left the pool: close idle connections now and busy ones after their exchange."""
        replica = self._replicas.pop(url, None)
        if replica is not None:
            replica.forgotten = True
            for connection in replica.idle[:]:
                connection.abort()
            replica.idle.clear()

    def sweep(self, now_s: float) -> None:
        """Close what has been idle, or silent while a response is owed, for too long."""
        self.now_s = now_s
        oldest_s = now_s - self.config.upstream_keep_alive_s
        for replica in self._replicas.values():
            idle = replica.idle
            while idle and idle[0].idle_since_s <= oldest_s:
                idle.pop(0).abort()
            if self.config.response_timeout_s is not None:
                for connection in list(replica.connections):
                    connection.check_silence(now_s - self.config.response_timeout_s)

    def close(self) -> None:
        for url in list(self._replicas):
            replica = self._replicas[url]
            self.forget(url)
            for connection in list(replica.connections):
                connection.abort()
