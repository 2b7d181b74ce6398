from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.data import CODING_AGENT_TRACE
from tidegate.errors import ConfigError
from tidegate.sim.distributions import QuantileFunction, percentile
from tidegate.sim.prompts import FIRST_ID, TokenStreams
from tidegate.sim.traces import read_trace
from tidegate.sim.workload import (
    DeficitRelease,
    RandomRelease,
    SessionPlan,
    SessionStream,
    TurnPlan,
    fit_to_context,
)
from tidegate.sim.workload_names import (
    PAPER_CONTEXT_TOKENS,
    PAPER_SHARES,
    WORKLOADS,
    WorkloadOptions,
    build_workload,
)
from tidegate.sim.workload_sources import TraceReplay, TraceScale, linear_map

PAPER = build_workload("paper", WorkloadOptions(context_tokens=PAPER_CONTEXT_TOKENS))


def plans(workload: str, count: int) -> list[SessionPlan]:
    return [PAPER.sources[workload].session(index) for index in range(count)]


# --- distributions ------------------------------------------------------------------------------------------------
def test_a_quantile_function_passes_through_its_points() -> None:
    q = QuantileFunction.through(148, 1612, 3930)
    assert [round(q.value(u)) for u in (0.5, 0.95, 0.99)] == [148, 1612, 3930]
    assert q.value(0.0) == pytest.approx(148 * 148 / 1612)


def test_the_upper_end_respects_the_limit_but_never_undercuts_p99() -> None:
    assert QuantileFunction.through(10, 100, 200, limit=250).value(1.0) == pytest.approx(250)
    assert QuantileFunction.through(10, 100, 200, limit=150).value(1.0) == pytest.approx(200)
    assert QuantileFunction.through(10, 100, 200).value(1.0) == pytest.approx(400)


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_quantile_function_is_monotone(a: float, b: float) -> None:
    q = QuantileFunction.through(60, 2564, 2564)
    assert q.value(min(a, b)) <= q.value(max(a, b)) * (1 + 1e-12)


def test_the_exact_mean_is_the_mean_of_samples() -> None:
    q = QuantileFunction.through(60, 2564, 4000)
    rng = random.Random(1)
    assert sum(q.value(rng.random()) for _ in range(50_000)) / 50_000 == pytest.approx(q.mean(), rel=0.02)


@pytest.mark.parametrize(
    "points",
    [[(0.0, 1.0)], [(0.1, 1.0), (1.0, 2.0)], [(0.0, 2.0), (1.0, 1.0)], [(0.0, 0.0), (1.0, 1.0)]],
)
def test_points_that_are_no_quantile_function_are_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="must"):
        QuantileFunction(points)


def test_a_percentile_of_nothing_is_not_a_number() -> None:
    assert math.isnan(percentile([], 0.5))
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.25) == 2.5


# --- the paper's classes ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("workload", "prompts", "outputs"),
    [
        ("rlvr", (156, 1129, 1277), (47_583, 130_815, 130_958)),
        ("rlhf", (60, 2564, 2564), (7344, 24_447, 37_101)),
    ],
)
def test_single_turn_classes_have_the_published_percentiles(
    workload: str, prompts: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    turns = [plan.turns[0] for plan in plans(workload, 8000)]
    for p, prompt, output in zip((0.5, 0.95, 0.99), prompts, outputs, strict=True):
        assert percentile([turn.new_tokens for turn in turns], p) == pytest.approx(prompt, rel=0.06)
        assert percentile([turn.output_tokens for turn in turns], p) == pytest.approx(output, rel=0.06)


def test_agentic_requests_have_the_published_percentiles() -> None:
    sessions = plans("agentic", 355)
    prompts = [tokens for plan in sessions for tokens in plan.prompt_tokens()]
    outputs = [turn.output_tokens for plan in sessions for turn in plan.turns]
    for p, prompt, output in ((0.5, 37_757, 148), (0.95, 103_209, 1612), (0.99, 123_207, 3930)):
        # Prompts a little above: where a recorded client dropped its own output, the context here keeps it.
        assert percentile(prompts, p) == pytest.approx(prompt, rel=0.09)
        assert percentile(outputs, p) == pytest.approx(output, rel=0.06)
    assert len(prompts) / len(sessions) == pytest.approx(69.6, rel=0.1)


def test_tool_gaps_are_heavy_tailed() -> None:
    gaps = [turn.gap_s for plan in plans("agentic", 355) for turn in plan.turns[1:]]
    assert percentile(gaps, 0.95) >= 5 * percentile(gaps, 0.5) > 0


# --- scaling a trace ----------------------------------------------------------------------------------------------
def test_every_context_fits_and_scaling_reaches_the_limit() -> None:
    source = build_workload("trace", WorkloadOptions(context_tokens=4096)).sources["agentic"]
    peaks = [source.session(index).peak_tokens() for index in range(355)]
    assert max(peaks) <= 4096
    assert percentile(peaks, 0.95) > 0.9 * 4096


def test_each_recorded_session_comes_once_before_any_comes_again() -> None:
    source = build_workload("trace", WorkloadOptions()).sources["agentic"]
    first = [source.session(index).turns for index in range(355)]
    again = [source.session(index).turns for index in range(355, 710)]
    assert first != again
    assert Counter(first) == Counter(again)


def test_merging_turns_keeps_outputs_gaps_and_growth() -> None:
    options = WorkloadOptions(context_tokens=100_000_000)  # nothing is cut
    one = build_workload("trace", options).sources["agentic"]
    merged = build_workload("trace", WorkloadOptions(context_tokens=100_000_000, merge_turns=4)).sources["agentic"]
    for index in range(20):
        fine, coarse = one.session(index), merged.session(index)
        assert len(coarse.turns) == math.ceil(len(fine.turns) / 4)
        assert sum(t.output_tokens for t in coarse.turns) == pytest.approx(
            sum(t.output_tokens for t in fine.turns), rel=1e-3
        )
        assert sum(t.gap_s for t in coarse.turns) <= sum(t.gap_s for t in fine.turns)
        assert coarse.prompt_tokens()[0] == fine.prompt_tokens()[0]


def test_a_rewritten_context_keeps_only_its_recorded_prefix() -> None:
    recorded = {s.session: s for s in read_trace(CODING_AGENT_TRACE).sessions}["cc-0001"]
    assert recorded.turns[-1].prefix_tokens == 17_216  # of 147,697: the client started over
    scale = TraceScale(prompt=linear_map(1.0), output=linear_map(1.0), limit_tokens=1_000_000)
    plan = TraceReplay("agentic", [recorded], scale, seed=0).session(0)
    assert [index for index, turn in enumerate(plan.turns) if turn.keep_tokens is not None] == [40]
    assert plan.turns[40].keep_tokens == 17_216
    assert plan.prompt_tokens()[40] == recorded.turns[40].prompt_tokens


def test_cutting_to_the_context_keeps_a_first_turn() -> None:
    turns = [TurnPlan(new_tokens=500, output_tokens=100), TurnPlan(new_tokens=10, output_tokens=1)]
    assert fit_to_context(turns, 10_000) == tuple(turns)
    (only,) = fit_to_context(turns, 550)
    assert (only.new_tokens, only.output_tokens) == (500, 50)
    (only,) = fit_to_context(turns, 100)
    assert only.new_tokens + only.output_tokens == 100


# --- names, groups, seeds -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_session_is_a_function_of_seed_class_and_index(name: str) -> None:
    one, other = (build_workload(name, WorkloadOptions(seed=3)) for _ in range(2))
    moved = build_workload(name, WorkloadOptions(seed=4))
    for workload in one.shares:
        backwards = [other.sources[workload].session(index) for index in reversed(range(12))][::-1]
        assert [one.sources[workload].session(index) for index in range(12)] == backwards
        assert backwards != [moved.sources[workload].session(index) for index in range(12)]


def test_an_unknown_workload_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean cpu-mixed"):
        build_workload("cpu-mixd", WorkloadOptions())


def test_a_mixture_over_an_unknown_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such class"):
        build_workload("paper", WorkloadOptions(shares={"agentic": 1.0, "batch": 1.0}))


def test_a_group_shares_its_first_prompt_and_nothing_else() -> None:
    source = build_workload("paper", WorkloadOptions(group_size=4)).sources["rlvr"]
    members = [source.session(index) for index in range(8)]
    streams = TokenStreams(0, 4096)
    prompts = [tuple(streams.turn_ids(plan, 0)) for plan in members]
    assert len(set(prompts[:4])) == len(set(prompts[4:])) == 1
    assert prompts[0] != prompts[4]
    assert [plan.group for plan in members] == ["rlvr/group/0"] * 4 + ["rlvr/group/1"] * 4
    assert len({plan.turns[0].output_tokens for plan in members[:4]}) > 1


def test_groups_of_agentic_sessions_share_the_system_prompt_too() -> None:
    source = build_workload("trace", WorkloadOptions(group_size=2)).sources["agentic"]
    streams = TokenStreams(0, 4096)
    a, b = (streams.turn_ids(source.session(index), 0) for index in (0, 2))
    shared = min(source.session(index).shared[0].tokens for index in (0, 2))
    assert a[:shared] == b[:shared]
    assert a != b


# --- the trainer --------------------------------------------------------------------------------------------------
@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=6), st.integers(1, 300))
def test_deficit_release_is_never_a_session_away_from_the_mixture(weights: list[float], count: int) -> None:
    shares = {str(index): weight for index, weight in enumerate(weights)}
    release = DeficitRelease(shares)
    started = Counter(release.next_class() for _ in range(count))
    for workload, weight in shares.items():
        assert abs(started[workload] - weight / sum(weights) * count) < len(shares)


def test_random_release_is_seeded_and_follows_the_mixture() -> None:
    draws = [RandomRelease(PAPER_SHARES, 5) for _ in range(2)]
    first, second = ([release.next_class() for _ in range(4000)] for release in draws)
    assert first == second
    assert Counter(first)["agentic"] / 4000 == pytest.approx(0.486, abs=0.03)


def test_a_stream_numbers_the_sessions_of_each_class() -> None:
    workload = build_workload("cpu-mixed", WorkloadOptions())
    stream = SessionStream(workload, DeficitRelease(workload.shares))
    got = [stream.next_session() for _ in range(10)]
    assert Counter(plan.workload for plan in got) == {"agentic": 5, "rlvr": 3, "rlhf": 2}
    assert [plan.index for plan in got if plan.workload == "rlvr"] == [0, 1, 2]


@pytest.mark.parametrize("shares", [{"a": 0.0, "b": 1.0}, {"a": -1.0, "b": 2.0}])
def test_a_class_without_a_share_is_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive share"):
        DeficitRelease(shares)


# --- token ids ----------------------------------------------------------------------------------------------------
def test_a_longer_read_of_a_stream_extends_a_shorter() -> None:
    streams = TokenStreams(1, 2048)
    assert streams.ids("a", 100)[:37] == streams.ids("a", 37)
    assert streams.ids("a", 50) != streams.ids("b", 50)
    assert streams.ids("a", 50) != TokenStreams(2, 2048).ids("a", 50)
    assert streams.shared_ids("a", 10) == streams.shared_ids("a", 60)[:10]


def test_ids_stay_between_the_control_tokens_and_the_vocabulary() -> None:
    ids = TokenStreams(1, 40).ids("a", 5000)
    assert min(ids) == FIRST_ID
    assert max(ids) == 39
    with pytest.raises(ValueError, match="no room"):
        TokenStreams(1, FIRST_ID)


def test_a_turn_has_the_planned_number_of_tokens() -> None:
    plan = build_workload("trace", WorkloadOptions()).sources["agentic"].session(0)
    streams = TokenStreams(1, 2048)
    assert [len(streams.turn_ids(plan, i)) for i in range(len(plan.turns))] == [t.new_tokens for t in plan.turns]
