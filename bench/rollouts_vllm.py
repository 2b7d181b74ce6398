#!/usr/bin/env python3
"""Rollouts on two real vLLM CPU replicas: tidegate's policies against vllm-router's.

Closed-loop sessions of mixed classes (workload cpu-mixed) on two replicas of 16,384 KV tokens. Every router gets the
same sessions from the same driver; repeats are interleaved, the order of routers rotates from repeat to repeat; each
run starts with a fresh router, idle engines and empty prefix caches. Routers are started as their users start them:
vllm-router with prime-rl's flags, tidegate with its defaults. `vllm-router:program` is its program scheduling, which is
told the replicas' KV capacity and, in each request, the session's name. A policy of tidegate's that ends in `+plugin`
tells the engines which sessions ended and pause; then all engines have tidegate's plugin, and the other gates leave it
alone.

    make bench-vllm
    .venv/bin/python bench/rollouts_vllm.py --concurrency 16,24 --duration-s 60 --repeats 1   # a short one
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
from replicas import BLOCK_TOKENS, KV_BLOCKS, ROOT, VOCAB_SIZE, vllm_replicas
from rich.console import Console

from tidegate.bench.client import ClientOptions
from tidegate.bench.comparison import Comparison, Run
from tidegate.bench.driver import LoadDriver, LoadOptions, LoadResult
from tidegate.bench.pool import make_cold, start_gate
from tidegate.bench.processes import Server, Servers, free_ports, sigterm_ends
from tidegate.sim.workload_names import WorkloadOptions, build_workload

REPLICAS = 2
ROUTER_START_S = 60.0
WITH_PLUGIN = "+plugin"
PROGRAM = "program"  # of vllm-router's: not a policy but a mode of it; it is told what its engines hold
POLICIES = "vllm-router:consistent_hash,vllm-router:sticky_least_loaded,vllm-router:cache_aware,tidegate:misa_t"


def main() -> None:
    arguments = parse()
    console = Console(width=max(Console().width, 160))
    out: Path = arguments.out
    with sigterm_ends(), Servers(out / "logs") as servers, replicas_of(arguments) as urls:
        runs = asyncio.run(sweep(arguments, servers, urls, console))
    comparison = Comparison(runs)
    console.print(comparison.rates_table())
    console.print(comparison.ratios_table("tidegate", "vllm-router"))
    console.print(f"every run: {out / 'rollouts_vllm.json'}")


def replicas_of(arguments: argparse.Namespace) -> AbstractContextManager[list[str]]:
    plugin = any(policy.endswith(WITH_PLUGIN) for _, policy in arguments.policies)
    return vllm_replicas(REPLICAS, arguments.out / "logs", plugin=plugin)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=POLICIES, help="ROUTER:POLICY,... or tidegate:POLICY+plugin")
    parser.add_argument("--concurrency", default="8,12,16,24,48", help="sessions in flight")
    parser.add_argument("--duration-s", type=float, default=90.0)
    parser.add_argument("--warmup-s", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="repeat i has seed + i")
    parser.add_argument("--out", type=Path, default=ROOT / "out")
    parser.add_argument("--vllm-router", type=Path, default=ROOT / ".venv-bench/bin/vllm-router")
    parser.add_argument("--serve-flags", default="", help="further flags of tidegate serve")
    arguments = parser.parse_args()
    arguments.policies = [tuple(name.split(":", 1)) for name in arguments.policies.split(",")]
    arguments.concurrency = [int(number) for number in arguments.concurrency.split(",")]
    for name in arguments.policies:
        if len(name) != 2 or name[0] not in ("vllm-router", "tidegate"):
            parser.error(f"--policies: {':'.join(name)!r} is not vllm-router:POLICY or tidegate:POLICY")
    if any(router == "vllm-router" for router, _ in arguments.policies) and not arguments.vllm_router.exists():
        parser.error(f"{arguments.vllm_router} is missing: pip install vllm-router==0.1.17 there, or --vllm-router")
    return arguments


def schedule(arguments: argparse.Namespace) -> Iterator[tuple[int, int, str, str]]:
    """(repeat, concurrency, router, policy): routers innermost, their order rotated, so that a slow hour of the
    machine hits all of them."""
    for repeat, concurrency in itertools.product(range(arguments.repeats), arguments.concurrency):
        policies = arguments.policies
        shift = (repeat + arguments.concurrency.index(concurrency)) % len(policies)
        for router, policy in policies[shift:] + policies[:shift]:
            yield repeat, concurrency, router, policy


async def sweep(arguments: argparse.Namespace, servers: Servers, engines: list[str], console: Console) -> list[Run]:
    runs: list[Run] = []
    planned = list(schedule(arguments))
    minutes = len(planned) * (arguments.duration_s + arguments.warmup_s + 5) / 60
    console.print(f"{len(planned)} runs, about {minutes:.0f} min")
    for number, (repeat, concurrency, router, policy) in enumerate(planned, start=1):
        await make_cold(engines)
        load_before = os.getloadavg()[0]
        server = await start_router(arguments, servers, router, policy, engines)
        try:
            seed = arguments.seed + repeat
            result = await measure(arguments, server.url, engines, concurrency, seed, programs=policy == PROGRAM)
        finally:
            servers.stop(server)
        run = Run(
            router=router,
            policy=policy,
            concurrency=concurrency,
            repeat=repeat,
            seed=arguments.seed + repeat,
            result=result,
            load_before=load_before,
        )
        runs.append(run)
        console.print(f"{number:3}/{len(planned)} {time.strftime('%H:%M:%S')} {describe(run)}", highlight=False)
        write(arguments, runs)
    return runs


def describe(run: Run) -> str:
    score, result = run.result.score, run.result
    hit = "-" if result.engine_hit_rate is None else f"{100 * result.engine_hit_rate:.0f}"
    completed = " ".join(f"{workload} {count}" for workload, count in score.completed.items())
    return (
        f"{run.name} at {run.concurrency}: contract {score.contract_per_min:.1f}/min, hit {hit} %, {completed}, "
        f"failed {score.failed}, load before {run.load_before:.1f}, driver CPU {100 * result.driver_cpu_share:.0f} % "
        f"{result.errors or ''}"
    )


def write(arguments: argparse.Namespace, runs: list[Run]) -> None:
    """After every run: an interrupted sweep keeps what it has."""
    settings = {name: str(value) for name, value in vars(arguments).items()}
    value = msgspec.json.encode({"settings": settings, "replicas": REPLICAS, "kv_blocks": KV_BLOCKS, "runs": runs})
    (arguments.out / "rollouts_vllm.json").write_bytes(msgspec.json.format(value, indent=1))


async def start_router(
    arguments: argparse.Namespace, servers: Servers, router: str, policy: str, engines: list[str]
) -> Server:
    if router == "tidegate":
        use = "auto" if policy.endswith(WITH_PLUGIN) else "off"
        flags = ["--engines-plugin", use, *arguments.serve_flags.split()]
        return await start_gate(servers, policy.removesuffix(WITH_PLUGIN), engines, flags)
    port, metrics_port = free_ports(2)
    command = [str(arguments.vllm_router), "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *engines]
    if policy == PROGRAM:
        told = msgspec.json.encode({"token_capacity_per_dp_rank": KV_BLOCKS * BLOCK_TOKENS}).decode()
        command += ["--enable-program-scheduling", "--program-scheduling-config-json", told]
    else:
        command += ["--policy", policy]
    command += ["--request-id-headers", "x-session-id", "--prometheus-port", str(metrics_port)]
    server = servers.start(f"{router}-{policy}", command, f"http://127.0.0.1:{port}")
    await server.ready("/v1/models", ROUTER_START_S)
    return server


async def measure(
    arguments: argparse.Namespace, url: str, engines: list[str], concurrency: int, seed: int, *, programs: bool
) -> LoadResult:
    client = ClientOptions(
        url=url, model="m", session_prefix=f"bench-{seed}", block_tokens=BLOCK_TOKENS, programs=programs
    )
    options = LoadOptions(
        client=client,
        concurrency=concurrency,
        duration_s=arguments.duration_s,
        warmup_s=arguments.warmup_s,
        engine_urls=tuple(engines),
        seed=seed,
        vocab_size=VOCAB_SIZE,
    )
    return await LoadDriver(build_workload("cpu-mixed", WorkloadOptions(seed=seed)), options).run()


if __name__ == "__main__":
    main()
