"""Control calls go to all replicas at once, and the answer reports on each.

    {"success": true, <what all replicas answered alike>,
     "replicas": {url: {ok, called, status, body, error, elapsed_s}}}

Status 200 only if every listed replica did it (a mere question: if any answered). If all refused alike (404: not built
in), their status; if some failed or did not answer, 502: a pool that is half updated must not pass for updated. A
replica that is gone for good has to be removed first. What both engines can do, under other names, reaches each replica
in its own dialect (`engines.dialects`), and `called` says what that was; everything else goes on as it came, method,
query, headers and body.

Beside relaying, the gate draws its consequences: a pause holds requests (from before the call is sent), a resume lets
them go, an abort call is remembered so that aborted replies are not taken for a draining replica's, and answers the
requests that the gate holds too, and a call that leaves caches empty starts a new epoch. While the pool is paused a
series of update calls is one epoch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.clock import Clock
from tidegate.engines import detect
from tidegate.engines.base import ControlCall, EngineAdapter
from tidegate.engines.control import Result, fan_out
from tidegate.engines.dialects import Wish, understood
from tidegate.errors import ReplicaError
from tidegate.proxy.framing import VIA_HEADER
from tidegate.server.answers import answer, read_body
from tidegate.server.pausing import Pausing
from tidegate.server.replicas import Replicas
from tidegate.types import AnyEvent, EpochStarted, ReplicaId, ReplicaReset

log: structlog.stdlib.BoundLogger = structlog.get_logger("tidegate.control")

PAUSES = frozenset({"/pause", "/pause_generation"})
RESUMES = frozenset({"/resume", "/continue_generation"})
ABORTS = frozenset({"/abort_request", "/abort_requests"})
OTHERS = frozenset(
    {
        # both engines, or vLLM
        "/is_paused",
        "/update_weights",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/update_weight_version",
        "/reload_weights",
        "/load_weights",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/release_kv_cache_memory",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/start_profile",
        "/stop_profile",
        # SGLang
        "/flush_cache",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_tensor",
        "/update_weights_from_ipc",
        "/begin_weight_update",
        "/end_weight_update",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/load_lora_adapter",
        "/unload_lora_adapter",
    }
)
CONTROL_PATHS = PAUSES | RESUMES | ABORTS | OTHERS

_SPARING = re.compile(rb"\b(?:keep|wait|in_place|retract)\b")  # modes of a pause that abort nothing; the default does

QUESTIONS = frozenset({"/is_paused", "/is_sleeping"})  # answered by those that answer

# Of these the caches are empty but the weights are the same: no new epoch.
_COLD_ONLY = PAUSES | {"/sleep", "/release_memory_occupation", "/release_kv_cache_memory"}


class ControlApi:
    def __init__(
        self,
        replicas: Replicas,
        pausing: Pausing,
        handle: Callable[[AnyEvent], None],
        aborts_called: Callable[[], None],
        abort_held: Callable[[Collection[str]], int],
        clock: Clock,
        *,
        max_body_bytes: int,
    ) -> None:
        self._replicas = replicas
        self._pausing = pausing
        self._handle = handle
        self._aborts_called = aborts_called
        self._abort_held = abort_held
        self._clock = clock
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        return [Route(path, self.call, methods=["GET", "POST", "PUT", "DELETE"]) for path in sorted(CONTROL_PATHS)]

    async def call(self, request: Request) -> Response:
        path, query = request.url.path, request.url.query
        urls = self._replicas.urls
        if not urls:
            raise ReplicaError("no replica is listed", reason="no_replica", status=503)
        body = await read_body(request, self._max_body_bytes)
        wish = understood(path, query, body)
        if path in ABORTS or (path in PAUSES and not _SPARING.search(query.encode() + b" " + body)):
            self._aborts_called()
        held_aborted = None
        if wish is not None and wish.action in ("abort_all", "abort"):
            # First: the end of one that runs must not let them go.
            held_aborted = self._abort_held(wish.options["ids"].split(",") if wish.action == "abort" else ())
        paused_here = path in PAUSES and not self._pausing.by_gate
        if path in PAUSES:
            self._pausing.pause()
        as_it_came = ControlCall(method=request.method, path=path, query=query, body=body or None)
        calls = {url: self._spelled(url, wish, as_it_came) for url in urls}
        results = await fan_out(
            self._replicas.client,
            calls,
            headers=[*request.headers.items(), *VIA_HEADER.items()],
            timeout_s=self._replicas.config.control_timeout_s,
        )
        if wish is not None and wish.action == "is_paused":
            results = [self._answered(result) for result in results]
        self._conclude(path, calls, results, paused_here)
        return _report(path, results, held_aborted)

    # --- dialects ----------------------------------------------------------------------------------------------------
    def _adapter(self, url: ReplicaId) -> EngineAdapter | None:
        monitor = self._replicas.monitor(url)
        return monitor.adapter if monitor is not None else None

    def _spelled(self, url: ReplicaId, wish: Wish | None, as_it_came: ControlCall) -> tuple[ControlCall, ...]:
        adapter = self._adapter(url)
        if wish is None or adapter is None or adapter.name == wish.spoken:
            return (as_it_came,)
        return adapter.calls(wish.action, wish.options)

    def _answered(self, result: Result) -> Result:
        """Whether it is paused, of a replica that says so in another way than vLLM."""
        adapter = self._adapter(result.url)
        if adapter is None or adapter.name == "vllm" or result.status is None:
            return result
        paused = adapter.paused(result.status, b"", was_healthy=True)
        error = result.error if paused is None else None
        body = result.body if paused is None else {"is_paused": paused}
        return msgspec.structs.replace(result, ok=paused is not None, body=body, error=error)

    # --- consequences ------------------------------------------------------------------------------------------------
    def _conclude(
        self, path: str, calls: dict[ReplicaId, tuple[ControlCall, ...]], results: list[Result], paused_here: bool
    ) -> None:
        done = [result.url for result in results if result.ok]
        if path not in QUESTIONS:
            log.info("control call", path=path, ok=len(done), failed=len(results) - len(done))
        if path in PAUSES:
            if done:
                self._pausing.confirm()
            elif paused_here:
                self._pausing.resume()
        self._went_cold(path, [url for url in done if self._goes_cold(url, calls[url])], len(results))
        if path in RESUMES and done:
            self._pausing.resume()

    def _goes_cold(self, url: ReplicaId, calls: tuple[ControlCall, ...]) -> bool:
        adapter = self._adapter(url) or detect.DEFAULT
        return any(adapter.goes_cold(call.path, call.query, call.body or b"") for call in calls)

    def _went_cold(self, path: str, cold: list[ReplicaId], called: int) -> None:
        now_s, reason = self._clock.now_s(), path.strip("/")
        if not cold:
            return
        for url in cold:
            monitor = self._replicas.monitor(url)
            if monitor is not None:
                monitor.caches_cleared()
        if path in _COLD_ONLY or len(cold) < called:
            for url in cold:
                self._handle(ReplicaReset(at_s=now_s, replica=url, reason=reason))
        elif self._pausing.starts_epoch():
            self._handle(EpochStarted(at_s=now_s, reason=reason))


def _report(path: str, results: list[Result], held_aborted: int | None) -> Response:
    answered = [result for result in results if result.ok]
    ok = bool(answered) if path in QUESTIONS else len(answered) == len(results)
    report: dict[str, Any] = {**_common(answered if path in QUESTIONS else results), "success": ok}
    if path in QUESTIONS:  # of the whole pool: only if it is so everywhere
        name = path.strip("/")
        report[name] = ok and all(isinstance(r.body, dict) and r.body.get(name) is True for r in answered)
    if held_aborted is not None:
        report["held_aborted"] = held_aborted
    report["replicas"] = {r.url: {k: v for k, v in msgspec.structs.asdict(r).items() if k != "url"} for r in results}
    if ok:
        return answer(report)
    statuses = {result.status for result in results}
    alike = statuses.pop() if len(statuses) == 1 else None
    status = alike if alike is not None and alike >= 400 else 502
    failed = [f"{result.url}: {result.error}" for result in results if not result.ok]
    report["error"] = {
        "message": f"{path} failed on {len(failed)} of {len(results)} replicas: {'; '.join(failed)}",
        "type": "server_error" if status >= 500 else "invalid_request_error",
        "param": None,
        "code": "control_failed",
    }
    return answer(report, status)


def _common(results: list[Result]) -> dict[str, Any]:
    """What all replicas answered alike: a client made for one engine finds its keys."""
    bodies = [result.body for result in results]
    if not all(isinstance(body, dict) for body in bodies):
        return {}
    first = bodies[0]
    return {key: value for key, value in first.items() if all(body.get(key, ...) == value for body in bodies)}
