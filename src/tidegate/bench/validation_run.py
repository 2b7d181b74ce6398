"""Runs the cells of `bench.validation`: each live, behind a gate of its own on cold engines, then simulated with step
times that were fitted to these engines in the same run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence

import msgspec

from tidegate.bench.client import ClientOptions
from tidegate.bench.driver import LoadDriver, LoadOptions, LoadResult, inspect_target
from tidegate.bench.pool import make_cold, start_gate
from tidegate.bench.processes import Servers
from tidegate.bench.validation import Observed, Pair
from tidegate.policy.params import CoreParams
from tidegate.sim.cluster import Cluster
from tidegate.sim.fit import Fit, fit
from tidegate.sim.latency import LatencyModel
from tidegate.sim.measure import measure
from tidegate.sim.monitor import MonitorSpec
from tidegate.sim.replica import ReplicaConfig
from tidegate.sim.replicas import Totals
from tidegate.sim.scenario import ReplicaSpec, Scenario
from tidegate.sim.trainer import TrainerSpec
from tidegate.sim.workload_names import WorkloadOptions, build_workload

WORKLOAD = "cpu-mixed"


class ValidationOptions(msgspec.Struct, frozen=True, kw_only=True):
    engines: tuple[str, ...]  # URLs; alike, and idle
    config: ReplicaConfig  # theirs; the latency in it is not used
    policies: tuple[str, ...]
    concurrency: tuple[int, ...]
    repeats: int = 2
    seed: int = 0  # repeat i has seed + i
    warmup_s: float = 10.0
    duration_s: float = 45.0
    vocab_size: int = 4096
    longest_prompt: int = 4096  # of the fit


class Cell(msgspec.Struct, frozen=True):
    policy: str
    concurrency: int
    repeat: int
    seed: int


def cells(options: ValidationOptions) -> Iterator[Cell]:
    """Repeats outermost and policies in rotating order: a slow minute of the machine hits no policy's runs alone."""
    for repeat, concurrency in itertools.product(range(options.repeats), options.concurrency):
        shift = (repeat + options.concurrency.index(concurrency)) % len(options.policies)
        for policy in options.policies[shift:] + options.policies[:shift]:
            yield Cell(policy, concurrency, repeat, options.seed + repeat)


async def fitted(options: ValidationOptions, progress: Callable[[int, int], None]) -> Fit:
    """To all engines at once: they share a host, and run together in every cell."""
    seen = await measure(
        options.engines,
        model=None,
        longest_prompt=options.longest_prompt,
        budget_tokens=options.config.max_num_batched_tokens,
        vocab_size=options.vocab_size,
        seed=options.seed,
        progress=progress,
    )
    return fit(seen, budget_tokens=options.config.max_num_batched_tokens, engines=len(options.engines))


async def run_pair(options: ValidationOptions, servers: Servers, cell: Cell, found: Fit) -> Pair:
    await make_cold(options.engines)
    load_before = os.getloadavg()[0]
    gate = await start_gate(servers, cell.policy, options.engines)
    try:
        result = await _live(options, gate.url, cell)
    finally:
        servers.stop(gate)
    return Pair(
        policy=cell.policy,
        concurrency=cell.concurrency,
        repeat=cell.repeat,
        seed=cell.seed,
        live=_observed(result),
        simulated=simulated(options, cell, found.latency, found.request_s),
        load_before=load_before,
        driver_cpu_share=result.driver_cpu_share,
        errors=result.errors,
    )


async def _live(options: ValidationOptions, url: str, cell: Cell) -> LoadResult:
    target = await inspect_target(url, options.engines, None)
    client = ClientOptions(
        url=url, model=target.model, session_prefix=f"validate-{cell.seed}", block_tokens=options.config.block_size
    )
    load = LoadOptions(
        client=client,
        concurrency=cell.concurrency,
        duration_s=options.duration_s,
        warmup_s=options.warmup_s,
        engine_urls=options.engines,
        seed=cell.seed,
        vocab_size=options.vocab_size,
    )
    workload = build_workload(WORKLOAD, WorkloadOptions(context_tokens=options.config.max_model_len, seed=cell.seed))
    return await LoadDriver(workload, load).run()


def _observed(result: LoadResult) -> Observed:
    engines, seconds = result.engines, result.score.window_s
    if engines is None or engines.generation_tokens is None:
        raise RuntimeError("the engines' counters were not read at both edges of the window")
    return Observed(
        generated_tokens_per_s=engines.generation_tokens / seconds,
        hit_rate=result.engine_hit_rate,
        sessions_per_min=result.score.total_per_min,
        preemptions=engines.preemptions,
    )


def simulated(options: ValidationOptions, cell: Cell, latency: LatencyModel, request_s: float) -> Observed:
    """The same sessions, started at the same moment, over the same window."""
    cluster = Cluster(_scenario(options, cell, latency, request_s), cell.policy, CoreParams(), cell.seed)
    cluster.run(options.warmup_s)
    before = [replica.totals() for replica in cluster.replicas.values()]
    cluster.run(options.warmup_s + options.duration_s)
    after = [replica.totals() for replica in cluster.replicas.values()]
    prompts = _gained(before, after, lambda totals: totals.prompt_tokens)
    cached = _gained(before, after, lambda totals: totals.cached_tokens)
    ended = [each for each in cluster.clients.ended if each.completed and (each.ended_s or 0.0) >= options.warmup_s]
    return Observed(
        generated_tokens_per_s=_gained(before, after, lambda totals: totals.generation_tokens) / options.duration_s,
        hit_rate=cached / prompts if prompts else None,
        sessions_per_min=60 * len(ended) / options.duration_s,
        preemptions=_gained(before, after, lambda totals: totals.preemptions),
    )


def _scenario(options: ValidationOptions, cell: Cell, latency: LatencyModel, request_s: float) -> Scenario:
    config = msgspec.structs.replace(options.config, latency=latency)
    return Scenario(
        name="validation",
        about="what ran live",
        workload=WORKLOAD,
        options=WorkloadOptions(context_tokens=config.max_model_len),  # the cluster adds its seed
        replicas=(ReplicaSpec(config=config, count=len(options.engines)),),
        trainer=TrainerSpec(in_flight=cell.concurrency),
        monitor=MonitorSpec(residency=True),
        request_s=request_s,
        warmup_s=options.warmup_s,
        duration_s=options.duration_s,
    )


def _gained(before: Sequence[Totals], after: Sequence[Totals], of: Callable[[Totals], int]) -> int:
    return sum(map(of, after)) - sum(map(of, before))
