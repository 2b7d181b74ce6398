"""A replica's counters, named after vLLM's metrics (without the `vllm:` prefix and the `_total` suffix)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.sim.replica import Request


class Counters:
    """`prompt_tokens` counts a prompt when its first token comes; `prompt_tokens_cached` is the part of it that was
    found in the cache at admission, so cached / prompt is the hit rate. `prefix_cache_queries` and `_hits` count at
    admission; a preempted request's second lookup is left out of all four, and shows as `recomputed_tokens`."""

    __slots__ = (
        "generation_tokens", "num_preemptions", "prefix_cache_hits", "prefix_cache_queries", "prompt_tokens",
        "prompt_tokens_cached", "recomputed_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.recomputed_tokens = 0  # computed again after a preemption

    def admitted(self, request: Request, hit_tokens: int) -> None:
        if request.preemptions:
            self.recomputed_tokens += request.tokens - hit_tokens
        else:
            self.prefix_cache_queries += request.tokens
            self.prefix_cache_hits += hit_tokens
        if request.cached_tokens is None:
            request.cached_tokens = hit_tokens

    def prefilled(self, request: Request) -> None:
        self.prompt_tokens += request.prompt_tokens
        self.prompt_tokens_cached += request.cached_tokens or 0
