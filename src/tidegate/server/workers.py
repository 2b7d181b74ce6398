"""The workers API, in vllm-router's shapes: trainers that start engines by themselves list them here.

    GET    /workers                     all, with health and load
    POST   /workers                     {"url": ...}
    GET    /workers/{url}               one
    DELETE /workers/{url}, /workers     by path (percent-encoded), query or JSON
    POST   /add_worker, /remove_worker  url=
    GET    /list_workers                {"urls": [...]}
    GET    /get_loads                   running requests by worker

Adding is idempotent and says how the replica is: it waits for the first answer for a few seconds, and adds it even if
none comes, since an engine may take minutes to load. It is used once it answers.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.clock import Clock
from tidegate.engines.discovery import normalise
from tidegate.errors import RequestError
from tidegate.policy.scheduler import Scheduler
from tidegate.server.answers import answer, read_fields, text_field
from tidegate.server.replicas import FIRST_PROBE_S, Replicas
from tidegate.server.retention import Retention
from tidegate.types import ReplicaId


class UnknownWorker(RequestError):
    status = 404
    reason = "unknown_worker"


class WorkersApi:
    def __init__(self, replicas: Replicas, retention: Retention, scheduler: Scheduler, clock: Clock) -> None:
        self._replicas = replicas
        self._retention = retention
        self._scheduler = scheduler
        self._clock = clock

    def routes(self) -> list[Route]:
        return [
            Route("/workers", self.list_all, methods=["GET"]),
            Route("/workers", self.add, methods=["POST"]),
            Route("/workers", self.remove, methods=["DELETE"]),
            Route("/workers/{url:path}", self.show, methods=["GET"]),
            Route("/workers/{url:path}", self.remove, methods=["DELETE"]),
            Route("/add_worker", self.add, methods=["POST"]),
            Route("/remove_worker", self.remove, methods=["POST"]),
            Route("/list_workers", self.list_urls, methods=["GET"]),
            Route("/get_loads", self.loads, methods=["GET"]),
        ]

    async def list_all(self, request: Request) -> Response:
        loads = self._loads()
        workers = [self._worker(url, loads) for url in self._replicas.urls]
        stats = {"prefill_count": 0, "decode_count": 0, "regular_count": len(workers)}
        return answer({"workers": workers, "total": len(workers), "stats": stats})

    async def show(self, request: Request) -> Response:
        url = await self._url(request)
        if url not in self._replicas:
            raise UnknownWorker(f"worker {url} is not listed")
        return answer(self._worker(url, self._loads()))

    async def add(self, request: Request) -> Response:
        url = await self._url(request)
        new = self._replicas.add(url)
        monitor = self._replicas.monitor(url)
        if new and monitor is not None:
            await monitor.wait_probed(FIRST_PROBE_S)
        message = f"Successfully added worker: {url}" if new else f"Worker {url} already exists"
        return answer({"success": True, "message": message, "worker": self._worker(url, self._loads())})

    async def remove(self, request: Request) -> Response:
        url = await self._url(request)
        known = self._replicas.remove(url)
        message = f"Worker {url} removed successfully" if known else f"Worker {url} was not listed"
        return answer({"success": True, "message": message, "known": known})

    async def list_urls(self, request: Request) -> Response:
        return answer({"urls": self._replicas.urls})

    async def loads(self, request: Request) -> Response:
        loads = self._loads()
        return answer({"workers": [{"worker": url, "load": loads.get(url, 0)} for url in self._replicas.urls]})

    async def _url(self, request: Request) -> ReplicaId:
        given = request.path_params.get("url")
        if given is None:
            given = text_field(await read_fields(request), "url", "worker_url")
        if given is None:
            raise RequestError("no worker URL: give url", reason="missing_worker_url", param="url")
        return normalise(unquote(given))

    def _worker(self, url: ReplicaId, loads: dict[ReplicaId, int]) -> dict[str, Any]:
        monitor = self._replicas.monitor(url)
        if monitor is None:  # removed by another call, in the meantime
            return {"url": url, "is_healthy": False, "state": "removed"}
        view = monitor.view()
        return {
            "url": url,
            "model_id": "unknown",
            "worker_type": "regular",
            "is_healthy": view.state.usable,
            "load": loads.get(url, 0),
            "connection_mode": "Http",
            "priority": 50,
            "cost": 1.0,
            "state": view.state,
            "reason": view.reason,
            "engine": view.engine,
            "plugin": msgspec.to_builtins(self._retention.view(url)),
            "error": None if view.state.usable else view.last_error,
        }

    def _loads(self) -> dict[ReplicaId, int]:
        """Running requests, by the ledger."""
        return {replica.url: replica.requests for replica in self._scheduler.view(self._clock.now_s()).replicas}
