"""What replicas and the gate say about themselves, read at the edges of a window and sampled along a run.

Replicas: vLLM's or SGLang's /metrics through the same adapters that the gate uses. The gate: /state and the histogram
of hold times. Both are optional: any router or engine can be driven.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import msgspec

from tidegate.engines.prometheus import Samples, parse
from tidegate.engines.sglang import SglangAdapter
from tidegate.engines.vllm import VllmAdapter

ADAPTERS = (VllmAdapter(), SglangAdapter())
CACHE_CONFIG = "vllm:cache_config_info"
TIME_SCALE = "tidegate_engine_time_scale"
HOLD_BUCKET = "tidegate_request_held_seconds_bucket"
# Not a limit on the system under test: an engine deep in a step answers late, and a lost edge would spoil the run.
SCRAPE_TIMEOUT = aiohttp.ClientTimeout(total=30)


class EngineTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Cumulative numbers of one replica, or of several added up."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generation_tokens: int | None = None
    preemptions: int | None = None
    running: int | None = None
    waiting: int | None = None
    capacity_tokens: int | None = None

    def since(self, before: EngineTotals) -> EngineTotals:
        return EngineTotals(
            prompt_tokens=_minus(self.prompt_tokens, before.prompt_tokens),
            cached_tokens=_minus(self.cached_tokens, before.cached_tokens),
            generation_tokens=_minus(self.generation_tokens, before.generation_tokens),
            preemptions=_minus(self.preemptions, before.preemptions),
            running=self.running,
            waiting=self.waiting,
            capacity_tokens=self.capacity_tokens,
        )


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    block_tokens: int = 1
    time_scale: float = 1.0


async def engine_totals(http: aiohttp.ClientSession, urls: Sequence[str]) -> EngineTotals:
    """Added up over the replicas that answer; a number that one of them does not report is None."""
    texts = await asyncio.gather(*(_text(http, f"{url}/metrics") for url in urls))
    readings = [_read(text) for text in texts if text is not None]
    if not readings:
        return EngineTotals()
    return EngineTotals(
        **{name: _sum([getattr(reading, name) for reading in readings]) for name in EngineTotals.__struct_fields__}
    )


async def engine_facts(http: aiohttp.ClientSession, urls: Sequence[str]) -> EngineFacts:
    """Of the first replica: a pool is of one kind."""
    text = await _text(http, f"{urls[0]}/metrics") if urls else None
    if text is None:
        return EngineFacts()
    samples = parse(text, {CACHE_CONFIG, TIME_SCALE})
    blocks = [s.labels.get("block_size", "") for s in samples[CACHE_CONFIG]]
    return EngineFacts(
        block_tokens=int(blocks[0]) if blocks and blocks[0].isdecimal() else 1,
        time_scale=samples.latest(TIME_SCALE) or 1.0,
    )


async def hold_buckets(http: aiohttp.ClientSession, url: str) -> dict[float, float] | None:
    """The gate's hold times so far, upper bound [s] -> count over all classes; None: no such gate."""
    text = await _text(http, f"{url}/metrics")
    if text is None:
        return None
    buckets: dict[float, float] = {}
    for sample in parse(text, {HOLD_BUCKET})[HOLD_BUCKET]:
        bound = float(sample.labels.get("le", "inf"))
        buckets[bound] = buckets.get(bound, 0.0) + sample.value
    return buckets or None


class GateSessions(msgspec.Struct, frozen=True):
    live: int
    held: int
    paused: int = 0


class GateReplica(msgspec.Struct, frozen=True):
    kv_used_tokens: int
    kv_capacity_tokens: int | None = None


class GateState(msgspec.Struct, frozen=True):
    """What is read of /state; the rest of it is skipped."""

    sessions: GateSessions
    replicas: list[GateReplica]


async def gate_state(http: aiohttp.ClientSession, url: str) -> GateState | None:
    text = await _text(http, f"{url}/state")
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=GateState)
    except msgspec.DecodeError:
        return None


async def _text(http: aiohttp.ClientSession, url: str) -> str | None:
    try:
        async with http.get(url, timeout=SCRAPE_TIMEOUT) as response:
            return await response.text() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


def _read(text: str) -> EngineTotals:
    adapter = next((a for a in ADAPTERS if f"\n{a.metrics_prefix}" in text), ADAPTERS[0])
    samples: Samples = parse(text, adapter.metric_names)
    reading = adapter.read(samples)
    return EngineTotals(
        prompt_tokens=reading.prompt_tokens_total,
        cached_tokens=reading.cached_tokens_total,
        generation_tokens=reading.generation_tokens_total,
        preemptions=reading.preemptions_total,
        running=reading.running,
        waiting=reading.waiting,
        capacity_tokens=reading.kv_capacity_tokens,
    )


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _minus(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
