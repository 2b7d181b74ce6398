"""Waiting for something to become true: polled up to a deadline, never slept for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.02
PATIENCE_S = 60.0  # an upper bound on a loaded machine, not an expectation


async def until(probe: Callable[[], Awaitable[T]], accept: Callable[[T], bool], within_s: float = PATIENCE_S) -> T:
    """The first value of `probe` that `accept` takes."""
    deadline = time.monotonic() + within_s
    while True:
        value = await probe()
        if accept(value):
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:.0f} s; last seen: {value!r}")
        await asyncio.sleep(POLL_S)
