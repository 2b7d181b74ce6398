"""Which engine answers at a URL. Every question may fail or hang for its timeout; the answer then is None, and the
replica is used all the same.

Asked in this order, the cheap and common first: the names in /metrics; /server_info (SGLang, and vLLM in development
mode); /get_server_info (SGLang before 0.5.4); /version (vLLM).
"""

from __future__ import annotations

from typing import Any

import aiohttp

from tidegate.engines.base import EngineAdapter, EngineName
from tidegate.engines.control import call
from tidegate.engines.sglang import SglangAdapter
from tidegate.engines.vllm import VllmAdapter
from tidegate.types import ReplicaId

ADAPTERS: dict[EngineName, EngineAdapter] = {"vllm": VllmAdapter(), "sglang": SglangAdapter()}
DEFAULT: EngineAdapter = ADAPTERS["vllm"]  # for what must be asked before it is known

METRIC_NAMES = frozenset(name for adapter in ADAPTERS.values() for name in adapter.metric_names)


def by_metrics(text: str) -> EngineAdapter | None:
    """By the prefix of the metric names in the text."""
    for adapter in ADAPTERS.values():
        if text.startswith(adapter.metrics_prefix) or f"\n{adapter.metrics_prefix}" in text:
            return adapter
    return None


async def detect(session: aiohttp.ClientSession, url: ReplicaId, timeout_s: float = 5.0) -> EngineAdapter | None:
    async def ask(path: str) -> Any:
        result = await call(session, url, "GET", path, timeout_s=timeout_s)
        return result.body if result.status == 200 else None

    metrics = await ask("/metrics")
    if isinstance(metrics, str) and (adapter := by_metrics(metrics)):
        return adapter
    for path in ("/server_info", "/get_server_info"):
        info = await ask(path)
        if isinstance(info, dict):
            return ADAPTERS["vllm" if "vllm_config" in info else "sglang"]
    version = await ask("/version")
    return ADAPTERS["vllm"] if isinstance(version, dict) and "version" in version else None
