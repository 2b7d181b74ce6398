#!/usr/bin/env python3
"""How evenly a policy spreads sessions and their KV over a simulated pool, and what that costs.

Looks every ten seconds from the end of the warm-up on: sessions and KV tokens of live sessions on the fullest replica
over the mean, and the fullest replica's KV over its capacity.

    .venv/bin/python bench/balance.py --scenario paper-qwen --in-flight 384 --policies cache_aware,sticky_least_loaded
"""

from __future__ import annotations

import argparse
from statistics import fmean

import msgspec

from tidegate.policy.params import CoreParams
from tidegate.sim.cluster import Cluster
from tidegate.sim.replicas import capacity_tokens
from tidegate.sim.scenarios import scenario
from tidegate.sim.score import recomputed_tokens

PERIOD_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="paper-qwen")
    parser.add_argument("--in-flight", type=int, default=384)
    parser.add_argument("--policies", default="cache_aware,sticky_least_loaded")
    parser.add_argument("--duration-s", type=float, default=3600.0, help="after the warm-up")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for policy in arguments.policies.split(","):
        print(f"{policy} at {arguments.in_flight}: {balance(arguments, policy)}", flush=True)


def balance(arguments: argparse.Namespace, policy: str) -> str:
    base = scenario(arguments.scenario)
    trainer = msgspec.structs.replace(base.trainer, in_flight=arguments.in_flight)
    cluster = Cluster(msgspec.structs.replace(base, trainer=trainer), policy, CoreParams(), arguments.seed)
    cluster.run(base.warmup_s)
    sessions, tokens, filled = [], [], []
    for period in range(1, int(arguments.duration_s / PERIOD_S) + 1):
        cluster.run(base.warmup_s + PERIOD_S * period)
        live = dict.fromkeys(cluster.replicas, 0)
        held = dict.fromkeys(cluster.replicas, 0)
        for rollout in cluster.clients.live.values():
            if rollout.replica is None:
                continue
            call = rollout.call
            generated = cluster.replicas[rollout.replica].generated(call) if call and call.placed_s is not None else 0
            live[rollout.replica] += 1
            held[rollout.replica] += rollout.context.tokens + generated
        sessions.append(max(live.values()) / fmean(live.values()))
        tokens.append(max(held.values()) / fmean(held.values()))
        filled.append(max(held[url] / capacity_tokens(replica.config) for url, replica in cluster.replicas.items()))
    requests = cluster.clients.requests
    recomputed = (recomputed_tokens(requests) or 0) / sum(request.prompt_tokens for request in requests)
    over = fmean(part > 1.0 for part in filled)
    return (
        f"fullest replica over the mean: {fmean(sessions):.2f} x sessions, {fmean(tokens):.2f} x KV; its KV is "
        f"{100 * fmean(filled):.0f} % of its capacity, over it {100 * over:.0f} % of the time; "
        f"recomputed {100 * recomputed:.1f} % of prompt tokens"
    )


if __name__ == "__main__":
    main()
