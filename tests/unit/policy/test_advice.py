"""Advice: what a trainer should have in flight, under every policy, and that following it is stable."""

from __future__ import annotations

import pytest
from tests.unit.policy.shell import Shell

from tidegate.policy import policies
from tidegate.policy.advice import Advisor, split
from tidegate.policy.baselines.params import StaticCapParams
from tidegate.policy.params import AdviceParams, CoreParams
from tidegate.policy.reasons import ADVICE, CLASS_ADVICE
from tidegate.types import Advice, Place, PoolPaused

UNCAPPED = "sticky_least_loaded"


def advice(shell: Shell) -> Advice:
    return Advisor(shell.scheduler).look()


def rollouts(shell: Shell, workload: str, *, count: int, tokens: int, seconds: int, shares: bool = True) -> None:
    """Whole sessions of one size and residency, at most eight at a time."""
    for start in range(0, count, 8):
        names = [f"{workload}-{shell.now_s}-{number}" for number in range(start, min(start + 8, count))]
        for name in names:
            decision = shell.arrive(name, prompt_tokens=tokens, workload=workload)
            if isinstance(decision, Place):
                shell.end(shell.requests, prompt_tokens=tokens, completion_tokens=0)
        for _ in range(seconds):
            shell.tick()
        for name in names:
            shell.finish(name)


@pytest.mark.parametrize("policy", policies())
def test_every_policy_has_advice_before_and_after_the_first_session(policy: str) -> None:
    shell = Shell(policy, 2, capacity=1_000_000)
    first = advice(shell)
    assert first.sessions >= 2
    assert first.reason in ADVICE
    rollouts(shell, "a", count=16, tokens=5_000, seconds=10)
    shell.turn("live", prompt=5_000, workload="a")
    shell.tick()
    later = advice(shell)
    assert later.classes["a"].sessions == later.sessions >= 2
    assert later.classes["a"].reason in CLASS_ADVICE


def test_what_fits_is_the_memory_over_the_footprint_where_a_policy_counts_no_sessions() -> None:
    shell = Shell(UNCAPPED, 2, capacity=1_000_000)
    rollouts(shell, "a", count=400, tokens=10_000, seconds=10)
    shell.turn("live", prompt=10_000, workload="a")
    shell.tick()
    said = advice(shell)
    one = said.classes["a"]
    assert said.reason == "capacity"
    assert one.footprint_tokens == pytest.approx(10_000, rel=0.05)
    each = one.sessions / 2
    deviation = said.inputs["footprint_deviation_tokens"]
    assert deviation == pytest.approx(one.footprint_tokens / 3**0.5)
    held_tokens = each * one.footprint_tokens + deviation * each**0.5
    assert held_tokens == pytest.approx(0.9 * 1_000_000, abs=one.footprint_tokens)
    assert one.held_sessions == 0  # nobody would hold them
    assert said.inputs["kv_capacity_tokens"] == 2_000_000
    assert said.inputs["mean_footprint_tokens"] == pytest.approx(one.footprint_tokens)


def test_the_mixture_is_that_of_completions_not_of_live_sessions() -> None:
    """Equal shares of a class that stays four times as long: four times the live sessions."""
    shell = Shell(UNCAPPED, 2, capacity=1_000_000)
    for _ in range(6):
        rollouts(shell, "short", count=32, tokens=4_000, seconds=10)
        rollouts(shell, "long", count=32, tokens=4_000, seconds=40)
    shell.mixture(short=0.5, long=0.5)
    said = advice(shell)
    live = {name: one.sessions - one.held_sessions for name, one in said.classes.items()}
    ratio = said.classes["long"].residency_s / said.classes["short"].residency_s
    assert ratio > 3.0
    assert live["long"] / live["short"] == pytest.approx(ratio, rel=0.02)


def test_sessions_that_end_before_the_trainer_reacts_wait_on_top() -> None:
    shell = Shell("working_set", 2, capacity=1_000_000, params=CoreParams(advice=AdviceParams(reaction_s=5.0)))
    rollouts(shell, "a", count=200, tokens=10_000, seconds=20)
    shell.mixture(a=1.0)
    one = advice(shell).classes["a"]
    live = one.sessions - one.held_sessions
    assert one.held_sessions == pytest.approx(live * 5.0 / one.residency_s, abs=1.0)
    shell.mixture(a=0.999999, rare=0.000001)
    assert advice(shell).classes["rare"].sessions == 1


def test_a_policys_own_limit_is_the_advice() -> None:
    shell = Shell("static_cap", 3, params=CoreParams(static_cap=StaticCapParams(cap=7)))
    shell.mixture(a=1.0)
    said = advice(shell)
    assert (said.reason, said.sessions - said.held_sessions) == ("session_limit", 21)
    shell.health(shell.urls[0], False)
    assert advice(shell).sessions - advice(shell).held_sessions == 14


@pytest.mark.parametrize("policy", ["session_admission", "misa", "misa_t", "working_set"])
def test_the_gate_never_admits_more_than_is_advised(policy: str) -> None:
    """Or it would run dry under a trainer that follows."""
    shell = Shell(policy, 2, capacity=100_000)
    advisor = Advisor(shell.scheduler)
    live: list[str] = []
    for step in range(120):
        name = f"s{step}"
        if isinstance(shell.arrive(name, prompt_tokens=4_000 + 97 * (step % 50), workload="ab"[step % 2]), Place):
            shell.end(shell.requests, prompt_tokens=5_000, completion_tokens=0)
        live.append(name)
        if len(live) > 40:
            shell.finish(live.pop(0))
        shell.tick()
        said = advisor.look()
        assert shell.view().live <= said.sessions


def test_a_replica_of_unknown_capacity_counts_as_a_few_sessions() -> None:
    shell = Shell(UNCAPPED, 2, capacity=None)
    shell.mixture(a=1.0)
    said = advice(shell)
    few = shell.scheduler.params.replica.unknown_sessions
    assert (said.reason, said.sessions - said.held_sessions) == ("capacity_unknown", 2 * few)
    shell.sample(shell.urls[0], kv_capacity_tokens=1_000_000)
    assert advice(shell).reason == "capacity"


@pytest.mark.parametrize("policy", [UNCAPPED, "misa_t", "working_set"])
def test_a_pool_that_cannot_be_seen_keeps_what_it_has(policy: str) -> None:
    shell = Shell(policy, 2, capacity=1_000_000)
    for number in range(20):
        shell.turn(f"s{number}", prompt=5_000, workload="a")
    shell.tick()
    before = advice(shell)
    shell.tick(by_s=60.0, sampled=False)
    said = advice(shell)
    assert said.sessions < before.sessions
    assert said.sessions - said.held_sessions == 20


def test_without_a_replica_one_session_of_each_class_waits() -> None:
    shell = Shell("misa_t", 1)
    shell.mixture(a=0.5, b=0.5)
    shell.health(shell.urls[0], False)
    said = advice(shell)
    assert said.reason == "no_replica"
    assert {name: one.sessions for name, one in said.classes.items()} == {"a": 1, "b": 1}


def test_a_pause_shows() -> None:
    shell = Shell("misa_t", 1)
    shell.send(PoolPaused(at_s=shell.now_s))
    assert advice(shell).paused


def test_a_class_long_gone_is_not_advised() -> None:
    shell = Shell(UNCAPPED, 1)
    rollouts(shell, "a", count=8, tokens=1_000, seconds=2)
    assert "a" in advice(shell).classes
    for _ in range(10):
        shell.tick(by_s=600.0)
    assert advice(shell).classes == {}


def test_small_changes_do_not_lower_the_advice_and_large_ones_do() -> None:
    shell = Shell(UNCAPPED, 1, capacity=1_000_000, params=CoreParams(advice=AdviceParams(band_fraction=0.1)))
    shell.mixture(a=1.0)
    advisor = Advisor(shell.scheduler)
    rollouts(shell, "a", count=200, tokens=10_000, seconds=10)
    steady = advisor.look().sessions
    klass = shell.ledger.klass("a")
    live = steady - advisor.look().held_sessions
    for factor, lowered in ((1.05, False), (1.3, True)):
        klass.profile.footprint_tokens *= factor
        now = advisor.look()
        assert (now.sessions - now.held_sessions < live) is lowered
    klass.profile.footprint_tokens /= 2.0
    assert advisor.look().sessions > steady


def test_split_is_by_largest_remainder() -> None:
    assert split(10, {"a": 1.0, "b": 1.0, "c": 1.0}) == {"a": 4, "b": 3, "c": 3}
    assert split(0, {"a": 1.0}) == {"a": 0}
    assert split(3, {}) == {}
