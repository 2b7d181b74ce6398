"""Imported beside stock verifiers: tells the router when a rollout starts and when it ends.

verifiers registers a session with its interception server when a rollout begins, and unregisters it on success, failure
and cancellation alike. These are the two places that this module wraps; nothing else changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
from verifiers.v1.interception.server import InterceptionServer

_register, _unregister = InterceptionServer.register, InterceptionServer.unregister
_calls: set[asyncio.Task[None]] = set()


def register(self: Any, session: Any) -> Any:
    registered = _register(self, session)
    _call(session, "/start_session", workload=session.trace.task.data.workload)
    return registered


def unregister(self: Any, model_secret: str, state_secret: str) -> None:
    session = self.sessions.get(model_secret)
    _unregister(self, model_secret, state_secret)
    if session is not None:
        _call(session, "/finish_session")


def _call(session: Any, path: str, **parameters: str) -> None:
    """In the background; a router that cannot be reached never fails a rollout."""
    root = session.ctx.client.base_url.rstrip("/").removesuffix("/v1")
    query = {"session_id": session.trace.id, **parameters}

    async def post() -> None:
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=5) as client:
                await client.post(root + path, params=query)

    task = asyncio.get_running_loop().create_task(post())
    _calls.add(task)
    task.add_done_callback(_calls.discard)


async def settled() -> None:
    """Until the calls made so far have been answered: a program that ends at once would cut the last ones."""
    await asyncio.gather(*_calls)


InterceptionServer.register, InterceptionServer.unregister = register, unregister
