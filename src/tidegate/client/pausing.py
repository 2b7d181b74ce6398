"""Pausing around a weight update: no session starts while the pool is paused, and the trainer is told.

Paused is the trainer's own `pause()`, or what the gate says: in a worker process that starts rollouts, somebody else
pauses. `on_pause` is called once when it begins, `on_resume` once when it ends, by whomever.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from tidegate.client.errors import GateError
from tidegate.client.gate_api import GateApi
from tidegate.client.limiter import Limiter

log = logging.getLogger("tidegate.client")

Callback: TypeAlias = Callable[[], Awaitable[None] | None]


class Pausing:
    def __init__(
        self, gate: GateApi | None, limiter: Limiter, on_pause: Callback | None, on_resume: Callback | None
    ) -> None:
        self._gate = gate
        self._limiter = limiter
        self._on_pause = on_pause
        self._on_resume = on_resume
        self._own = False
        self._observed = False

    @property
    def paused(self) -> bool:
        return self._own or self._observed

    async def pause(self, path: str, mode: str | None) -> None:
        """When it fails, some replicas may be paused: it stays paused here, until `resume` or another try."""
        before = self.paused
        self._own = True
        self._limiter.pause()
        if not before:
            await _call(self._on_pause)
        if self._gate is not None:
            query = None if mode is None else {"mode": mode}
            await self._gate.call("POST", path, query=query, body={}, timeout_s=None)

    async def resume(self, path: str) -> None:
        """If the gate does not do it, it stays paused here too, and may be tried again."""
        if not self.paused:
            return
        if self._gate is not None:
            await self._gate.call("POST", path, body={}, timeout_s=None)
        self._own = self._observed = False
        self._limiter.resume()
        await _call(self._on_resume)

    async def observe(self, paused: bool) -> None:
        """What the gate says. While the pause is our own, it is ours to end."""
        if self._own or paused == self._observed:
            return
        self._observed = paused
        (self._limiter.pause if paused else self._limiter.resume)()
        try:
            await _call(self._on_pause if paused else self._on_resume)
        except Exception:
            log.exception("%s failed", "on_pause" if paused else "on_resume")

    async def update_weights(self, path: str, body: Any) -> Any:
        if self._gate is None:
            raise GateError("without a gate there is nobody to pass a weight update on")
        return await self._gate.call("POST", path, body=body, timeout_s=None)


async def _call(callback: Callback | None) -> None:
    if callback is not None:
        made = callback()
        if inspect.isawaitable(made):
            await made
