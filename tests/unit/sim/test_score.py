from __future__ import annotations

import math
import random

import pytest

from tidegate.sim.score import (
    RequestRecord,
    SessionRecord,
    Window,
    contract_rate,
    histogram_percentile,
    hit_rate,
    hold_percentiles,
    mean_in_flight,
    mean_interval,
    ratio_interval,
    recomputed_tokens,
    score,
    total_variation_pp,
)

SHARES = {"a": 0.75, "b": 0.25}


def session(workload: str, started_s: float, ended_s: float | None, completed: bool = True) -> SessionRecord:
    return SessionRecord(workload=workload, started_s=started_s, ended_s=ended_s, completed=completed)


def request(ended_s: float, *, prompt: int = 100, cached: int | None = 0, repeated: int = 0) -> RequestRecord:
    return RequestRecord(
        workload="a",
        sent_s=ended_s - 2,
        first_byte_s=ended_s - 1,
        ended_s=ended_s,
        prompt_tokens=prompt,
        output_tokens=10,
        cached_tokens=cached,
        repeated_tokens=repeated,
    )


def test_the_contract_rate_is_the_worst_class_by_its_share() -> None:
    assert contract_rate({"a": 30, "b": 10}, SHARES, 10.0) == pytest.approx(4.0)
    assert contract_rate({"a": 300, "b": 1}, SHARES, 10.0) == pytest.approx(0.4)


def test_a_starved_class_makes_the_contract_rate_zero() -> None:
    assert contract_rate({"a": 1000}, SHARES, 10.0) == 0


def test_sessions_count_in_the_window_in_which_they_end() -> None:
    sessions = [
        session("a", 0, 15),  # began in the warm-up
        session("a", 12, 20),  # ends at the right edge, which is outside
        session("b", 11, 14),
        session("a", 13, None),  # open
        session("a", 1, 9),  # before
        session("a", 12, 13, completed=False),
    ]
    result = score(sessions, [], SHARES, Window(10, 20))
    assert result.completed == {"a": 1, "b": 1}
    assert result.failed == 1
    assert result.sessions_per_min == {"a": 6, "b": 6}
    assert result.contract_per_min == pytest.approx(1 / 10 / 0.75 * 60)


def test_long_sessions_are_not_undercounted_by_the_edges() -> None:
    """A steady stream of class b sessions as long as the window: one ends every second, whatever their length."""
    sessions = [session("b", end - 100, end) for end in range(400)]
    counted = score(sessions, [], {"b": 1.0}, Window(150, 250)).completed["b"]
    inside = sum(s.started_s >= 150 and s.ended_s is not None and s.ended_s < 250 for s in sessions)
    assert counted == 100
    assert inside == 0


def test_mean_in_flight_integrates_over_the_window_only() -> None:
    sessions = [session("a", 0, 15), session("a", 10, None), session("a", 18, 40), session("a", 30, None)]
    assert mean_in_flight(sessions, Window(10, 20)) == pytest.approx((5 + 10 + 2) / 10)


def test_tv_is_half_the_sum_of_share_differences() -> None:
    assert total_variation_pp({"a": 75, "b": 25}, SHARES) == pytest.approx(0)
    assert total_variation_pp({"a": 100, "b": 0}, SHARES) == pytest.approx(25)
    assert total_variation_pp({"a": 0, "b": 0}, SHARES) is None


def test_the_papers_consumed_mixture_has_the_papers_tv() -> None:
    target = {"agentic": 0.486, "rlvr": 0.331, "rlhf": 0.182}
    assert total_variation_pp({"agentic": 483, "rlvr": 294, "rlhf": 224}, target) == pytest.approx(4.14, abs=0.1)


def test_hit_rate_takes_a_silent_reply_as_zero_only_if_others_speak() -> None:
    assert hit_rate([request(1, cached=80), request(2, cached=None)]) == pytest.approx(0.4)
    assert hit_rate([request(1, cached=None), request(2, cached=None)]) is None
    assert hit_rate([]) is None


def test_recomputed_tokens_are_repeated_ones_that_were_not_cached() -> None:
    replies = [request(1, cached=64, repeated=96), request(2, cached=200, repeated=96), request(3, cached=None)]
    assert recomputed_tokens(replies) == 32
    assert recomputed_tokens([request(3, cached=None, repeated=96)]) is None


def test_requests_outside_the_window_do_not_count() -> None:
    result = score([], [request(5), request(15, cached=50, repeated=80), request(25)], SHARES, Window(10, 20))
    assert (result.prompt_tokens, result.output_tokens) == (100, 10)
    assert result.hit_rate == 0.5
    assert result.recomputed_prompt_tokens == 30
    assert result.recomputed_prompt_share == pytest.approx(0.3)
    assert (result.first_byte_p50_s, result.first_byte_p95_s) == (1, 1)


def test_an_empty_run_has_a_score_of_unknowns() -> None:
    result = score([], [], SHARES, Window(0, 10))
    assert result.contract_per_min == 0
    assert (result.tv_pp, result.hit_rate, result.window_residencies, result.hold_p50_s) == (None, None, None, None)


def test_window_residencies_say_how_long_a_run_was() -> None:
    sessions = [session("a", 5, 15), session("b", 0, 18), session("a", 16, 17, completed=False)]
    result = score(sessions, [], SHARES, Window(10, 20))
    assert result.residency_s == {"a": 10, "b": 18}
    assert result.window_residencies == pytest.approx(10 / 14)


def test_histogram_percentiles_use_only_what_was_gained() -> None:
    before = {0.1: 100.0, 1.0: 100.0, math.inf: 100.0}
    after = {0.1: 150.0, 1.0: 190.0, math.inf: 200.0}
    assert histogram_percentile(before, after, 0.25) == pytest.approx(0.05)
    assert histogram_percentile(before, after, 0.5) == pytest.approx(0.1)
    assert histogram_percentile(before, after, 0.7) == pytest.approx(0.1 + 0.9 * 0.5)
    assert histogram_percentile(before, after, 0.99) == 1.0
    assert histogram_percentile(after, after, 0.5) is None


def test_hold_percentiles_leave_out_what_was_placed_at_once() -> None:
    before = {0.001: 1000.0, 1.0: 1000.0, 10.0: 1000.0, math.inf: 1000.0}
    after = {0.001: 9000.0, 1.0: 9000.0, 10.0: 9100.0, math.inf: 9100.0}
    p50, p95 = hold_percentiles(before, after, time_scale=20)
    assert (p50, p95) == pytest.approx((20 * 5.5, 20 * 9.55))
    assert hold_percentiles(before, before) == (0.0, 0.0)
    assert hold_percentiles({}, {0.001: 5.0, 1.0: 5.0}) == (0.0, 0.0)


def test_a_paired_ratio_removes_what_both_share() -> None:
    rng = random.Random(0)
    machine = [rng.uniform(0.5, 1.5) for _ in range(8)]
    theirs = [100 * m for m in machine]
    ours = [130 * m for m in machine]
    ratio = ratio_interval(ours, theirs)
    assert (ratio.low, ratio.mean, ratio.high) == pytest.approx((1.3, 1.3, 1.3))
    alone = mean_interval(ours)
    assert alone.high - alone.low > 20


def test_an_interval_holds_its_mean_and_needs_repeats() -> None:
    interval = mean_interval([3.0, 1.0, 2.0])
    assert interval.low <= interval.mean == 2.0 <= interval.high
    assert mean_interval([5.0]).low == mean_interval([5.0]).high == 5.0
    with pytest.raises(ValueError, match="no repeats"):
        mean_interval([])
    with pytest.raises(ValueError, match="same number"):
        ratio_interval([1.0], [1.0, 2.0])
