"""A trainer that follows the gate's advice neither starves the pool nor swings, and follows when a replica is lost."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from tidegate.cli.sim import sim
from tidegate.errors import ConfigError
from tidegate.policy.params import CoreParams
from tidegate.sim.cluster import Cluster
from tidegate.sim.disturbances import ReplicaLoss
from tidegate.sim.scenario import Scenario
from tidegate.sim.scenarios import scenario
from tidegate.sim.trainer import TrainerSpec
from tidegate.types import MixtureSet

POLL_S = 2.0


def advised(in_flight: int = 200, **changes: Any) -> Scenario:
    spec = TrainerSpec(in_flight=in_flight, advice_poll_s=POLL_S)
    return msgspec.structs.replace(scenario("vllm-cpu"), trainer=spec, **changes)


def watched(case: Scenario, policy: str, until_s: float) -> tuple[Cluster, list[tuple[float, int, int, int]]]:
    """The cluster after the run, and (time, in flight, advised, live at the gate) once a second."""
    cluster = Cluster(case, policy, CoreParams(), 0)
    seen: list[tuple[float, int, int, int]] = []

    def look() -> None:
        now_s = cluster.kernel.now_s
        live = cluster.gate.scheduler.view(now_s).live
        seen.append((now_s, len(cluster.clients.live), cluster.gate.advisor.look().sessions, live))

    cluster.kernel.every(1.0, look)
    cluster.run(until_s)
    return cluster, seen


@pytest.mark.parametrize("policy", ["working_set", "misa_t", "sticky_least_loaded"])
def test_what_is_in_flight_is_what_is_advised(policy: str) -> None:
    _, seen = watched(advised(), policy, 240.0)
    settled = [(flight, told) for at_s, flight, told, _ in seen if at_s > 60.0]
    assert all(flight >= 0.6 * told for flight, told in settled)
    above = [flight - told for flight, told in settled if flight > told]
    assert len(above) < 0.5 * len(settled)  # a session is never called off: after a fall it takes its residency


def test_in_flight_does_not_swing() -> None:
    _, seen = watched(advised(), "working_set", 400.0)
    flights = [flight for at_s, flight, _, _ in seen if at_s > 100.0]
    assert max(flights) - min(flights) <= 0.5 * max(flights)


def test_its_own_number_is_the_most() -> None:
    _, seen = watched(advised(in_flight=5), "misa_t", 60.0)
    assert max(flight for _, flight, _, _ in seen) == 5


def test_the_gate_is_told_the_mixture_and_it_is_kept() -> None:
    cluster, _ = watched(advised(), "working_set", 400.0)
    shares = cluster.workload.shares
    assert cluster.gate.scheduler.ledger.mixture == shares
    ended = Counter(record.workload for record in cluster.clients.ended)
    total = sum(ended.values())
    assert 0.5 * sum(abs(ended[name] / total - share) for name, share in shares.items()) < 0.08


def test_a_lost_replica_halves_it_and_its_return_restores_it() -> None:
    loss = ReplicaLoss(replica=1, at_s=150.0, back_s=300.0)
    _, seen = watched(advised(losses=(loss,)), "working_set", 450.0)

    def mean(start_s: float, end_s: float) -> float:
        flights = [flight for at_s, flight, _, _ in seen if start_s < at_s <= end_s]
        return sum(flights) / len(flights)

    before, during, after = mean(100.0, 150.0), mean(250.0, 300.0), mean(380.0, 450.0)
    assert during < 0.75 * before
    assert after > 0.8 * before


def test_a_trainer_of_fixed_numbers_takes_no_advice() -> None:
    with pytest.raises(ValueError, match="takes no advice"):
        TrainerSpec(mode="populations", populations={"a": 1}, advice_poll_s=1.0)


def test_one_without_advice_tells_no_mixture() -> None:
    told = []
    case = scenario("vllm-cpu")
    Cluster(case, "misa_t", CoreParams(), 0, recorder=lambda event, made: told.append(type(event))).run(5.0)
    assert MixtureSet not in told


def test_the_flag_makes_any_scenarios_trainer_follow(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    flags = ["--scenario", "vllm-cpu", "--warmup-s", "20", "--duration-s", "40", "--seeds", "1", "--processes", "1"]
    rates = []
    for advice in ([], ["--advised"]):
        policies = ["--policies", "sticky_least_loaded", "--in-flight", "40", "--json", str(out)]
        result = CliRunner().invoke(sim, ["compare", *flags, *policies, *advice], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        rates.append(json.loads(out.read_text())[0]["contract_per_min"])
    assert rates[1] > 1.2 * rates[0]  # forty in flight thrash
    with pytest.raises(ConfigError, match="takes no advice"):
        CliRunner().invoke(sim, ["compare", "--scenario", "populations", "--advised"], catch_exceptions=False)
