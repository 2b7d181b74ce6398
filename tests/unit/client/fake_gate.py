"""A gate that does what it is told and remembers what it was asked; it can be stopped and started at its address."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web


def advice(sessions: int, classes: dict[str, int] | None = None, **more: Any) -> dict[str, Any]:
    by_class = {name: {"sessions": number} for name, number in (classes or {}).items()}
    return {"sessions": sessions, "classes": by_class, "paused": False, "mixture_given": True, "reason": "x", **more}


class FakeGate:
    def __init__(self) -> None:
        self.port = 0
        self.advice: Any = advice(8)
        self.calls: list[tuple[str, str, Any]] = []  # method, path, body over query
        self.statuses: dict[str, int] = {}  # of paths that fail
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        text = await request.text()
        asked = {**(json.loads(text) if text else {}), **request.query}
        self.calls.append((request.method, request.path, asked))
        status = self.statuses.get(request.path, 200)
        if status != 200:
            return web.json_response({"error": {"message": "no", "code": "told_so"}}, status=status)
        return web.json_response(self.advice if request.path == "/advice" else {"status": "ok"})

    def asked(self, path: str) -> list[Any]:
        return [body for _, called, body in self.calls if called == path]

    @property
    def started(self) -> list[str]:
        return [body["session_id"] for body in self.asked("/start_session")]

    @property
    def finished(self) -> list[str]:
        return [body["session_id"] for body in self.asked("/finish_session")]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            if true():
                return
            await asyncio.sleep(0.005)
