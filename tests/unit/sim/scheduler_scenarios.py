"""Requests for vLLM's scheduler and for the simulated replica: made from a seed, and how each step is told."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from tidegate.sim.replica import Replica, ReplicaConfig, Request

GOLDEN = Path(__file__).parents[2] / "golden/vllm_scheduler_0.32.json"

BLOCK_SIZE = 16
OUTPUT_BASE = 100_000


def make_scenario(policy: str, seed: int, *, num_blocks: int, budget: int) -> dict[str, Any]:
    """Sessions that grow, share prefixes, are preempted and aborted on a cache that is too small for them."""
    rng = random.Random(seed)
    requests: list[dict[str, Any]] = []
    outputs: dict[str, list[int]] = {}
    system = [rng.randrange(1000) for _ in range(40)]
    for session in range(10):
        context = (system if session % 2 else []) + [rng.randrange(1000) for _ in range(rng.randint(5, 90))]
        step = rng.randint(0, 40)
        for turn in range(rng.randint(1, 5)):
            id = f"s{session}t{turn}"
            tokens = rng.randint(1, 40)
            outputs[id] = [OUTPUT_BASE + 1000 * len(requests) + i for i in range(tokens + 1)]
            requests.append(
                {
                    "id": id,
                    "step": step,
                    "prompt": list(context),
                    "output_tokens": tokens,
                    "priority": rng.randint(0, 2),
                    "arrival_s": step + session / 100,
                }
            )
            context += outputs[id][:tokens] + [rng.randrange(1000) for _ in range(rng.randint(3, 40))]
            step += rng.randint(tokens, tokens + 60)
    requests.sort(key=lambda request: (request["step"], request["arrival_s"]))
    aborts: dict[str, list[str]] = {}
    for request in rng.sample(requests, 5):
        aborts.setdefault(str(request["step"] + rng.randint(1, 20)), []).append(request["id"])
    return {
        "policy": policy,
        "block_size": BLOCK_SIZE,
        "num_blocks": num_blocks,
        "max_num_batched_tokens": budget,
        "max_num_seqs": 6,
        "max_model_len": 512,
        "steps": 500,
        "requests": requests,
        "outputs": outputs,
        "aborts": aborts,
    }


class Sequence(Request):
    """Its blocks are known by their tokens: a prefix is its own hash."""

    def grow_hashes(self, blocks: int) -> None:
        tokens = PROMPTS[self.id] + OUTPUTS[self.id]
        self.hashes = [tuple(tokens[: (i + 1) * BLOCK_SIZE]) for i in range(blocks)]


PROMPTS: dict[str, list[int]] = {}
OUTPUTS: dict[str, list[int]] = {}


def simulate(scenario: dict[str, Any]) -> list[dict[str, Any]]:
    replica = Replica(
        ReplicaConfig(
            num_blocks=scenario["num_blocks"],
            block_size=BLOCK_SIZE,
            max_model_len=scenario["max_model_len"],
            max_num_seqs=scenario["max_num_seqs"],
            max_num_batched_tokens=scenario["max_num_batched_tokens"],
            scheduling_policy=scenario["policy"],
        )
    )
    OUTPUTS.update(scenario["outputs"])
    arrivals = list(scenario["requests"])
    lines = []
    for step in range(scenario["steps"]):
        while arrivals and arrivals[0]["step"] <= step:
            new = arrivals.pop(0)
            PROMPTS[new["id"]] = new["prompt"]
            request = Sequence(
                new["id"],
                len(new["prompt"]),
                new["output_tokens"],
                priority=new["priority"],
                arrival_s=new["arrival_s"],
            )
            request.grow_hashes(request.prompt_tokens // BLOCK_SIZE)
            replica.add(request)
        for id in scenario["aborts"].get(str(step), []):
            replica.abort(id)
        lines.append(observe(replica))
    return lines


def observe(replica: Replica) -> dict[str, Any]:
    counters = replica.counters
    queries, hits = counters.prefix_cache_queries, counters.prefix_cache_hits
    scheduled: dict[str, int] = {}
    blocks: dict[str, list[int]] = {}
    complete = replica._complete

    def spy(batch: Any, *rest: Any) -> None:
        scheduled.update({request.id: 1 for request in batch.decoding})
        scheduled.update({request.id: chunk for request, chunk in batch.prefilling.items()})
        blocks.update({request.id: list(request.blocks) for request in replica.running})
        complete(batch, *rest)

    replica._complete = spy  # type: ignore[method-assign]
    result = replica.step(0.0)
    replica._complete = complete  # type: ignore[method-assign]
    return {
        "scheduled": scheduled,
        "blocks": blocks,
        "preempted": sorted(request.id for request in result.preempted),
        "running": [request.id for request in replica.running],
        "free": replica.pool.num_free,
        "queries": counters.prefix_cache_queries - queries,
        "hits": counters.prefix_cache_hits - hits,
    }


SCENARIOS = {  # policy, seed, blocks, token budget of a step
    "fcfs, too few blocks": ("fcfs", 1, 33, 64),
    "fcfs, whole prompts": ("fcfs", 2, 40, 2048),
    "fcfs, nothing evicted": ("fcfs", 3, 400, 128),
    "priority, too few blocks": ("priority", 4, 33, 64),
    "priority, small steps": ("priority", 5, 60, 48),
}


def scenario(name: str) -> dict[str, Any]:
    policy, seed, num_blocks, budget = SCENARIOS[name]
    return make_scenario(policy, seed, num_blocks=num_blocks, budget=budget)


def digest(line: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()[:8]
