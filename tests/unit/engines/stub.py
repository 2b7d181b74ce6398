"""A tiny real HTTP server that answers as a replica would, and a ZMQ publisher that publishes as vLLM's does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from tidegate.clock import SystemClock
from tidegate.types import AnyEvent

PATIENCE_S = 20.0  # for what happens within milliseconds on an idle machine


class StubReplica:
    """Answers by path: a status and a body, or nothing until `release`."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {"/health": (200, "")}
        self.hanging: set[str] = set()
        self.calls: list[tuple[str, str, str, bytes]] = []
        self.headers: list[dict[str, str]] = []
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._release = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._release = asyncio.Event()
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        self._release.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def release(self) -> None:
        self.hanging.clear()
        self._release.set()
        self._release = asyncio.Event()

    def metrics(self, **values: float) -> None:
        """/metrics of vLLM's names: running=1 is vllm:num_requests_running 1."""
        names = {
            "running": "vllm:num_requests_running",
            "waiting": "vllm:num_requests_waiting",
            "prompt": "vllm:prompt_tokens_total",
            "cached": "vllm:prompt_tokens_cached_total",
            "generated": "vllm:generation_tokens_total",
            "started": "process_start_time_seconds",
        }
        lines = [f"{names.get(name, name)} {value}" for name, value in {"running": 0.0, **values}.items()]
        self.answers["/metrics"] = (200, "\n".join(lines) + "\n")

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.calls.append((request.method, request.path, request.rel_url.raw_query_string, body))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if request.path in self.hanging:
            await self._release.wait()
        status, text = self.answers.get(request.path, (404, '{"detail":"Not Found"}'))
        return web.Response(status=status, text=text, content_type="application/json" if text[:1] in "{[" else None)


@contextlib.asynccontextmanager
async def stub_replica() -> AsyncIterator[StubReplica]:
    replica = StubReplica()
    await replica.start()
    try:
        yield replica
    finally:
        await replica.stop()


async def eventually(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not check():  # noqa: ASYNC110 - what is watched is a real socket's other end
            await asyncio.sleep(0.01)


class Recorder:
    """A sink of events that can be waited on."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self._changed = asyncio.Event()

    def __call__(self, event: AnyEvent) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, holds: Callable[[AnyEvent], bool], *, after: int = 0) -> int:
        """The index of the first event from `after` on for which it holds; waits for it."""
        async with asyncio.timeout(PATIENCE_S):
            index = after
            while True:
                while index < len(self.events):
                    if holds(self.events[index]):
                        return index
                    index += 1
                self._changed.clear()
                await self._changed.wait()


class StubPublisher:
    """PUB and ROUTER sockets with vLLM's framing; keeps what it published for replay."""

    def __init__(self, *, topic: bytes = b"kv", topic_in_replay: bool = True) -> None:
        self.topic = topic
        self.topic_in_replay = topic_in_replay
        self.history: list[tuple[int, bytes]] = []
        self.dropped_once: set[int] = set()  # numbers that the next replay leaves out
        self.replays: list[int] = []
        context = zmq.asyncio.Context.instance()
        self.pub = context.socket(zmq.PUB)
        self.router = context.socket(zmq.ROUTER)
        for socket in (self.pub, self.router):
            socket.setsockopt(zmq.LINGER, 0)
        self.port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self._task = asyncio.create_task(self._serve_replays())

    def remember(self, seq: int, ts_s: float, *events: dict[str, Any]) -> None:
        """As published before anybody subscribed."""
        self.history.append((seq, msgspec.msgpack.encode([ts_s, list(events), 0])))

    async def publish(self, seq: int, ts_s: float, *events: dict[str, Any]) -> None:
        self.remember(seq, ts_s, *events)
        await self.send(seq)

    async def send(self, seq: int) -> None:
        payload = dict(self.history)[seq]
        await self.pub.send_multipart([self.topic, seq.to_bytes(8, "big"), payload])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.pub.close()
        self.router.close()

    async def _serve_replays(self) -> None:
        topic = [self.topic] if self.topic_in_replay else []
        while True:
            identity, _, first = await self.router.recv_multipart()
            self.replays.append(int.from_bytes(first, "big"))
            skipped, self.dropped_once = self.dropped_once, set()
            for seq, payload in self.history:
                if seq >= int.from_bytes(first, "big") and seq not in skipped:
                    await self.router.send_multipart([identity, b"", *topic, seq.to_bytes(8, "big"), payload])
            marker = [b""] if topic else []
            end = (-1).to_bytes(8, "big", signed=True)
            await self.router.send_multipart([identity, b"", *marker, end, b""])


@contextlib.asynccontextmanager
async def stub_publisher(**options: Any) -> AsyncIterator[StubPublisher]:
    publisher = StubPublisher(**options)
    try:
        yield publisher
    finally:
        await publisher.close()


def store(*hashes: int, session: str = "s", parent: int | None = None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": [1] * 16 * len(hashes),
        "block_size": 16,
        "medium": "GPU",
        "session_id": session,
    }


CLOCK = SystemClock()
