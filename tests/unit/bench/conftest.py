from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.unit.bench.stand_in import StandIn


@pytest.fixture
async def stand_in() -> AsyncIterator[StandIn]:
    engine = StandIn()
    await engine.start()
    yield engine
    await engine.stop()
