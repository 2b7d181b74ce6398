"""A plugin for vLLM: KV eviction by session. Install tidegate beside vLLM and start it with VLLM_PLUGINS=tidegate.

vLLM keeps a finished request's blocks in one LRU queue, whoever they belong to: those of a rollout that is over outlive
those of a rollout that waits for a tool, and take their place. The plugin remembers which blocks each session holds,
and gives the router a few calls (`endpoint`), which change nothing but the order of that queue:

    POST /tidegate/release   {"session_id": s} or {"session_ids": [..]}: what it alone holds is evicted first
    POST /tidegate/demote    the same: what it alone holds is evicted next, before anything of a session in use
    POST /tidegate/protect   the same: what it holds is evicted last, as if it had just been used
    GET  /tidegate/sessions  resident blocks by session
    GET  /tidegate/info      protocol, versions, whether it works here and why not

Nothing is pinned and nothing is thrown away before its room is needed, so a wrong call costs a recomputation and never
an answer. Both entry points are read by vLLM: `register` in each of its processes, `routes` in its API server. On a
vLLM that it does not know, the plugin says so once in vLLM's log and leaves the engine as it is.

Modules here are loaded into vLLM's processes: they import nothing of tidegate outside this package but its version, and
vLLM only when a function needs it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.integrations.vllm_plugin.endpoint import Endpoint

NAME = "tidegate"


def register() -> None:
    """Entry point of `vllm.general_plugins`. Without its routes the plugin is of no use, and vLLM adds routes only for
    plugins that VLLM_PLUGINS names: unless it is named, nothing is changed."""
    if NAME not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    from tidegate.integrations.vllm_plugin import engine

    engine.install()


def routes() -> Endpoint:
    """Entry point of `vllm.endpoint_plugins`."""
    from tidegate.integrations.vllm_plugin.endpoint import Endpoint

    return Endpoint()
