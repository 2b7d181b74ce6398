"""Mixed rollouts on two embedded engines behind `tidegate serve`, once for each policy, on the same sessions.

What is run, and why these numbers:

- Workload `trace`: recorded coding-agent sessions, RLVR and RLHF in the mixture and with the length distributions of
  arXiv 2608.11152, all scaled from 128K to a context of 4,096 tokens, turns as recorded: some 65 a session.
- Engines: the default step-time model, which has the cost of a prompt token and of a generated one in about the
  proportion of a GPU under load. 16,384 KV tokens hold 14 of these sessions on average.
- 72 sessions in flight: 2.5 times what fits on average, as a trainer that knows its batch size only offers.
- Time x 20: all times in the result are the engines' model time, and the gate's clock runs as fast (`gate_time`).

Each policy gets fresh engines and a fresh gate, otherwise with its default configuration.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from tidegate.bench.client import ClientOptions, RolloutClient
from tidegate.bench.driver import LoadDriver, LoadOptions, LoadResult, http_session, inspect_target
from tidegate.bench.gate_time import gate_environment
from tidegate.bench.processes import Server, Servers, free_ports
from tidegate.bench.scrape import engine_totals, gate_state
from tidegate.sim.workload_names import WorkloadOptions, build_workload
from tidegate.types import WorkloadClass

SAMPLE_PERIOD_S = 0.5  # of the plot; wall time
START_S = 30.0


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    policies: tuple[str, ...] = ("consistent_hash", "sticky_least_loaded", "misa_t")
    engines: int = 2
    kv_tokens: int = 16_384
    time_scale: float = 20.0
    context_tokens: int = 4_096
    merge_turns: int = 1
    concurrency: int = 72
    warmup_s: float = 13.0  # wall time: 260 s of model time, several residencies of an unhindered session
    duration_s: float = 32.0
    seed: int = 0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a run; counts are cumulative."""

    at_s: float  # model time since the run's start
    kv_used_tokens: int  # the gate's ledger: KV that its live sessions need
    kv_capacity_tokens: int
    live: int
    held: int
    prompt_tokens: int
    cached_tokens: int
    ended: int


class PolicyRun(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    result: LoadResult
    samples: list[Sample]
    warmup_model_s: float
    load_before: float  # the machine's load average when the run began


Progress = Callable[[str, float, Sample | None], None]  # policy, wall seconds of it done, latest sample


async def run_demo(settings: DemoSettings, log_dir: Path, progress: Progress) -> list[PolicyRun]:
    with Servers(log_dir) as servers:
        return [await run_policy(settings, servers, policy, progress) for policy in settings.policies]


def demo_classes(settings: DemoSettings) -> list[WorkloadClass]:
    return list(build_workload("trace", _workload_options(settings)).shares)


async def run_policy(settings: DemoSettings, servers: Servers, policy: str, progress: Progress) -> PolicyRun:
    ports = free_ports(settings.engines + 1)
    engines = [_start_engine(settings, servers, f"{policy}-engine-{n}", port) for n, port in enumerate(ports[1:])]
    await asyncio.gather(*(engine.ready("/health", START_S) for engine in engines))
    gate = _start_gate(settings, servers, policy, ports[0], [engine.url for engine in engines])
    try:
        await gate.ready("/v1/models", START_S)
        return await _drive(settings, policy, gate.url, tuple(engine.url for engine in engines), progress)
    finally:
        servers.stop(gate, *engines)


async def _drive(
    settings: DemoSettings, policy: str, url: str, engine_urls: tuple[str, ...], progress: Progress
) -> PolicyRun:
    target = await inspect_target(url, engine_urls, None)
    options = LoadOptions(
        client=ClientOptions(
            url=url,
            model=target.model,
            session_prefix="demo",
            time_scale=target.facts.time_scale,
            block_tokens=target.facts.block_tokens,
        ),
        concurrency=settings.concurrency,
        duration_s=settings.duration_s,
        warmup_s=settings.warmup_s,
        engine_urls=engine_urls,
        seed=settings.seed,
    )
    driver = LoadDriver(build_workload("trace", _workload_options(settings)), options)
    samples: list[Sample] = []

    async def sampler(client: RolloutClient) -> None:
        async with http_session() as http:
            while True:
                state, totals = await asyncio.gather(gate_state(http, url), engine_totals(http, engine_urls))
                if state is not None and totals.prompt_tokens is not None:
                    samples.append(
                        Sample(
                            at_s=client.now_s(),
                            kv_used_tokens=sum(replica.kv_used_tokens for replica in state.replicas),
                            kv_capacity_tokens=totals.capacity_tokens or 0,
                            live=state.sessions.live,
                            held=state.sessions.held,
                            prompt_tokens=totals.prompt_tokens,
                            cached_tokens=totals.cached_tokens or 0,
                            ended=len(driver.ended),
                        )
                    )
                progress(policy, client.now_s() / settings.time_scale, samples[-1] if samples else None)
                await asyncio.sleep(SAMPLE_PERIOD_S)

    load_before = os.getloadavg()[0]
    result = await driver.run(sampler)
    return PolicyRun(
        policy=policy,
        result=result,
        samples=samples,
        warmup_model_s=settings.warmup_s * target.facts.time_scale,
        load_before=load_before,
    )


def _workload_options(settings: DemoSettings) -> WorkloadOptions:
    return WorkloadOptions(seed=settings.seed, context_tokens=settings.context_tokens, merge_turns=settings.merge_turns)


def _start_engine(settings: DemoSettings, servers: Servers, name: str, port: int) -> Server:
    command = [*_tidegate("engine"), "--port", str(port), "--kv-tokens", str(settings.kv_tokens)]
    return servers.start(name, [*command, "--time-scale", str(settings.time_scale)], f"http://127.0.0.1:{port}")


def _start_gate(settings: DemoSettings, servers: Servers, policy: str, port: int, engine_urls: list[str]) -> Server:
    command = [*_tidegate("serve"), "--policy", policy, "--port", str(port), "--worker-urls", *engine_urls]
    environment = gate_environment(settings.time_scale)
    return servers.start(f"{policy}-gate", command, f"http://127.0.0.1:{port}", environment)


def _tidegate(command: str) -> list[str]:
    """With this interpreter, so that it works wherever this package is importable."""
    return [sys.executable, "-c", "from tidegate.cli.main import main; main()", command]
