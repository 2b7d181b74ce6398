"""The engine's HTTP surface: which path is answered by whom."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import structlog

from tidegate.engine import (
    control,
    info,
    messages,
    openai,
    plugin,
    responses,
    sglang,
    sglang_control,
    sglang_metrics,
    token_api,
)
from tidegate.engine.core import EngineCore
from tidegate.engine.http import Call, Message, Receive, Refusal, Scope, Send
from tidegate.engine.http_counts import HttpCounts
from tidegate.engine.kv_events import KvEventPublisher
from tidegate.engine.metrics import CONTENT_TYPE, registry_of, render
from tidegate.errors import RequestError

Endpoint: TypeAlias = Callable[[EngineCore, Call], Awaitable[None]]

_log = structlog.get_logger()

INFERENCE: dict[str, Endpoint] = {
    "/v1/chat/completions": openai.chat,
    "/v1/completions": openai.completions,
    "/v1/responses": responses.create,
    "/v1/messages": messages.create,
    "/inference/v1/generate": token_api.generate,
    "/generate": sglang.generate,
}
_SGLANG_INFERENCE = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/generate")
ROUTES: dict[str, dict[tuple[str, str], Endpoint]] = {
    "vllm": {
        **{("POST", path): endpoint for path, endpoint in INFERENCE.items()},
        **info.ROUTES,
        **control.ROUTES,
    },
    "sglang": {
        **{("POST", path): INFERENCE[path] for path in _SGLANG_INFERENCE},
        **sglang_control.ROUTES,
    },
}


class EngineApp:
    def __init__(self, core: EngineCore, events: KvEventPublisher | None) -> None:
        self.core = core
        self._events = events
        self._http = HttpCounts()
        self._is_vllm = core.config.dialect == "vllm"
        self._registry = registry_of(core, self._http) if self._is_vllm else sglang_metrics.registry_of(core)
        self._routes = ROUTES[core.config.dialect]
        self._paths = frozenset(path for _, path in self._routes)
        self._plugin = plugin.plugin_app(core.plugin) if core.plugin is not None and self._is_vllm else None
        self._load = 0  # inference requests being answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if self._plugin is not None and scope["path"].startswith(plugin.PREFIX):
            await self._plugin(scope, receive, send)
            return
        call = Call(scope, receive, send)
        known = call.path in self._paths or call.path in ("/metrics", "/load", "/kv_event_sources")
        try:
            await self._answer(call)
        except RequestError as error:
            await call.refuse(error)
        except Exception as error:
            _log.exception("endpoint failed", path=call.path)
            if not call.status:
                await call.refuse(Refusal(str(error), status=500, kind="InternalServerError"))
            raise
        finally:
            self._http.answered(call.path if known else "none", call.method, call.status or 499)

    async def _answer(self, call: Call) -> None:
        endpoint = self._routes.get((call.method, call.path))
        if endpoint is None:
            await self._special(call)
        elif call.path in INFERENCE:
            self._load += 1
            try:
                await endpoint(self.core, call)
            finally:
                self._load -= 1
        else:
            await endpoint(self.core, call)

    async def _special(self, call: Call) -> None:
        """What needs more than the core, and what is unknown."""
        match call.method, call.path:
            case "GET", "/metrics" | "/metrics/":
                await call.raw(200, render(self._registry), [(b"content-type", CONTENT_TYPE)])
            case "GET", "/load" if self._is_vllm:
                await call.json({"server_load": self._load})
            case "GET", "/kv_event_sources" if self._is_vllm:
                await call.json({} if self._events is None else {"0": self._events.describe()})
            case _:
                if call.path in self._paths:
                    await call.json({"detail": "Method Not Allowed"}, status=405)
                else:
                    await call.json({"detail": "Not Found"}, status=404)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message: Message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
