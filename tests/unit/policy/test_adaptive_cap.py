"""adaptive_cap: one cap of the pool, grown by turnover, trimmed by KV usage, cut by preemption and queueing."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.policy.shell import Shell, held, placed

from tidegate.policy.baselines.params import AdaptiveCapParams
from tidegate.policy.params import CoreParams
from tidegate.types import AnyDecision, Place

CALM = {"waiting": 0, "running": 4, "kv_used_fraction": 0.3, "preemptions_total": 0}


def pool(cap: int, sessions: int = 0, **params: Any) -> Shell:
    own = AdaptiveCapParams(max_context_tokens=10_000, **params)
    shell = Shell("adaptive_cap", 2, capacity=cap * 5_000, params=CoreParams(adaptive_cap=own))
    for i in range(sessions):
        shell.turn(f"s{i}")
    return shell


def poll(shell: Shell, **reported: Any) -> list[AnyDecision]:
    """Both replicas report, then the controller looks."""
    shell.now_s += 5.0
    decisions: list[AnyDecision] = []
    for url in shell.urls:
        decisions += shell.sample(url, **{**CALM, **reported})
    return decisions + shell.tick(0.0, sampled=False)


def cap(shell: Shell) -> int:
    return int(shell.scheduler.policy.estimates()["session_cap"])  # type: ignore[call-overload]


def test_the_first_cap_is_all_memory_over_the_maximum_context() -> None:
    shell = pool(3)
    for i in range(3):
        shell.turn(f"s{i}")
    assert held(shell.arrive("s3")).reason == "pool_cap"
    assert [p.session for p in placed(shell.finish("s0"))] == ["s3"]


def test_it_grows_by_a_quarter_per_turnover_while_clear() -> None:
    shell = pool(100, 100)
    poll(shell)
    for i in range(100):  # each end is followed by another session: the pool stays full
        shell.finish(f"s{i}")
        shell.turn(f"t{i}")
        while cap(shell) > shell.view().live:
            shell.turn(f"more{shell.requests}")
    assert cap(shell) == pytest.approx(125, abs=3)


@pytest.mark.parametrize(
    "reported", [{"kv_used_fraction": 0.6}, {"waiting": 1}, {"kv_used_fraction": 0.3, "preemptions_total": 5}]
)
def test_it_does_not_grow_unless_the_last_poll_was_clear(reported: dict[str, Any]) -> None:
    shell = pool(4, 4)
    poll(shell)
    poll(shell, **reported)
    before = cap(shell)
    for i in range(4):
        shell.finish(f"s{i}")
    assert cap(shell) == before


def test_it_does_not_grow_unless_it_binds_nor_by_failures_nor_on_old_news() -> None:
    shell = pool(8, 7)
    poll(shell)
    shell.finish("s0")  # 7 of 8
    assert cap(shell) == 8
    shell = pool(8, 7)
    shell.arrive("failed")
    shell.end(shell.requests, "error")
    poll(shell)
    shell.finish("failed")
    assert shell.scheduler.policy.limit == 8.0  # type: ignore[attr-defined]
    shell.turn("s7")
    shell.now_s += 16.0
    shell.finish("s7")
    assert shell.scheduler.policy.limit == 8.0  # type: ignore[attr-defined]


def test_above_the_soft_usage_it_is_trimmed_and_nobody_is_paused() -> None:
    shell = pool(8, 8)
    poll(shell, kv_used_fraction=0.88)
    assert cap(shell) == 6  # 8 x 0.7 / 0.88
    assert all(isinstance(shell.arrive(f"s{i}"), Place) for i in range(8))
    assert shell.arrive("new").reason == "pool_cap"  # type: ignore[union-attr]


def test_above_the_hard_usage_the_youngest_are_paused_until_the_pool_has_drained() -> None:
    shell = pool(8, 8)
    poll(shell, kv_used_fraction=1.0)
    assert cap(shell) == 5
    assert isinstance(shell.arrive("s4"), Place)
    assert [held(shell.arrive(f"s{i}")).reason for i in (7, 5)] == ["paused", "paused"]
    assert placed(shell.finish("s0")) == []
    assert [p.session for p in placed(poll(shell))] == ["s5"]  # the oldest of those paused
    for i in (1, 2):
        shell.finish(f"s{i}")
    assert [p.session for p in placed(poll(shell))] == ["s7"]


def test_a_generation_is_not_stopped() -> None:
    shell = pool(8, 8)
    shell.arrive("s7")
    running = shell.requests
    poll(shell, kv_used_fraction=1.0)
    assert shell.view().in_flight == 1
    shell.end(running, prompt_tokens=100, completion_tokens=10)
    assert held(shell.arrive("s7")).reason == "paused"


def test_trims_are_six_polls_apart() -> None:
    shell = pool(100, 100)
    caps = []
    for _ in range(8):
        poll(shell, kv_used_fraction=0.85)
        caps.append(cap(shell))
    assert caps == [82] * 8  # 100 x 0.7 / 0.85; the pool has not drained, so the second trim aims at the same


def test_a_preemption_cuts_to_four_fifths_and_again_only_after_draining_to_half() -> None:
    shell = pool(10, 10)
    poll(shell)
    poll(shell, preemptions_total=1)
    assert cap(shell) == 8
    poll(shell, preemptions_total=2)
    assert cap(shell) == 8  # what is seen while it drains is old
    poll(shell, preemptions_total=2)
    poll(shell, preemptions_total=3)
    assert cap(shell) == 4  # soon after draining: half of 8


def test_a_capacity_queue_cuts_when_it_has_lasted_six_polls() -> None:
    shell = pool(10, 10)
    for _ in range(5):
        poll(shell, waiting=3)
    assert cap(shell) == 10
    poll(shell, waiting=3)
    assert cap(shell) == 9


def test_a_short_queue_is_no_overload() -> None:
    shell = pool(10, 10)
    for _ in range(12):
        poll(shell, waiting=2)  # of 4 running: not above half
    assert cap(shell) == 10


def test_a_pause_ends_at_its_limit() -> None:
    shell = pool(8, 8, pause_limit_s=30.0)
    poll(shell, kv_used_fraction=1.0)
    assert held(shell.arrive("s7")).reason == "paused"
    assert placed(shell.tick(29.0, sampled=False)) == []
    assert [p.session for p in placed(shell.tick(1.0, sampled=False))] == ["s7"]


def test_without_a_capacity_the_cap_is_its_floor() -> None:
    shell = Shell("adaptive_cap", 1, capacity=None)
    shell.turn("a")
    assert held(shell.arrive("b")).reason == "pool_cap"
