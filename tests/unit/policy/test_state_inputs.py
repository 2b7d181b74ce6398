"""What replicas say, or do not: unknown is never zero, stale narrows and is shown, old totals are no news."""

from __future__ import annotations

import pytest
from tests.unit.policy.shell import Shell, held, placed

from tidegate.policy.params import CoreParams, ReplicaParams
from tidegate.types import Place, ReplicaResidency, ReplicaSample, Tick

POLICIES = ("session_admission", "misa", "misa_t")


@pytest.mark.parametrize("policy", POLICIES)
def test_an_unknown_capacity_admits_a_few_sessions_and_raises_an_alarm(policy: str) -> None:
    shell = Shell(policy, 2, capacity=None)
    for i in range(4):
        shell.turn(f"s{i}")
    decision = held(shell.arrive("s4"))
    assert decision.reason == "capacity_unknown"
    assert "capacity_unknown http://r0" in shell.view().alarms
    assert isinstance(shell.arrive("s0"), Place)  # a continuation passes
    assert [p.session for p in placed(shell.sample("http://r0", kv_capacity_tokens=1_000_000))] == ["s4"]


@pytest.mark.parametrize("policy", POLICIES)
def test_stale_state_narrows_new_sessions_only_and_recovers(policy: str) -> None:
    shell = Shell(policy, 1, params=CoreParams(replica=ReplicaParams(stale_after_s=5.0)))
    shell.tick()
    for i in range(3):
        shell.turn(f"s{i}")
    shell.tick(10.0, sampled=False)
    assert shell.view().replicas[0].stale
    assert "stale_state http://r0" in shell.view().alarms
    assert held(shell.arrive("s3")).reason == "stale_state"
    assert isinstance(shell.arrive("s0"), Place)
    assert [p.session for p in placed(shell.sample("http://r0", waiting=0))] == ["s3"]


def test_a_stale_replica_without_sessions_still_takes_some() -> None:
    shell = Shell("misa_t", 1, params=CoreParams(replica=ReplicaParams(stale_after_s=5.0)))
    shell.tick(100.0, sampled=False)
    assert isinstance(shell.arrive("a"), Place)


def test_a_field_that_a_sample_lacks_leaves_what_was_known() -> None:
    shell = Shell("misa_t", 1, capacity=5_000)
    shell.sample("http://r0", kv_used_fraction=0.5)
    view = shell.view().replicas[0]
    assert (view.kv_capacity_tokens, view.hit_rate) == (5_000, None)


def test_the_hit_rate_is_cached_over_prompt_tokens_between_samples() -> None:
    shell = Shell("round_robin", 1)
    shell.sample("http://r0", prompt_tokens_total=10_000, cached_tokens_total=9_000)
    assert shell.view().replicas[0].hit_rate is None  # one reading is no rate
    shell.now_s += 1.0
    shell.sample("http://r0", prompt_tokens_total=12_000, cached_tokens_total=9_500)
    assert shell.view().replicas[0].hit_rate == pytest.approx(0.25)


def test_totals_that_start_again_are_a_restart_not_a_rate() -> None:
    shell = Shell("round_robin", 1)
    shell.sample("http://r0", prompt_tokens_total=10_000, cached_tokens_total=9_000)
    shell.now_s += 1.0
    shell.sample("http://r0", prompt_tokens_total=500, cached_tokens_total=0)
    assert shell.view().replicas[0].hit_rate is None


def test_the_prefill_rate_is_the_best_seen_of_late() -> None:
    shell = Shell("misa_t", 1)
    replica = shell.ledger.replicas["http://r0"]
    for total in (0, 5_000, 5_100, 5_100):
        shell.sample("http://r0", prompt_tokens_total=total, cached_tokens_total=0)
        shell.now_s += 1.0
    assert shell.ledger.prefill_rate(replica) == pytest.approx(5_000)


def test_an_older_sample_changes_nothing() -> None:
    shell = Shell("misa_t", 1)
    shell.sample("http://r0", waiting=3)
    shell.scheduler.handle(ReplicaSample(at_s=shell.now_s - 5.0, replica="http://r0", waiting=0))
    assert shell.ledger.replicas["http://r0"].waiting == 3


def test_time_that_goes_back_a_little_is_now() -> None:
    shell = Shell("misa_t", 1)
    shell.scheduler.handle(Tick(at_s=shell.now_s - 3.0))
    assert shell.ledger.now_s == shell.now_s


def test_residency_reports_show_the_lost_part_of_idle_sessions() -> None:
    shell = Shell("misa_t", 1)
    shell.turn("idle", prompt=2_000, completion=0)
    shell.turn("busy", prompt=2_000, completion=0)
    shell.arrive("busy", prompt_tokens=2_100)
    report = ReplicaResidency(
        at_s=shell.now_s, replica="http://r0", session_tokens={"idle": 500, "busy": 64, "gone": 9}, resident_tokens=573
    )
    shell.send(report)
    replica = shell.ledger.replicas["http://r0"]
    assert replica.signals.resident_share == pytest.approx(0.25)
    assert shell.view().replicas[0].kv_resident_tokens == 573


def test_events_about_unknown_replicas_are_harmless() -> None:
    shell = Shell("misa_t", 1)
    assert shell.sample("http://nobody", waiting=1) == []
    assert shell.health("http://nobody", True) == []
