#!/usr/bin/env python3
"""Is the simulator right? The same rollouts on two real vLLM CPU replicas behind the gate, and simulated.

Step times are measured on these replicas first, both at once; then come the cells, policies x sessions in flight x
repeats, each on cold replicas behind a fresh gate, and each simulated with the same sessions. The table says where
throughput and hit rate agree; only a failure to run fails the command.

    make validate
    .venv/bin/python bench/validate.py --concurrency 16 --repeats 1        # a short one
    .venv/bin/python bench/validate.py --fit out/validation.json           # with the step times of an earlier run

With --embedded the live side is two `tidegate engine` processes instead, whose steps take the simulator's own times:
what differs then is the gate, the wire and the driver, not the engines.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import msgspec
from replicas import (
    BLOCK_TOKENS,
    KV_BLOCKS,
    MAX_BATCHED_TOKENS,
    MAX_MODEL_LEN,
    MAX_SEQS,
    ROOT,
    VOCAB_SIZE,
    embedded_replicas,
    vllm_replicas,
)
from rich.console import Console

from tidegate.bench.processes import Servers, sigterm_ends
from tidegate.bench.validation import Pair, validity_table, verdicts
from tidegate.bench.validation_run import ValidationOptions, cells, fitted, run_pair
from tidegate.sim.fit import Fit
from tidegate.sim.replica import ReplicaConfig

REPLICAS = 2


def main() -> None:
    arguments = parse()
    console = Console(width=max(Console().width, 130))
    logs: Path = arguments.out / "logs"
    replicas = embedded_replicas if arguments.embedded else vllm_replicas
    with sigterm_ends(), Servers(logs) as servers, replicas(REPLICAS, logs) as urls:
        options = ValidationOptions(
            engines=tuple(urls),
            config=ReplicaConfig(
                num_blocks=KV_BLOCKS,
                block_size=BLOCK_TOKENS,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=MAX_SEQS,
                max_num_batched_tokens=MAX_BATCHED_TOKENS,
            ),
            policies=tuple(arguments.policies.split(",")),
            concurrency=tuple(int(number) for number in arguments.concurrency.split(",")),
            repeats=arguments.repeats,
            seed=arguments.seed,
            warmup_s=arguments.warmup_s,
            duration_s=arguments.duration_s,
            vocab_size=VOCAB_SIZE,
            longest_prompt=arguments.longest_prompt,
        )
        pairs = asyncio.run(validate(arguments, options, servers, console))
    console.print(validity_table(verdicts(pairs)))
    console.print(f"every run: {arguments.out / 'validation.json'}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="sticky_least_loaded,misa_t,working_set")
    parser.add_argument("--concurrency", default="8,16,24", help="sessions in flight: below, at and above the knee")
    parser.add_argument("--duration-s", type=float, default=42.0)
    parser.add_argument("--warmup-s", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="repeat i has seed + i")
    parser.add_argument("--longest-prompt", type=int, default=4096, help="that the step times are measured with")
    parser.add_argument("--fit", type=Path, help="step times from this file (of `sim fit`, or of an earlier run)")
    parser.add_argument("--embedded", action="store_true", help="tidegate engine instead of vLLM")
    parser.add_argument("--out", type=Path, default=ROOT / "out")
    return parser.parse_args()


async def validate(
    arguments: argparse.Namespace, options: ValidationOptions, servers: Servers, console: Console
) -> list[Pair]:
    began_s = time.monotonic()
    found = read_fit(arguments.fit) if arguments.fit else await fitted(options, lambda done, total: None)
    console.print(f"step times, in {time.monotonic() - began_s:.0f} s: {describe_fit(found)}", highlight=False)
    planned = list(cells(options))
    minutes = len(planned) * (options.duration_s + options.warmup_s + 8) / 60
    console.print(f"{len(planned)} cells, about {minutes:.0f} min")
    pairs: list[Pair] = []
    for number, cell in enumerate(planned, start=1):
        pairs.append(await run_pair(options, servers, cell, found))
        console.print(f"{number:3}/{len(planned)} {time.strftime('%H:%M:%S')} {describe(pairs[-1])}", highlight=False)
        write(arguments, found, pairs)
    return pairs


def read_fit(path: Path) -> Fit:
    value = msgspec.json.decode(path.read_bytes())
    return msgspec.convert(value.get("fit", value), Fit)


def describe_fit(found: Fit) -> str:
    constants = ", ".join(f"{name} {value:.3g}" for name, value in msgspec.structs.asdict(found.latency).items())
    return (
        f"{constants}; relative errors: prefill {100 * found.prefill_error:.0f} %, prompts together "
        f"{100 * found.joined_error:.0f} %, decode {100 * found.decode_error:.0f} %"
    )


def describe(pair: Pair) -> str:
    def figures(name: str) -> str:
        seen = getattr(pair, name)
        hit = "-" if seen.hit_rate is None else f"{100 * seen.hit_rate:.0f}"
        return (
            f"{name} {seen.generated_tokens_per_s:.1f} tokens/s, hit {hit} %, {seen.sessions_per_min:.1f} sessions/min"
        )

    return (
        f"{pair.policy} at {pair.concurrency}: {figures('live')}; {figures('simulated')}; load before "
        f"{pair.load_before:.1f}, driver CPU {100 * pair.driver_cpu_share:.0f} % {pair.errors or ''}"
    )


def write(arguments: argparse.Namespace, found: Fit, pairs: list[Pair]) -> None:
    """After every run: an interrupted validation keeps what it has."""
    settings = {name: str(value) for name, value in vars(arguments).items()}
    value = {"settings": settings, "fit": found, "pairs": pairs, "verdicts": verdicts(pairs)}
    (arguments.out / "validation.json").write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))


if __name__ == "__main__":
    main()
