"""vLLM, as of 0.32 and 0.33; names of older releases are accepted too.

Control paths need VLLM_SERVER_DEV_MODE=1 at the engine; without it they answer 404 and a pause cannot be seen.
kv_cache_usage_perc counts the blocks of running requests only, so it does not show thrash.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qs, urlencode

import msgspec

from tidegate.engines.base import UNREADABLE, Action, ControlCall, EngineName, KvSource, reachable_endpoint
from tidegate.engines.prometheus import Reading, Samples, counter, whole

_CACHE_CONFIG = "vllm:cache_config_info"
_SLEEP_STATE = "vllm:engine_sleep_state"
_START_TIME = "process_start_time_seconds"
_KV_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_RUNNING = ("vllm:num_requests_running",)
_WAITING = ("vllm:num_requests_waiting",)
_PROMPT = counter("vllm:prompt_tokens")
_CACHED = counter("vllm:prompt_tokens_cached")
_LOOKED_UP = (*counter("vllm:prefix_cache_queries"), *counter("vllm:gpu_prefix_cache_queries"))
_FOUND = (*counter("vllm:prefix_cache_hits"), *counter("vllm:gpu_prefix_cache_hits"))
_GENERATED = counter("vllm:generation_tokens")
_PREEMPTED = counter("vllm:num_preemptions")

# Calls after which the weights or the cache are others; each empties the prefix cache or makes it wrong.
_COLD_PATHS = frozenset(
    {
        "/update_weights",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/reload_weights",
        "/load_weights",
        "/release_kv_cache_memory",
    }
)


class _Paused(msgspec.Struct):
    is_paused: bool


class _Publisher(msgspec.Struct):
    endpoint: str = ""
    replay_endpoint: str | None = None
    topic: str = ""
    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"


class VllmAdapter:
    name: EngineName = "vllm"
    metrics_prefix = "vllm:"
    metric_names = frozenset(
        {_CACHE_CONFIG, _SLEEP_STATE, _START_TIME}.union(
            _KV_USED, _RUNNING, _WAITING, _PROMPT, _CACHED, _LOOKED_UP, _FOUND, _GENERATED, _PREEMPTED
        )
    )
    loads_path: str | None = None
    health_path = "/health"
    pause_probe_path = "/is_paused"
    pause_clears_cache = True
    keeps_sessions = False
    kv_sources_path = "/kv_event_sources"

    def read(self, samples: Samples) -> Reading:
        prompt, cached = samples.total(*_PROMPT), samples.total(*_CACHED)
        if cached is None:
            # Releases without the honest pair: look-ups and hits are both counted again when a request is tried
            # again, so only their own ratio means anything.
            found, looked_up = samples.total(*_FOUND), samples.total(*_LOOKED_UP)
            if found is not None and looked_up is not None:
                prompt, cached = looked_up, found
        return Reading(
            kv_capacity_tokens=_capacity_tokens(samples),
            kv_used_fraction=samples.mean(*_KV_USED),
            running=samples.total(*_RUNNING),
            waiting=samples.total(*_WAITING),
            prompt_tokens_total=prompt,
            cached_tokens_total=cached,
            generation_tokens_total=samples.total(*_GENERATED),
            preemptions_total=samples.total(*_PREEMPTED),
            sleeping=_sleeping(samples),
            started_at_s=samples.latest(_START_TIME),
        )

    def read_loads(self, body: bytes) -> Reading | None:
        return None

    def paused(self, status: int, body: bytes, *, was_healthy: bool) -> bool | None:
        if status != 200:
            return None
        try:
            return msgspec.json.decode(body, type=_Paused).is_paused
        except UNREADABLE:
            return None

    def kv_sources(self, body: bytes, host: str) -> list[KvSource]:
        try:
            publishers = msgspec.json.decode(body, type=dict[str, _Publisher])
        except UNREADABLE:
            return []
        sources = []
        for rank, publisher in sorted(publishers.items()):
            # Endpoints are already moved by the rank here.
            endpoint = reachable_endpoint(publisher.endpoint, host)
            if endpoint is None or not publisher.enable_kv_cache_events or publisher.publisher != "zmq":
                continue
            replay = publisher.replay_endpoint and reachable_endpoint(publisher.replay_endpoint, host)
            sources.append(
                KvSource(
                    rank=whole(rank) or 0,
                    endpoint=endpoint,
                    replay_endpoint=replay or None,
                    topic=publisher.topic,
                )
            )
        return sources

    def calls(self, action: Action, options: Mapping[str, str]) -> tuple[ControlCall, ...]:
        query = urlencode(options)
        match action:
            case "pause" | "sleep" | "wake_up" | "reset_prefix_cache":
                return (ControlCall(method="POST", path=f"/{action}", query=query),)
            case "resume":
                return (ControlCall(method="POST", path="/resume"),)
            case "is_paused":
                return (ControlCall(method="GET", path=self.pause_probe_path),)
            case "abort":
                ids = [request for request in options.get("ids", "").split(",") if request]
                if not ids:
                    return ()  # none would mean all
                return (ControlCall(method="POST", path="/abort_requests", body=_json({"request_ids": ids})),)
            case "abort_all":
                return (ControlCall(method="POST", path="/abort_requests", body=b"{}"),)

    def goes_cold(self, path: str, query: str, body: bytes) -> bool:
        options = parse_qs(query)
        match path:
            case "/pause":
                return options.get("clear_cache", ["true"])[-1].lower() not in ("false", "0", "no", "off")
            case "/sleep":
                return options.get("level", ["1"])[-1] != "0"
            case "/reset_prefix_cache":
                return True
            case "/collective_rpc":
                return b"weights" in body
            case _:
                return path in _COLD_PATHS


def _capacity_tokens(samples: Samples) -> int | None:
    """The sum over engines; None when one of them does not say ("None" until its cache is sized)."""
    tokens: dict[str, int | None] = {}
    for sample in samples[_CACHE_CONFIG]:
        tokens[sample.engine()] = _engine_capacity_tokens(sample.labels)
    known = [value for value in tokens.values() if value]
    return sum(known) if known and len(known) == len(tokens) else None


def _engine_capacity_tokens(labels: dict[str, str]) -> int | None:
    size = whole(labels.get("kv_cache_size_tokens", ""))
    if size is not None:  # right for models with several kinds of layers, where blocks x size is not
        return size
    blocks, block_size = whole(labels.get("num_gpu_blocks", "")), whole(labels.get("block_size", ""))
    return None if blocks is None or block_size is None else blocks * block_size


def _sleeping(samples: Samples) -> bool | None:
    awake = [sample.value for sample in samples[_SLEEP_STATE] if sample.labels.get("sleep_state") == "awake"]
    return any(value == 0 for value in awake) if awake else None


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
