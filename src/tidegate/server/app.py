"""The gate's own routes, as one Starlette application on the same port. The relay's path does not pass through it.

    GET /health     the process lives           GET /readiness   200 if a replica is usable, else 503 with reasons
    GET /liveness   the same as /health         GET /state       everything, as JSON
    GET /metrics    the gate's own metrics          GET /advice      sessions that a trainer should have in flight

beside the sessions API, the workers API and the control calls. `Routes` answers, for each request off the inference
paths, whether it is one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tidegate.errors import TidegateError
from tidegate.observe.metrics import exposition
from tidegate.proxy.paths import normalised
from tidegate.proxy.seam import AsgiApp, RequestHead
from tidegate.server.answers import answer, error_response
from tidegate.types import Advice

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StatusApi:
    def __init__(
        self,
        registry: CollectorRegistry,
        readiness: Callable[[], dict[str, Any]],
        state: Callable[[], dict[str, Any]],
        advice: Callable[[], Advice],
    ) -> None:
        self._registry = registry
        self._readiness = readiness
        self._state = state
        self._advice = advice

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/liveness", self.health, methods=["GET"]),
            Route("/readiness", self.readiness, methods=["GET"]),
            Route("/state", self.state, methods=["GET"]),
            Route("/advice", self.advice, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("OK")

    async def readiness(self, request: Request) -> Response:
        found = self._readiness()
        return answer(found, 200 if found["status"] == "ready" else 503)

    async def state(self, request: Request) -> Response:
        return answer(self._state())

    async def advice(self, request: Request) -> Response:
        return answer(self._advice())

    async def metrics(self, request: Request) -> Response:
        return Response(exposition(self._registry), media_type=METRICS_CONTENT_TYPE)


class Routes:
    """Which requests the gate answers itself: by path and method, so that the rest of a path's methods pass."""

    def __init__(self, routes: list[Route], on_fault: Callable[[], None] = lambda: None) -> None:
        """`on_fault` is told of exceptions that are no answer; the data path logs them."""

        def fault(request: Request, exc: Exception) -> Response:
            on_fault()
            return error_response(request, exc)

        handlers = {TidegateError: error_response, HTTPException: error_response, Exception: fault}
        self.app = Starlette(routes=routes, exception_handlers=handlers)
        self._methods: dict[str, set[str]] = {}
        self._prefixes: dict[str, set[str]] = {}
        for route in routes:
            prefix, parameter, _ = route.path.partition("{")
            table = self._prefixes if parameter else self._methods
            table.setdefault(prefix, set()).update(route.methods or ())

    def __call__(self, head: RequestHead) -> AsgiApp | None:
        methods = self._methods.get(head.path)
        if methods is None and (known := normalised(head.path)) in self._methods:
            head.path, methods = known, self._methods[known]
        if methods is None:
            for prefix, found in self._prefixes.items():
                if head.path.startswith(prefix):
                    methods = found
        return self.app if methods is not None and head.method in methods else None
