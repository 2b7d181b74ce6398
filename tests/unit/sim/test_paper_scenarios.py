"""What the scenarios paper-* take from the paper beside its lengths, which test_workload holds."""

from __future__ import annotations

import msgspec
import pytest

from tidegate.policy.params import CoreParams
from tidegate.sim.cluster import Cluster
from tidegate.sim.scenarios import scenario
from tidegate.sim.workload_names import PAPER_CONTEXT_TOKENS, PAPER_SHARES


@pytest.mark.parametrize(("name", "published"), [("paper-qwen", 0.227), ("paper-step", 0.066)])
def test_tools_have_the_published_share_of_an_agentic_session(name: str, published: float) -> None:
    """At the static cap of KV / maximum context, where nothing waits for memory."""
    base = scenario(name)
    cap = sum(
        spec.config.num_blocks * spec.config.block_size // PAPER_CONTEXT_TOKENS * spec.count for spec in base.replicas
    )
    trainer = msgspec.structs.replace(base.trainer, in_flight=cap)
    cluster = Cluster(msgspec.structs.replace(base, trainer=trainer), "sticky_least_loaded", CoreParams(), 0)
    cluster.run(1200.0)
    tools_s = resident_s = 0.0
    for rollout in cluster.clients.live.values():
        if rollout.plan.workload == "agentic" and rollout.last_end_s is not None:
            tools_s += sum(turn.gap_s for turn in rollout.plan.turns[: rollout.turn])
            resident_s += rollout.last_end_s - rollout.started_s
    assert tools_s / resident_s == pytest.approx(published, rel=0.2)


@pytest.mark.parametrize("name", ["paper-qwen", "paper-step"])
def test_the_mixture_is_the_published_one(name: str) -> None:
    cluster = Cluster(scenario(name), "static_cap", CoreParams(), 0)
    shares = cluster.workload.shares
    total = sum(PAPER_SHARES.values())
    assert shares == pytest.approx({label: share / total for label, share in PAPER_SHARES.items()})
