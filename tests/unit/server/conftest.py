from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
from tests.unit.server.exchanges import A, B, Shell
from tests.unit.server.live import config

from tidegate.engine.config import EngineConfig
from tidegate.engine.server import EngineServer
from tidegate.server.gate import Gate


@pytest.fixture
async def engines() -> AsyncIterator[list[EngineServer]]:
    config = EngineConfig(kv_tokens=8192, time_scale=50.0)
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(EngineServer(config)) for _ in range(2)]


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


@pytest.fixture
async def gate(engines: list[EngineServer]) -> AsyncIterator[Gate]:
    async with Gate(config(*(engine.url for engine in engines))) as gate:
        await gate.replicas.wait_probed()
        yield gate


@pytest.fixture
def shell() -> Shell:
    shell = Shell()
    shell.add(A, B)
    return shell
