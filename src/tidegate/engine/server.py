"""The engine as a server: in this process (`async with EngineServer(config) as engine`), or for `tidegate engine`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import TracebackType

import uvicorn

from tidegate.engine.app import EngineApp
from tidegate.engine.config import EngineConfig
from tidegate.engine.core import EngineCore
from tidegate.engine.kv_events import KvEventPublisher
from tidegate.errors import ConfigError

_KEEP_ALIVE_S = 5  # vLLM's: clients that keep idle connections longer race with its closing


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business, not a server's: several run in one."""
        yield


class EngineServer:
    """Several can run in one event loop. Attributes are valid while it is entered."""

    url: str
    core: EngineCore
    events: KvEventPublisher | None

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._server: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EngineServer:
        listener = _listen(self.config.host, self.config.port)
        port = listener.getsockname()[1]
        self.url = f"http://{self.config.host}:{port}"
        try:
            self.events = self._publisher(port)
            self.core = EngineCore(self.config, None if self.events is None else self.events.publish)
        except BaseException:
            listener.close()
            raise
        server = _Uvicorn(
            uvicorn.Config(
                EngineApp(self.core, self.events),
                loop="none",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=2,
            )
        )
        self._server = server
        self._serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0)
        return self

    def _publisher(self, port: int) -> KvEventPublisher | None:
        config = self.config
        if config.kv_events_port is None:
            return None
        return KvEventPublisher(
            host=config.host,
            port=config.kv_events_port,
            replay_port=config.kv_events_replay_port,
            block_size=config.block_size,
            topic=config.kv_events_topic or f"kv@{config.host}:{port}@{config.served_model_name}",
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Running requests are aborted and answered, connections closed."""
        if self._server is None or self._serving is None:
            return
        self.core.close()
        self._server.should_exit = True
        await self._serving
        self._gone()

    async def drain(self) -> None:
        """What SIGTERM does: still answers, but new requests get an abort; returns when the running ones have ended."""
        await self.core.drain(self.config.shutdown_timeout_s)

    async def kill(self) -> None:
        """As if the process died: connections break in mid-answer, the port refuses."""
        if self._server is None or self._serving is None:
            return
        for listener in self._server.servers:
            listener.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._server.should_exit = self._server.force_exit = True
        await self._serving
        self.core.close()
        self._gone()

    def _gone(self) -> None:
        if self.events is not None:
            self.events.close()
        self._server = self._serving = None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}", reason="cannot_listen") from error
    return listener
