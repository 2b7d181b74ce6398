"""Estimators: drift, young cohorts and long censored sessions, against the truth of simulated sessions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.policy.estimators import Profile
from tidegate.policy.params import EstimatorParams
from tidegate.policy.rng import SplitMix64
from tidegate.policy.sizes import Sizes, size_bin

pytestmark = pytest.mark.interpreted


class Sessions:
    """Sessions of one class that grow steadily; time is stepped by a second."""

    def __init__(self, **params: Any) -> None:
        self.params = EstimatorParams(**params)
        self.profile = Profile(self.params)
        self.now_s = 0.0
        self.live: list[tuple[float, Any]] = []  # (end, session)

    def start(self, lasts_s: float, first: int = 1_000) -> None:
        session = SimpleNamespace(tokens=first, cohort=None, size_bin=0)
        self.profile.enter(session, self.now_s)  # type: ignore[arg-type]
        self.live.append((self.now_s + lasts_s, session))

    def step(self, growth: int = 20, prior_tokens: float = 4_000.0) -> None:
        self.now_s += 1.0
        for end_s, session in list(self.live):
            session.tokens += growth
            self.profile.grow(session, growth, self.now_s)
            if end_s <= self.now_s:
                self.live.remove((end_s, session))
                self.profile.leave(session, self.now_s)
        self.profile.advance(self.now_s)
        self.profile.solve(self.params.residency_prior_s, prior_tokens)

    def loop(self, seconds: int, population: int, lasts_s: float, growth: int = 20) -> None:
        for _ in range(seconds):
            while len(self.live) < population:
                self.start(lasts_s)
            self.step(growth)


def stagger(sessions: Sessions, population: int, lasts_s: int) -> None:
    """Admissions spread over a residency, so that all ages are there at any time."""
    for i in range(population):
        sessions.start(lasts_s * (i + 1) / population)


def test_a_steady_pool_is_estimated_truly() -> None:
    sessions = Sessions()
    stagger(sessions, 20, 100)
    sessions.loop(600, 20, 100.0)
    profile = sessions.profile
    assert profile.residency_s == pytest.approx(100.0, rel=0.2)
    assert profile.footprint_tokens == pytest.approx(2_000.0, rel=0.15)  # 1,000 to 3,000
    assert profile.growth_per_s == pytest.approx(20.0, rel=0.1)


def test_before_anything_ended_the_prior_footprint_stands() -> None:
    sessions = Sessions()
    for _ in range(50):
        sessions.start(1e9)
    for _ in range(20):
        sessions.step(growth=1, prior_tokens=50_000.0)
    assert sessions.profile.footprint_tokens == pytest.approx(50_000.0)


def test_a_young_cohort_is_not_taken_for_small_sessions() -> None:
    """What ended was old; all that runs is young: the present average would say 1,200."""
    sessions = Sessions()
    for _ in range(3):
        for _ in range(20):
            sessions.start(100.0)
        for _ in range(101):
            sessions.step()
    for _ in range(40):
        sessions.start(100.0)
    for _ in range(10):
        sessions.step()
    present = sum(session.tokens for _, session in sessions.live) / len(sessions.live)
    assert present == pytest.approx(1_200.0)
    assert sessions.profile.footprint_tokens == pytest.approx(2_000.0, rel=0.15)


def test_long_sessions_count_before_they_end() -> None:
    """Half are short and end, half never end: a mean over completed ones would say 10 s for ever."""
    sessions = Sessions()
    for _ in range(20):
        sessions.start(1e9)
    for _ in range(200):
        while len(sessions.live) < 40:
            sessions.start(10.0)
        sessions.step()
    completed_mean = sessions.profile.lived_s / sum(sessions.profile.ends)
    assert completed_mean == pytest.approx(10.0, rel=0.1)
    short = Sessions()
    short.loop(200, 20, 10.0)
    assert sessions.profile.residency_s > 1.5 * short.profile.residency_s


def test_an_upward_drift_shows_before_the_longer_sessions_end() -> None:
    sessions = Sessions()
    stagger(sessions, 20, 50)
    sessions.loop(300, 20, 50.0)
    before = sessions.profile.residency_s
    sessions.loop(130, 20, 200.0)  # none of the new ones has ended
    assert sessions.profile.residency_s > 1.35 * before


def test_a_downward_drift_is_followed_within_the_window() -> None:
    sessions = Sessions()
    stagger(sessions, 20, 200)
    sessions.loop(600, 20, 200.0)
    sessions.loop(900, 20, 50.0)
    assert sessions.profile.residency_s == pytest.approx(50.0, rel=0.25)


def test_an_idle_class_forgets_nothing() -> None:
    sessions = Sessions()
    stagger(sessions, 20, 50)
    sessions.loop(200, 20, 50.0)
    while sessions.live:
        sessions.step()
    before = (sessions.profile.residency_s, sessions.profile.footprint_tokens)
    for _ in range(2_000):
        sessions.step()
    assert (sessions.profile.residency_s, sessions.profile.footprint_tokens) == pytest.approx(before, rel=0.05)


def test_time_held_in_our_queue_is_no_residency() -> None:
    sessions = Sessions()
    sessions.start(1e9)
    for _ in range(10):
        sessions.step(growth=0)
    session = sessions.live.pop()[1]
    age_s = sessions.profile.suspend(session, sessions.now_s)
    for _ in range(500):
        sessions.step()
    sessions.profile.resume(session, age_s, sessions.now_s)
    sessions.profile.advance(sessions.now_s + 1.0)
    sessions.profile.leave(session, sessions.now_s + 1.0)
    assert sessions.profile.lived_s == pytest.approx(11.0, rel=0.2)


def test_sizes_are_the_product_limit_estimate() -> None:
    sizes, rng = Sizes(), SplitMix64(3)
    ends = [1_000 + rng.below(9_000) for _ in range(2_000)]
    for end in ends:
        first, last = size_bin(500), size_bin(end)
        sizes.grew(first, last)
        sizes.end(last)
    sizes.solve()
    for size in (2_000, 4_000, 8_000):
        truth = sum(end > size for end in ends) / len(ends)
        assert sizes.survival(size) / sizes.survival(600) == pytest.approx(truth, abs=0.04)
    assert sizes.growth_left(1_000) == pytest.approx(4_500, rel=0.1)


def test_running_sessions_are_censored_not_ended() -> None:
    sizes = Sizes()
    for _ in range(50):
        sizes.grew(size_bin(1_000), size_bin(2_000))
        sizes.end(size_bin(2_000))
    for _ in range(50):  # these have passed 2,000 and still run
        sizes.grew(size_bin(1_000), size_bin(6_000))
    sizes.solve()
    assert sizes.survival(5_000) / sizes.survival(1_000) == pytest.approx(0.5, abs=0.06)


def test_where_nobody_has_been_sizes_have_a_heavy_tail() -> None:
    sizes = Sizes()
    assert 0.0 < sizes.survival(20_000) / sizes.survival(10_000) < 1.0
    assert sizes.growth_left(10_000) > 5_000
