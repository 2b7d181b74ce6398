"""The data path as a whole: a listening socket, its connections, their time limits, and the pool behind them.

    listener = await serve(handler, config.http, "0.0.0.0", 8000)
    ...
    await listener.drain(30.0)

Deadlines are kept as plain numbers on the connections and looked at once per tick: no timer is made or cancelled for a
request. They are therefore late by up to a tick, at most one second.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

from tidegate.config.tree import HttpConfig
from tidegate.proxy import allocator
from tidegate.proxy.asgi import AsgiExchange
from tidegate.proxy.exchange import RelayExchange
from tidegate.proxy.hangup import HangupWatch
from tidegate.proxy.http1_head import RequestLines
from tidegate.proxy.http1_server import LINGER_S, ClientConnection, Stream
from tidegate.proxy.keepalive import probe_when_silent
from tidegate.proxy.pool import Pool
from tidegate.proxy.seam import Chunk, Handler, RequestHead

TICK_MAX_S = 1.0
TICKS_PER_TIMEOUT = 4  # a short time limit (tests) is late by a quarter of itself at most
BACKLOG = 4096  # a trainer opens thousands of connections at once


class Listener:
    """Counters count since the start, but for `connections` and `exchanges`, which are open now."""

    def __init__(self, handler: Handler, config: HttpConfig, pool: Pool) -> None:
        self.handler = handler
        self.config = config
        self.pool = pool
        self.outbox = pool.outbox
        self.now_s = time.monotonic()  # coarse: moved by each tick
        self.draining = False
        self.connections_total = 0
        self.refused_total = 0  # connections over the limit
        self.exchanges = 0
        self.exchanges_total = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.replay_bytes = 0  # request bytes kept for another try, now
        self.hangups = HangupWatch(asyncio.get_running_loop())
        self.asgi_tasks: set[asyncio.Task[None]] = set()
        self._connections: set[ClientConnection] = set()
        self._quiet = asyncio.Event()  # set when no exchange is open any more, while draining
        self._alone = asyncio.Event()  # set when no client is connected
        self._alone.set()
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.TimerHandle | None = None
        limits = (config.header_timeout_s, config.body_timeout_s, config.keep_alive_s, config.upstream_keep_alive_s)
        self._tick_s = min(TICK_MAX_S, min((*limits, config.response_timeout_s or TICK_MAX_S)) / TICKS_PER_TIMEOUT)

    # --- addresses ----------------------------------------------------------------------------------------------
    @property
    def addresses(self) -> list[tuple[str, int]]:
        server: Any = self._server  # Any: uvloop's has a list of sockets where asyncio's has a tuple
        return [sock.getsockname()[:2] for sock in server.sockets] if server is not None else []

    @property
    def port(self) -> int:
        return self.addresses[0][1]

    @property
    def connections(self) -> int:
        return len(self._connections)

    # --- what connections and exchanges tell ----------------------------------------------------------------------
    def connected(self, connection: ClientConnection) -> bool:
        """Whether it may be served."""
        probe_when_silent(connection.transport)
        self._connections.add(connection)
        self._alone.clear()
        self.connections_total += 1
        if len(self._connections) > self.config.max_connections:
            self.refused_total += 1
            return False
        return True

    def disconnected(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._alone.set()
        self.hangups.forget(connection)

    def stream(self, connection: ClientConnection, request: RequestLines, body: Chunk, complete: bool) -> Stream:
        """What answers the request; `body` is what came with its head."""
        length = request.length
        head = RequestHead(request.method, request.target, request.headers, length if length > 0 else None)
        app = self.handler.route(head)
        self.exchanges += 1
        self.exchanges_total += 1
        if app is None:
            return RelayExchange(self, connection, head, request, body, complete)
        return AsgiExchange(self, connection, head, app, body, complete)

    def exchange_ended(self) -> None:
        self.exchanges -= 1
        if self.draining and not self.exchanges:
            self._quiet.set()

    # --- life ---------------------------------------------------------------------------------------------------
    async def start(self, host: str | None, port: int, sock: socket.socket | None) -> None:
        loop = asyncio.get_running_loop()
        accept: Any = lambda: ClientConnection(self)  # noqa: E731 - Any: it is no subclass of asyncio.Protocol
        if sock is not None:
            self._server = await loop.create_server(accept, sock=sock, backlog=BACKLOG)
        else:
            self._server = await loop.create_server(accept, host, port, backlog=BACKLOG)
        self._tick()

    def _tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(self._tick_s, self._tick)  # first: whatever fails below
        self.now_s = now_s = time.monotonic()
        overdue = [c for c in self._connections if c.read_deadline_s <= now_s or c.write_deadline_s <= now_s]
        for connection in overdue:
            connection.on_deadline()
        self.pool.sweep(now_s)

    async def drain(self, timeout_s: float) -> None:
        """Stop accepting, let the open exchanges end, then close. Those still open after `timeout_s` are aborted."""
        self.draining = True
        self._stop_accepting()
        for connection in list(self._connections):
            connection.close_if_idle()
        if self.exchanges:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), timeout_s)
        await self.close()

    def _stop_accepting(self) -> None:
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Abort what is open, and let go of everything. Idempotent. Answers that are written still go out, to clients
        that take them at once."""
        self.draining = True
        self._stop_accepting()
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        for task in list(self.asgi_tasks):
            task.cancel()
        for connection in list(self._connections):
            connection.shut()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._alone.wait(), LINGER_S)
        for connection in list(self._connections):
            connection.abort()
        await self._alone.wait()
        if self.asgi_tasks:
            await asyncio.wait(self.asgi_tasks)
        self.hangups.close()
        self.pool.close()


async def serve(
    handler: Handler,
    config: HttpConfig,
    host: str | None = "127.0.0.1",
    port: int = 0,
    *,
    pool: Pool | None = None,
    sock: socket.socket | None = None,
) -> Listener:
    """Listen and relay. `sock`: an already bound socket instead of host and port."""
    allocator.keep_freed_memory()
    listener = Listener(handler, config, pool or Pool(config))
    await listener.start(host, port, sock)
    return listener
