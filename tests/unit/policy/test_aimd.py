"""aimd: the window grows by two while the cache is idle, halves when a full one is not hit, and pauses at turn ends."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.policy.shell import Shell, held, placed

from tidegate.policy.baselines.params import AimdParams
from tidegate.policy.params import CoreParams
from tidegate.types import Place

R0 = "http://r0"


class Pool(Shell):
    """One replica, and what it reports until the next control step."""

    def __init__(self, window: float, **params: Any) -> None:
        super().__init__("aimd", 1, params=CoreParams(aimd=AimdParams(initial_window=window, **params)))
        self.totals = (0, 0)
        self.sample(R0, prompt_tokens_total=0, cached_tokens_total=0)

    def step(self, used: float | None, hits: float) -> list[Any]:
        """A control step later; since the last one 100,000 prompt tokens with this hit rate."""
        self.now_s += 60.0  # older hits have faded
        self.totals = (self.totals[0] + 100_000, self.totals[1] + int(hits * 100_000))
        reported = {} if used is None else {"kv_used_fraction": used}
        decisions = self.sample(R0, prompt_tokens_total=self.totals[0], cached_tokens_total=self.totals[1], **reported)
        return decisions + self.tick(0.0, sampled=False)

    @property
    def window(self) -> float:
        return float(self.scheduler.policy.estimates()[R0]["window"])  # type: ignore[index, call-overload]


def filled(window: float, sessions: int, **params: Any) -> Pool:
    pool = Pool(window, **params)
    for i in range(sessions):
        pool.turn(f"s{i}")
    return pool


@pytest.mark.parametrize(
    ("used", "hits", "window"),
    [
        (0.1, 0.1, 6.0),  # idle, whatever the hits
        (0.2, 0.9, 4.0),
        (0.5, 0.0, 4.0),  # full, but not beyond the threshold
        (0.9, 0.21, 4.0),  # full and used again
        (0.9, 0.1, 2.0),  # full and thrashing
    ],
)
def test_the_window_follows_usage_and_hit_rate(used: float, hits: float, window: float) -> None:
    pool = filled(4.0, 4)
    pool.step(used, hits)
    assert pool.window == window


def test_a_window_that_does_not_bind_does_not_grow_and_none_is_below_one() -> None:
    pool = filled(4.0, 3)
    pool.step(0.0, 0.9)
    assert pool.window == 4.0
    for _ in range(5):
        pool.step(0.9, 0.0)
    assert pool.window == 1.0


def test_usage_that_is_not_reported_is_that_of_running_sessions() -> None:
    pool = filled(4.0, 4)
    pool.arrive("s0", prompt_tokens=600_000)  # of 1,000,000
    pool.step(None, 0.0)
    assert pool.window == 2.0
    pool.end(pool.requests)
    pool.step(None, 0.0)
    assert pool.window == 4.0  # nothing runs: idle


def test_stale_state_leaves_the_window() -> None:
    pool = filled(4.0, 4)
    pool.tick(3_000.0, sampled=False)
    assert pool.window == 4.0


def test_new_sessions_wait_for_the_window() -> None:
    pool = filled(2.0, 2)
    assert held(pool.arrive("new")).reason == "replica_cap"
    assert [p.session for p in placed(pool.step(0.0, 0.9))] == ["new"]


def test_a_cut_pauses_at_turn_boundaries_and_never_a_generation() -> None:
    pool = filled(4.0, 4)
    pool.arrive("s0")
    running = pool.requests
    assert pool.step(0.9, 0.0) == []  # the window is 2 of 4 active sessions
    assert held(pool.arrive("s1")).reason == "paused"
    pool.end(running, prompt_tokens=100, completion_tokens=10)
    assert held(pool.arrive("s0")).reason == "paused"  # its turn ended above the window
    assert isinstance(pool.arrive("s2"), Place)
    assert isinstance(pool.arrive("s3"), Place)


def test_paused_sessions_go_on_first_come_first_served_and_before_new_ones() -> None:
    pool = filled(4.0, 4)
    pool.step(0.9, 0.0)
    for session in ("s1", "s0"):
        held(pool.arrive(session))
    held(pool.arrive("new"))
    assert [p.session for p in placed(pool.finish("s2"))] == ["s1"]
    assert [p.session for p in placed(pool.finish("s3"))] == ["s0"]
    assert pool.view().held == 1
    assert [p.session for p in placed(pool.finish("s1"))] == ["new"]  # one of two is live


def test_a_pause_ends_at_its_limit() -> None:
    pool = filled(2.0, 2, pause_limit_s=30.0)
    pool.step(0.9, 0.0)
    assert held(pool.arrive("s0")).reason == "paused"
    assert placed(pool.tick(29.0, sampled=False)) == []
    assert [p.session for p in placed(pool.tick(1.0, sampled=False))] == ["s0"]


def test_a_paused_session_leaves_a_lost_replica_at_once() -> None:
    shell = Shell("aimd", 2, params=CoreParams(aimd=AimdParams(initial_window=1.0)))
    homes = {session: shell.turn(session) for session in ("a", "b")}
    shell.health(homes["a"], False)
    decision = shell.arrive("a")
    assert isinstance(decision, Place)
    assert (decision.replica, decision.reason) == (homes["b"], "repinned")
    assert held(shell.arrive("b")).reason == "paused"  # two active, window 1
