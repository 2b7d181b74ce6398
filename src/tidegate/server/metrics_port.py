"""What the second port answers: GET /metrics and /health, nothing else."""

from __future__ import annotations

from collections.abc import Callable

from tidegate.errors import RequestError, TidegateError
from tidegate.proxy.seam import AsgiApp, Exchange, RequestHead
from tidegate.types import Outcome, ReplicaId

_PATHS = frozenset({"/metrics", "/health"})


class MetricsOnly:
    """Implements `proxy.seam.Handler`."""

    def __init__(self, router: Callable[[RequestHead], AsgiApp | None]) -> None:
        self._router = router

    def route(self, head: RequestHead) -> AsgiApp | None:
        return self._router(head) if head.path in _PATHS else None

    def wants_body(self, head: RequestHead) -> bool:
        return False

    def opened(self, exchange: Exchange, body: bytes | None) -> None:
        exchange.reject(RequestError("this port serves GET /metrics only", reason="not_found", status=404))

    def returned(self, exchange: Exchange, replica: ReplicaId, error: TidegateError) -> None:
        exchange.reject(error)

    def ended(self, exchange: Exchange, outcome: Outcome, error: TidegateError | None) -> None:
        pass
