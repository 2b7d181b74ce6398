"""Clean-up that has to await is done although its task is cancelled, within a bound, and the cancellation is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def finish_first(cleanup: Coroutine[Any, Any, None], within_s: float) -> None:
    """Run to its end, or until the time is over. A cancellation that comes meanwhile is raised after it, as is what the
    clean-up itself raised. It runs in a task of its own, so a cancelled scope around us (anyio cancels again and again)
    does not reach it."""
    task = asyncio.create_task(cleanup)
    deadline_s = asyncio.get_running_loop().time() + within_s
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        left_s = deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            task.cancel()
        try:
            await asyncio.wait({task}, timeout=max(0.0, left_s) or None)
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen; the cancellation is what counts
        raise cancelled
    if not task.cancelled():
        task.result()
