"""A gate with a scripted handler, and raw peers on both of its sides.

Every gate is checked at the end of its test: each opened exchange that was not rejected has ended exactly once, and
no exchange, connection or kept byte is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import h11
import pytest
import uvloop

from tidegate.config.tree import HttpConfig
from tidegate.errors import TidegateError
from tidegate.proxy.relay import Listener, serve
from tidegate.proxy.seam import AsgiApp, Exchange, Meter, RequestHead
from tidegate.types import Outcome


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the gate runs on."""
    return {"uvloop": uvloop.new_event_loop}


class ScriptedHandler:
    """Places on the first of `replicas`, then on the next for each one returned; holds when `hold` is set."""

    def __init__(self, *replicas: str) -> None:
        self.replicas = list(replicas)
        self.hold = False
        self.app: AsgiApp | None = None
        self.meter: Callable[[], Meter] | None = None
        self.whole_bodies = False
        self.opened_ids: list[int] = []
        self.rejected_ids: list[int] = []
        self.ended_ids: list[int] = []
        self.held: list[Exchange] = []
        self.bodies: list[bytes | None] = []
        self.returns: list[tuple[str, str]] = []
        self.ends: list[tuple[Outcome, str | None]] = []
        self.changed = asyncio.Event()

    def route(self, head: RequestHead) -> AsgiApp | None:
        return self.app if head.path.startswith("/app") else None

    def wants_body(self, head: RequestHead) -> bool:
        return self.whole_bodies

    def opened(self, exchange: Exchange, body: bytes | None) -> None:
        self.opened_ids.append(exchange.id)
        self.bodies.append(body)
        if self.meter is not None:
            exchange.meter = self.meter()
        if self.hold:
            self.held.append(exchange)
        else:
            exchange.place(self.replicas[0])
        self.changed.set()

    def returned(self, exchange: Exchange, replica: str, error: TidegateError) -> None:
        self.returns.append((replica, error.reason))
        after = self.replicas.index(replica) + 1
        if after < len(self.replicas):
            exchange.place(self.replicas[after])
        else:
            self.reject(exchange, error)
        self.changed.set()

    def reject(self, exchange: Exchange, error: TidegateError) -> None:
        self.rejected_ids.append(exchange.id)
        exchange.reject(error)

    def ended(self, exchange: Exchange, outcome: Outcome, error: TidegateError | None) -> None:
        self.ended_ids.append(exchange.id)
        self.ends.append((outcome, error.reason if error else None))
        self.changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def check(self) -> None:
        assert Counter(self.opened_ids) == Counter(self.rejected_ids) + Counter(self.ended_ids)
        assert all(count == 1 for count in Counter(self.ended_ids).values())


Script = Callable[["ReplicaSide", int], Awaitable[None]]


class ReplicaSide:
    """One connection as a replica sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def request(self) -> tuple[bytes, bytes]:
        """Head and decoded body, read by h11."""
        machine = h11.Connection(h11.SERVER)
        head = await self.head()
        machine.receive_data(head)
        body = b""
        while True:
            event = machine.next_event()
            if event is h11.NEED_DATA:
                data = await self.reader.read(65536)
                if not data:
                    raise asyncio.IncompleteReadError(body, None)
                machine.receive_data(data)
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return head, body

    def send(self, data: bytes) -> None:
        if not self.writer.is_closing():
            self.writer.write(data)

    async def gone(self) -> None:
        """Until the gate has closed the connection."""
        async with asyncio.timeout(10):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass

    def reset(self) -> None:
        self.writer.transport.abort()


@dataclass
class Replica:
    url: str
    server: asyncio.Server
    connections: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    seen: list[tuple[bytes, bytes]] = field(default_factory=list)  # requests, for scripts that note them


@dataclass
class Reply:
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    http_version: bytes

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


class ClientSide:
    """One connection as a client sees it; replies are read by h11."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.machine = h11.Connection(h11.CLIENT)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self, method: bytes = b"GET") -> Reply:
        """The next whole response. Raises RemoteProtocolError for one that is cut short."""
        rest, closed = self.machine.trailing_data
        self.machine = h11.Connection(h11.CLIENT)
        self.machine.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        self.machine.send(h11.EndOfMessage())
        if rest:
            self.machine.receive_data(rest)
        if closed:
            self.machine.receive_data(b"")
        head, body = None, bytearray()
        async with asyncio.timeout(10):
            while True:
                event = self.machine.next_event()
                if event is h11.NEED_DATA:
                    try:
                        data = await self.reader.read(65536)
                    except ConnectionError as error:
                        raise h11.RemoteProtocolError(str(error)) from None
                    self.machine.receive_data(data)
                elif isinstance(event, h11.Response):
                    head = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    assert head is not None
                    return Reply(head.status_code, list(head.headers.raw_items()), bytes(body), head.http_version)
                elif isinstance(event, h11.ConnectionClosed):
                    raise h11.RemoteProtocolError("closed without a response")

    async def rest(self) -> bytes:
        """All that comes until the gate closes."""
        async with asyncio.timeout(10):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def close(self) -> None:
        self.writer.transport.abort()
        await asyncio.sleep(0)


class Bench:
    """What a test builds its peers with."""

    def __init__(self) -> None:
        self.listeners: list[tuple[Listener, ScriptedHandler]] = []
        self.replicas: list[Replica] = []
        self.clients: list[ClientSide] = []
        self.sockets = contextlib.ExitStack()

    async def gate(self, handler: ScriptedHandler, **config: object) -> Listener:
        listener = await serve(handler, HttpConfig(**config))  # type: ignore[arg-type]
        self.listeners.append((listener, handler))
        return listener

    async def replica(self, script: Script) -> Replica:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            replica.tasks.add(task)
            number, replica.connections = replica.connections, replica.connections + 1
            try:
                await script(ReplicaSide(reader, writer), number)
            except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                pass
            finally:
                replica.tasks.discard(task)
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        replica = Replica(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", server)
        self.replicas.append(replica)
        return replica

    @contextlib.contextmanager
    def silent_port(self) -> Iterator[str]:
        """Connecting to it hangs: its accept queue is full."""
        with socket.socket() as listening, contextlib.ExitStack() as stack:
            listening.bind(("127.0.0.1", 0))
            listening.listen(0)
            for _ in range(3):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    filler.connect(listening.getsockname())
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"

    def closed_port(self) -> str:
        """Connecting to it is refused: it is taken, and nobody listens."""
        sock = self.sockets.enter_context(socket.socket())
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"

    async def echo(self) -> Replica:
        """Answers each request with its body, and notes it."""

        async def script(side: ReplicaSide, number: int) -> None:
            while True:
                head, body = await side.request()
                replica.seen.append((head, body))
                side.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

        replica = await self.replica(script)
        return replica

    async def client(self, listener: Listener) -> ClientSide:
        client = ClientSide(*await asyncio.open_connection("127.0.0.1", listener.port))
        self.clients.append(client)
        return client

    async def end(self) -> None:
        self.sockets.close()
        for client in self.clients:
            await client.close()
        for listener, handler in self.listeners:
            await listener.close()
            for _ in range(100):  # the transports' own closing takes a few turns of the loop
                await asyncio.sleep(0)
            assert listener.connections == listener.pool.open_connections == 0
            assert listener.exchanges == 0
            assert listener.replay_bytes == 0
            handler.check()
        for replica in self.replicas:
            replica.server.close()
            for task in list(replica.tasks):
                task.cancel()
            if replica.tasks:
                await asyncio.wait(replica.tasks)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    built = Bench()
    yield built
    await built.end()


@pytest.fixture
def handler_type() -> type[ScriptedHandler]:
    return ScriptedHandler
