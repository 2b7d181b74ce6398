"""Counts of answered requests, as vLLM's instrumentation has them: by path, method and status class."""

from __future__ import annotations

from collections import Counter

_LEFT_OUT = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})


class HttpCounts:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()

    def answered(self, path: str, method: str, status: int) -> None:
        if path not in _LEFT_OUT:
            self.requests[path, method, f"{status // 100}xx"] += 1
