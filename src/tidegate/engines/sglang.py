"""SGLang, as of 0.5.23; names of older releases are accepted too.

Its /metrics is off unless started with --enable-metrics; /v1/loads tells the load then, but no totals, so a restart
and the hit rate cannot be seen.

It has no path that tells a pause: /ready answers 503 while it is paused, and /health, which generates a token, hangs.
A 503 of /ready from a replica that was healthy is therefore a pause, and /health is not asked then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tidegate.engines.base import UNREADABLE, Action, ControlCall, EngineName, KvSource, reachable_endpoint
from tidegate.engines.prometheus import Reading, Samples, counter

_START_TIME = "process_start_time_seconds"
_CAPACITY = ("sglang:max_total_num_tokens",)
_POOL = ("sglang:kv_available_tokens", "sglang:kv_evictable_tokens", "sglang:kv_used_tokens")
_KV_USED = ("sglang:token_usage", "sglang:full_token_usage")
_RUNNING = ("sglang:num_running_reqs",)
_WAITING = ("sglang:num_queue_reqs",)
_PROMPT = counter("sglang:prompt_tokens")
_CACHED = counter("sglang:cached_tokens")
_GENERATED = counter("sglang:generation_tokens")
_RETRACTED = counter("sglang:num_retracted_requests")

_PAUSE_MODES = {"abort": "abort", "keep": "in_place", "wait": "in_place"}  # it has no mode that lets requests end
_COLD_PATHS = frozenset({"/flush_cache", "/release_memory_occupation", "/end_weight_update"})


class _KvEvents(msgspec.Struct):
    endpoint_host: str
    endpoint_port_base: int
    publisher: str = "zmq"
    topic: str = ""
    dp_size: int = 1
    replay_endpoint_port_base: int | None = None


class _ServerInfo(msgspec.Struct):
    kv_events: _KvEvents | None = None


class _Load(msgspec.Struct):
    """Of one data-parallel rank."""

    num_running_reqs: int
    num_waiting_reqs: int
    max_total_num_tokens: int
    token_usage: float


class _Loads(msgspec.Struct):
    loads: list[_Load]


class SglangAdapter:
    name: EngineName = "sglang"
    metrics_prefix = "sglang:"
    metric_names = frozenset(
        {_START_TIME}.union(_CAPACITY, _POOL, _KV_USED, _RUNNING, _WAITING, _PROMPT, _CACHED, _GENERATED, _RETRACTED)
    )
    loads_path: str | None = "/v1/loads?include=core"
    health_path = "/health"
    pause_probe_path = "/ready"
    pause_clears_cache = False
    keeps_sessions = True
    kv_sources_path = "/server_info"

    def read(self, samples: Samples) -> Reading:
        return Reading(
            kv_capacity_tokens=_capacity_tokens(samples),
            kv_used_fraction=samples.mean(*_KV_USED),
            running=samples.total(*_RUNNING),
            waiting=samples.total(*_WAITING),
            prompt_tokens_total=samples.total(*_PROMPT),
            cached_tokens_total=samples.total(*_CACHED),
            generation_tokens_total=samples.total(*_GENERATED),
            preemptions_total=samples.total(*_RETRACTED),
            started_at_s=samples.latest(_START_TIME),
        )

    def read_loads(self, body: bytes) -> Reading | None:
        try:
            loads = msgspec.json.decode(body, type=_Loads).loads
        except UNREADABLE:
            return None
        if not loads:
            return None
        return Reading(
            kv_capacity_tokens=sum(load.max_total_num_tokens for load in loads) or None,
            kv_used_fraction=sum(load.token_usage for load in loads) / len(loads),
            running=sum(load.num_running_reqs for load in loads),
            waiting=sum(load.num_waiting_reqs for load in loads),
        )

    def paused(self, status: int, body: bytes, *, was_healthy: bool) -> bool | None:
        if status == 200:
            return False
        return True if status == 503 and was_healthy else None

    def kv_sources(self, body: bytes, host: str) -> list[KvSource]:
        try:
            events = msgspec.json.decode(body, type=_ServerInfo).kv_events
        except UNREADABLE:
            return []
        if events is None or events.publisher != "zmq":
            return []
        sources = []
        for rank in range(events.dp_size):
            endpoint = reachable_endpoint(
                f"tcp://{events.endpoint_host}:{events.endpoint_port_base}", host, port_offset=rank
            )
            if endpoint is None:
                continue
            replay = None
            if events.replay_endpoint_port_base is not None:
                replay = reachable_endpoint(f"tcp://*:{events.replay_endpoint_port_base}", host, port_offset=rank)
            sources.append(KvSource(rank=rank, endpoint=endpoint, replay_endpoint=replay, topic=events.topic))
        return sources

    def calls(self, action: Action, options: Mapping[str, str]) -> tuple[ControlCall, ...]:
        match action:
            case "pause":
                mode = _PAUSE_MODES.get(options.get("mode", "abort"), options.get("mode", "abort"))
                pause = _post("/pause_generation", {"mode": mode})
                # Its pause leaves the cache, and a flush fails while requests run: only for those who ask for it.
                return (pause, _post("/flush_cache", None)) if options.get("clear_cache") == "true" else (pause,)
            case "resume":
                return (_post("/continue_generation", {}),)
            case "is_paused":
                return (ControlCall(method="GET", path=self.pause_probe_path),)
            case "reset_prefix_cache":
                return (_post("/flush_cache", None),)
            case "abort":
                ids = options.get("ids", "").split(",")
                return tuple(_post("/abort_request", {"rid": id}) for id in ids if id)  # one for each call
            case "abort_all":
                return (_post("/abort_request", {"abort_all": True}),)
            case "sleep":
                return (_post("/release_memory_occupation", {}),)
            case "wake_up":
                return (_post("/resume_memory_occupation", {}),)

    def goes_cold(self, path: str, query: str, body: bytes) -> bool:
        if path.startswith("/update_weights"):
            return _flushes(body)
        if path == "/pause_generation":
            return False  # abort, retract and in_place all leave the radix cache
        return path in _COLD_PATHS


def _flushes(body: bytes) -> bool:
    """A weight update flushes the cache unless its body says `"flush_cache": false`."""
    try:
        fields: Any = msgspec.json.decode(body) if body else {}
    except UNREADABLE:
        return True
    return not (isinstance(fields, dict) and fields.get("flush_cache") is False)


def _post(path: str, fields: dict[str, object] | None) -> ControlCall:
    return ControlCall(method="POST", path=path, body=None if fields is None else msgspec.json.encode(fields))


def _capacity_tokens(samples: Samples) -> int | None:
    total = samples.total(*_CAPACITY)
    if total is not None:
        return total or None
    parts = [samples.total(name) for name in _POOL]  # free, evictable and used slots of the pool
    known = [part for part in parts if part is not None]
    return sum(known) or None if len(known) == len(parts) else None
