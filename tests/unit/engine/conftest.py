"""Engines in this process, on free ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from tidegate.engine.config import EngineConfig
from tidegate.engine.server import EngineServer

StartEngine = Callable[..., Awaitable[EngineServer]]

FAST = 2000.0  # model seconds in a second: a test does not wait for the model
FROZEN = 0.01  # a step of the model takes seconds: whatever is sent stays in flight


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    async with AsyncExitStack() as stack:

        async def start(**changes: Any) -> EngineServer:
            settings: dict[str, Any] = {"time_scale": FAST, "kv_tokens": 16_384, "served_model_name": "m", **changes}
            return await stack.enter_async_context(EngineServer(EngineConfig(**settings)))

        yield start


@pytest.fixture
async def engine(start_engine: StartEngine) -> EngineServer:
    return await start_engine()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for is the engine's own state
            await asyncio.sleep(0.005)


class Http:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(self, url: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        async with self.session.post(url, json=body, **options) as response:
            return response.status, await response.json(content_type=None)

    async def get(self, url: str) -> tuple[int, Any]:
        async with self.session.get(url) as response:
            return response.status, await response.json(content_type=None)

    async def text(self, url: str) -> str:
        async with self.session.get(url) as response:
            return await response.text()

    async def metric(self, engine: EngineServer, name: str) -> float:
        """The sum of a metric's series."""
        lines = (await self.text(f"{engine.url}/metrics")).splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert values, f"no {name}"
        return sum(values)


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with aiohttp.ClientSession() as session:
        yield Http(session)
