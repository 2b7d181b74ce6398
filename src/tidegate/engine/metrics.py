"""GET /metrics: vLLM's names, types and labels, from the engine's own counters at the time of the scrape.

Times are seconds of model time. `tidegate_engine_time_scale` says how many of them pass in a second of the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tidegate.engine.core import EngineCore
from tidegate.engine.http_counts import HttpCounts
from tidegate.engine.request_metrics import Histogram

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()


class EngineCollector(Collector):
    def __init__(self, core: EngineCore, http: HttpCounts) -> None:
        self._core = core
        self._http = http
        self._created = time.time()
        self._labels = {"engine": "0", "model_name": core.config.served_model_name}

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        for histogram in self._core.metrics.histograms():
            yield self._histogram(histogram)
        yield self._cache_config()
        yield from self._http_metrics()
        yield from self._own()

    # --- families ---------------------------------------------------------------------------------------------
    def _gauge(self, name: str, help: str, values: dict[tuple[str, ...], float], *labels: str) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", help, labels=[*self._labels, *labels])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *key], value)
        return family

    def _counter(self, name: str, help: str, values: dict[tuple[str, ...], float], *labels: str) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", help, labels=[*self._labels, *labels])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *key], value, created=self._created)
        return family

    def _histogram(self, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"vllm:{histogram.name}", histogram.help, labels=list(self._labels))
        buckets = []
        total = 0
        for bound, observed in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            total += observed
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        family.add_metric(list(self._labels.values()), buckets, histogram.sum)
        return family

    def _gauges(self) -> Iterator[Metric]:
        core = self._core
        waiting = float(core.waiting)
        yield self._gauge(
            "num_requests_running", "Number of requests in model execution batches.", {(): float(core.running)}
        )
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", {(): waiting})
        yield self._gauge(
            "num_requests_waiting_by_reason",
            "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; "
            "'deferred' = deferred by transient constraints. Sum of all reasons equals vllm:num_requests_waiting.",
            {("capacity",): waiting, ("deferred",): 0.0},
            "reason",
        )
        level = core.sleep_level
        yield self._gauge(
            "engine_sleep_state",
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
            "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
            {
                ("awake",): float(level is None),
                ("weights_offloaded",): float(level == 1),
                ("discard_all",): float(level == 2),
            },
            "sleep_state",
        )
        yield self._gauge(
            "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", {(): core.replica.pool.usage}
        )

    def _counters(self) -> Iterator[Metric]:
        counts = self._core.replica.counters
        metrics = self._core.metrics
        computed, cached = counts.prompt_tokens - counts.prompt_tokens_cached, counts.prompt_tokens_cached
        yield self._counter(
            "prefix_cache_queries",
            "Prefix cache queries, in terms of number of queried tokens.",
            {(): counts.prefix_cache_queries},
        )
        yield self._counter(
            "prefix_cache_hits",
            "Prefix cache hits, in terms of number of cached tokens.",
            {(): counts.prefix_cache_hits},
        )
        yield self._counter(
            "num_preemptions", "Cumulative number of preemption from the engine.", {(): counts.num_preemptions}
        )
        yield self._counter("prompt_tokens", "Number of prefill tokens processed.", {(): counts.prompt_tokens})
        yield self._counter(
            "prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            {("local_compute",): computed, ("local_cache_hit",): cached, ("external_kv_transfer",): 0},
            "source",
        )
        yield self._counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", {(): cached})
        yield self._counter(
            "generation_tokens", "Number of generation tokens processed.", {(): counts.generation_tokens}
        )
        yield self._counter(
            "request_success",
            "Count of successfully processed requests.",
            {(reason,): count for reason, count in metrics.success.items()},
            "finished_reason",
        )
        rejected = CounterMetricFamily(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            labels=["model_name", "reason"],
        )
        for reason, count in metrics.rejected.items():
            rejected.add_metric([self._labels["model_name"], reason], count, created=self._created)
        yield rejected

    def _cache_config(self) -> Metric:
        config = self._core.config
        info = {
            "block_size": str(config.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "engine": "0",
            "gpu_memory_utilization": "0.92",
            "kv_cache_max_concurrency": str(config.num_blocks * config.block_size / config.model_len),
            "kv_cache_size_tokens": str(config.num_blocks * config.block_size),
            "num_cpu_blocks": "None",
            "num_gpu_blocks": str(config.num_blocks),
            "num_gpu_blocks_override": str(config.num_blocks),
            "prefix_caching_hash_algo": "blake2b",
            "sliding_window": "None",
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(info)
        )
        family.add_metric(list(info.values()), 1.0)
        return family

    def _http_metrics(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "http_requests",
            "Total number of requests by method, status and handler.",
            labels=["handler", "method", "status"],
        )
        for (handler, method, status), count in self._http.requests.items():
            family.add_metric([handler, method, status], count, created=self._created)
        yield family

    def _own(self) -> Iterator[Metric]:
        core = self._core
        # The engine's own start, not its process's: several may run in one, and each is restarted by itself.
        started = GaugeMetricFamily(
            "process_start_time_seconds", "Start time of the process since unix epoch in seconds."
        )
        started.add_metric([], self._created)
        yield started
        scale = GaugeMetricFamily(
            "tidegate_engine_time_scale", "Seconds of model time that pass in one second of the clock."
        )
        scale.add_metric([], core.config.time_scale)
        yield scale
        for name, help, value in (
            ("steps", "Engine steps.", float(core.steps)),
            ("evicted_blocks", "Cached KV blocks that were given to another sequence.", core.replica.pool.evictions),
            (
                "recomputed_tokens",
                "Tokens computed again after a preemption.",
                core.replica.counters.recomputed_tokens,
            ),
            (
                "clock_slipped_seconds",
                "Clock seconds by which model time was set back because the process got too little CPU; "
                "measurements during which this grows are too slow.",
                core.slipped_s,
            ),
        ):
            family = CounterMetricFamily(f"tidegate_engine_{name}", help)
            family.add_metric([], value, created=self._created)
            yield family


def registry_of(core: EngineCore, http: HttpCounts) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineCollector(core, http))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)
