from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.unit.client.fake_gate import FakeGate


@pytest.fixture
async def fake() -> AsyncIterator[FakeGate]:
    gate = FakeGate()
    await gate.start()
    yield gate
    await gate.stop()


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    """No test leaves a task of the scheduler's behind."""
    yield
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not [name for name in names if name == "advice" or name.startswith(("announce ", "finish "))]
