"""tidegate's plugin for vLLM in the embedded engine: the plugin's own routes and books, over the simulated pool.

In SGLang's dialect it stands for --enable-session-radix-cache, whose sessions end with /close_session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

from starlette.applications import Starlette

from tidegate import __version__
from tidegate.engine.http import Receive, Scope, Send
from tidegate.integrations.vllm_plugin.calls import carry_out
from tidegate.integrations.vllm_plugin.endpoint import Endpoint
from tidegate.sim.replica import Replica
from tidegate.sim.session_blocks import SessionBlocks

AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

PREFIX = "/tidegate/"


class PluginEngine:
    """Stands for vLLM's engine core, and for the client that its API server has of it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._sessions = SessionBlocks(replica)
        self.release = self._sessions.release
        self.reset = self._sessions.reset

    async def call_utility_all_async(self, method: str, name: str, sessions: list[str] | None) -> list[dict[str, Any]]:
        if name == "info":
            return [self._info()]
        return [carry_out(self._sessions.retention, name, sessions, self._sessions.running())]

    def _info(self) -> dict[str, Any]:
        retention = self._sessions.retention
        caching = self._replica.config.enable_prefix_caching
        return {
            "off": None if caching else "prefix caching is off",
            "kv_cache_groups": 1,
            "blocks": self._replica.pool.num_blocks,
            "sessions": len(retention.sessions),
            "claims": retention.claims,
            "moved_blocks": dict(retention.counts),
        }


def plugin_app(engine: PluginEngine) -> AsgiApp:
    endpoint, app = Endpoint(), Starlette()
    endpoint.attach_router(app)
    endpoint.start(engine, f"{__version__}+tidegate")
    return cast("AsgiApp", app)  # Starlette's own types are wider
