"""Advice holds for any pool, mixture and history: no class with a share starves, and the sum is bounded."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policy.shell import Shell

from tidegate.policy import policies
from tidegate.policy.advice import Advisor, split
from tidegate.types import Place, ReplicaAdded

CLASSES = ("a", "b", "c", "d")
SHARES = st.dictionaries(st.sampled_from(CLASSES), st.floats(1e-9, 1.0), max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.sampled_from(CLASSES), st.integers(1, 50_000)),
        st.tuples(st.just("finish"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("tick"), st.floats(0.1, 30.0), st.booleans()),
        st.tuples(st.just("health"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("mixture"), SHARES, st.just(0)),
        st.tuples(st.just("replica"), st.integers(0, 3), st.integers(1, 2_000_000)),
    ),
    max_size=40,
)


class Pool(Shell):
    opened = 0

    def do(self, what: str, one: object, two: object) -> None:
        match what:
            case "turn":
                self.opened += 1
                decision = self.arrive(f"s{self.opened}", prompt_tokens=two, workload=one)
                if isinstance(decision, Place):
                    self.end(self.requests, prompt_tokens=two, completion_tokens=5)
            case "finish":
                self.finish(f"s{one}")
            case "tick":
                self.tick(one, sampled=bool(two))  # type: ignore[arg-type]
            case "health":
                self.health(self.urls[one % len(self.urls)], bool(two))  # type: ignore[operator]
            case "mixture":
                assert isinstance(one, dict)
                total = sum(one.values())
                self.mixture(**{name: share / total for name, share in one.items()})
            case "replica":
                url = f"http://new{one}"
                self.send(ReplicaAdded(at_s=self.now_s, replica=url, kv_capacity_tokens=two))  # type: ignore[arg-type]


@settings(deadline=None)
@given(policy=st.sampled_from(list(policies())), capacity=st.none() | st.integers(1, 2_000_000), steps=STEPS)
def test_nobody_starves_and_the_sum_is_bounded(
    policy: str, capacity: int | None, steps: list[tuple[str, object, object]]
) -> None:
    pool = Pool(policy, 3, capacity=capacity)
    advisor = Advisor(pool.scheduler)
    band = 1.0 + pool.scheduler.params.advice.band_fraction
    for step in steps:
        pool.do(*step)
        said = advisor.look()
        fresh = Advisor(pool.scheduler).look()
        assert {name for name, share in pool.ledger.mixture.items() if share} <= said.classes.keys()
        limit = pool.scheduler.policy.session_limit()
        assert all(one.sessions >= 1 for one in said.classes.values())
        assert all(bool(one.held_sessions) is (limit is not None) for one in said.classes.values())
        if said.classes:
            assert said.sessions == sum(one.sessions for one in said.classes.values())
            assert abs(sum(one.share for one in said.classes.values()) - 1.0) < 1e-6 or not pool.ledger.mixture
        for name, one in said.classes.items():
            live, now = (
                one.sessions - one.held_sessions,
                fresh.classes[name].sessions - fresh.classes[name].held_sessions,
            )
            assert one.held_sessions <= max(1, live)
            assert now <= live <= max(now + 1, now * band / (1.0 - (band - 1.0)) + 1)
        if limit is not None and pool.ledger.usable and fresh.classes:
            assert fresh.sessions - fresh.held_sessions == limit


@given(sessions=st.integers(0, 10_000), weights=st.dictionaries(st.text(max_size=2), st.floats(1e-6, 1e6), min_size=1))
def test_a_split_is_whole_and_within_one_of_the_exact_part(sessions: int, weights: dict[str, float]) -> None:
    parts = split(sessions, weights)
    assert sum(parts.values()) == sessions
    total = sum(weights.values())
    assert all(abs(part - sessions * weights[name] / total) < 1.0 + 1e-6 for name, part in parts.items())
