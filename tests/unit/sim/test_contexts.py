"""Two contexts have a block hash in common exactly where all tokens up to the block's end are the same."""

from __future__ import annotations

from tidegate.sim.contexts import Branches, Context
from tidegate.sim.workload import Segment, SessionPlan, TurnPlan


def plan(index: int, *turns: TurnPlan, shared: tuple[Segment, ...] = ()) -> SessionPlan:
    return SessionPlan(workload="w", index=index, turns=turns, shared=shared)


def test_sessions_share_the_whole_blocks_of_a_shared_head_and_no_more() -> None:
    branches = Branches()
    head = (Segment("system", 10),)
    one, two = (Context(plan(i, TurnPlan(new_tokens=32, output_tokens=4), shared=head), branches) for i in (0, 1))
    for context in (one, two):
        assert context.begin_turn(0) == (32, 0)
    a, b = one.hashes(4, 32), two.hashes(4, 32)
    assert len(a) == len(b) == 8
    assert [x == y for x, y in zip(a, b, strict=True)] == [True, True] + [False] * 6


def test_heads_of_different_length_share_what_both_have() -> None:
    branches = Branches()
    one = Context(plan(0, TurnPlan(new_tokens=32, output_tokens=1), shared=(Segment("system", 16),)), branches)
    two = Context(plan(1, TurnPlan(new_tokens=32, output_tokens=1), shared=(Segment("system", 8),)), branches)
    a, b = one.hashes(4, 32), two.hashes(4, 32)
    assert [x == y for x, y in zip(a, b, strict=True)] == [True, True] + [False] * 6


def test_a_group_is_told_apart_by_what_comes_before_its_prompt() -> None:
    branches = Branches()
    turn = TurnPlan(new_tokens=32, output_tokens=1)
    one = Context(plan(0, turn, shared=(Segment("x", 8), Segment("group", 8))), branches)
    two = Context(plan(1, turn, shared=(Segment("y", 8), Segment("group", 8))), branches)
    assert not set(one.hashes(4, 16)) & set(two.hashes(4, 16))


def test_a_context_that_grows_keeps_its_hashes() -> None:
    context = Context(
        plan(0, TurnPlan(new_tokens=10, output_tokens=6), TurnPlan(new_tokens=5, output_tokens=1)), Branches()
    )
    assert context.begin_turn(0) == (10, 0)
    assert context.reach_tokens == 16
    before = list(context.hashes(4, 16))
    context.end_turn(6)
    assert context.begin_turn(1) == (21, 16)
    assert context.hashes(4, 21)[:4] == before


def test_a_rewritten_context_keeps_the_hashes_before_the_cut_only() -> None:
    context = Context(
        plan(0, TurnPlan(new_tokens=16, output_tokens=4), TurnPlan(new_tokens=11, output_tokens=1, keep_tokens=9)),
        Branches(),
    )
    context.begin_turn(0)
    before = list(context.hashes(4, 20))
    context.end_turn(4)
    assert context.begin_turn(1) == (20, 9)
    after = context.hashes(4, 20)
    assert [x == y for x, y in zip(before, after, strict=True)] == [True, True, False, False, False]


def test_a_context_rewritten_from_its_start_has_nothing_left() -> None:
    turns = (TurnPlan(new_tokens=16, output_tokens=4), TurnPlan(new_tokens=16, output_tokens=1, keep_tokens=0))
    context = Context(plan(0, *turns, shared=(Segment("system", 8),)), Branches())
    context.begin_turn(0)
    before = list(context.hashes(4, 20))
    context.end_turn(4)
    assert context.begin_turn(1) == (16, 0)
    assert not set(before) & set(context.hashes(4, 16))
