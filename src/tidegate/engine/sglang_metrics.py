"""GET /metrics under SGLang's names: those that a router reads."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tidegate.engine.core import EngineCore


class SglangCollector(Collector):
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._created = time.time()
        self._labels = {"model_name": core.config.served_model_name, "engine_type": "unified", "tp_rank": "0"}

    def collect(self) -> Iterator[Metric]:
        core, counts = self._core, self._core.replica.counters
        capacity = core.config.num_blocks * core.config.block_size
        gauges = {
            "max_total_num_tokens": float(capacity),
            "token_usage": core.replica.pool.usage,
            "num_running_reqs": float(core.running),
            "num_queue_reqs": float(core.waiting),
        }
        counters = {
            "prompt_tokens": counts.prompt_tokens,
            "cached_tokens": counts.prompt_tokens_cached,
            "generation_tokens": counts.generation_tokens,
            "num_retracted_requests": counts.num_preemptions,
        }
        for name, gauge in gauges.items():
            family = GaugeMetricFamily(f"sglang:{name}", name, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), gauge)
            yield family
        for name, count in counters.items():
            counted = CounterMetricFamily(f"sglang:{name}", name, labels=list(self._labels))
            counted.add_metric(list(self._labels.values()), count, created=self._created)
            yield counted
        started = GaugeMetricFamily("process_start_time_seconds", "Start time of the engine since unix epoch.")
        started.add_metric([], self._created)
        yield started


def registry_of(core: EngineCore) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(SglangCollector(core))
    return registry
