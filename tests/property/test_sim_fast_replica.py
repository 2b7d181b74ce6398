"""The fast replica against the exact one: the same calls at the same times give the same answers at the same times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.block_counts import check_exact, check_fast

from tidegate.sim.contexts import Branches
from tidegate.sim.fast_replica import FastReplica
from tidegate.sim.kernel import Kernel
from tidegate.sim.latency import LatencyModel
from tidegate.sim.replica import ReplicaConfig
from tidegate.sim.replicas import ExactReplica, SimReplica, Totals
from tidegate.sim.rollout import Call, Rollout
from tidegate.sim.workload import Segment, SessionPlan, TurnPlan

# Unlike in any step time, so that no arrival falls on a step's end, where either order is right.
LATENCY = LatencyModel(
    step_s=0.0101,
    prefill_token_s=0.00037,
    attention_pair_s=1.3e-6,
    decode_seq_s=0.00053,
    kv_token_s=1.1e-6,
    prompt_s=0.0037,
)
BLOCK = 4
SHARED = 13  # no whole number of blocks: see FastCache on second copies


@st.composite
def plans(draw: st.DrawFn) -> list[SessionPlan]:
    sessions = []
    for index in range(draw(st.integers(1, 8))):
        shared = (Segment("system", SHARED),) if draw(st.booleans()) else ()
        turns = [
            TurnPlan(
                new_tokens=draw(st.integers(1, 40)) + (SHARED + 1 if turn == 0 else 0),
                output_tokens=draw(st.integers(1, 30)),
                gap_s=draw(st.floats(0.0, 2.0)) if turn else 0.0,
                keep_tokens=draw(st.one_of(st.none(), st.integers(0, 60))) if turn else None,
            )
            for turn in range(draw(st.integers(1, 5)))
        ]
        sessions.append(SessionPlan(workload="w", index=index, turns=tuple(turns), shared=shared))
    return sessions


@st.composite
def configs(draw: st.DrawFn) -> ReplicaConfig:
    max_num_seqs = draw(st.integers(1, 6))
    return ReplicaConfig(
        num_blocks=draw(st.integers(100, 220)),  # of 4 tokens: one to three of the longest contexts
        block_size=BLOCK,
        max_model_len=396,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 64)),
        enable_prefix_caching=draw(st.booleans()),
        reserve_full_prompt=draw(st.booleans()),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        latency=LATENCY,
    )


@st.composite
def crowds(draw: st.DrawFn) -> list[SessionPlan]:
    """Short prompts and long answers: more than fits, so that those who run preempt each other."""
    sessions = []
    for index in range(draw(st.integers(3, 8))):
        turns = [
            TurnPlan(new_tokens=draw(st.integers(1, 12)), output_tokens=draw(st.integers(8, 40)))
            for _ in range(draw(st.integers(1, 2)))
        ]
        sessions.append(SessionPlan(workload="w", index=index, turns=tuple(turns)))
    return sessions


@st.composite
def tight_configs(draw: st.DrawFn) -> ReplicaConfig:
    return ReplicaConfig(
        num_blocks=draw(st.integers(29, 40)),
        block_size=BLOCK,
        max_model_len=112,
        max_num_seqs=8,
        max_num_batched_tokens=draw(st.integers(8, 24)),
        enable_prefix_caching=draw(st.booleans()),
        reserve_full_prompt=draw(st.booleans()),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        latency=LATENCY,
    )


class Run:
    """Closed-loop sessions on one replica, with disturbances at given times."""

    def __init__(
        self,
        make: Callable[..., SimReplica],
        config: ReplicaConfig,
        sessions: list[SessionPlan],
        starts_s: list[float],
        disturbances: list[tuple[float, str]],
        releases: bool = False,
    ) -> None:
        self.kernel = Kernel()
        self.replica = make(self.kernel, config, self._done, releases=releases)
        self.answers: list[tuple[str, int, float, int | None]] = []
        self.seen: list[tuple[int, int, int, int]] = []
        self.rollouts: dict[int, Rollout] = {}
        branches = Branches()
        for plan, start_s in zip(sessions, starts_s, strict=True):
            rollout = Rollout(f"s{plan.index}", plan, branches, start_s)
            self.kernel.at(start_s, lambda rollout=rollout: self._ask(rollout))
        for at_s, what in disturbances:
            self.kernel.at(at_s, lambda what=what: getattr(self, what)())

    def run(self) -> Totals:
        """Blocks are counted after every event."""
        while self.kernel.next_s is not None:
            self.kernel.run(self.kernel.next_s)
            if isinstance(self.replica, ExactReplica):
                check_exact(self.replica.replica)
            elif isinstance(self.replica, FastReplica):
                check_fast(self.replica)
        totals = self.replica.totals()
        assert (totals.running, totals.waiting, totals.used_blocks) == (0, 0, 0)
        return totals

    def _ask(self, rollout: Rollout) -> None:
        prompt, repeated = rollout.context.begin_turn(rollout.turn)
        turn = rollout.plan.turns[rollout.turn]
        number = rollout.plan.index * 100 + rollout.turn
        call = Call(number, rollout, prompt, repeated, turn.output_tokens, self.kernel.now_s)
        call.priority = rollout.plan.index % 3
        self.rollouts[number] = rollout
        rollout.call = call
        self.replica.submit(call)

    def _done(self, call: Call) -> None:
        rollout = call.rollout
        if rollout.call is not call:
            return
        self.answers.append((rollout.id, rollout.turn, self.kernel.now_s, call.cached_tokens))
        rollout.call = None
        rollout.context.end_turn(call.output_tokens)
        rollout.turn += 1
        if rollout.turn < len(rollout.plan.turns):
            self.kernel.after(rollout.plan.turns[rollout.turn].gap_s, lambda: self._ask(rollout))
        else:
            self.kernel.after(0.00123, lambda: self.replica.release(rollout))

    # --- disturbances ------------------------------------------------------------------------------------------
    def flush(self) -> None:
        self.replica.flush()

    def pause(self) -> None:
        self.replica.pause()
        self.kernel.after(0.777, self.replica.resume)

    def abort(self) -> None:
        for _, rollout in sorted(self.rollouts.items()):
            if rollout.call is not None:
                call, rollout.call = rollout.call, None
                self.seen.append((call.id, self.replica.abort(call), 0, 0))
                self.replica.release(rollout)
                return

    def look(self) -> None:
        totals = self.replica.totals()
        self.seen.append((totals.waiting, totals.generation_tokens, totals.prompt_tokens, totals.preemptions))
        self.seen.extend((0, 0, self.replica.resident_tokens(r), 0) for _, r in sorted(self.rollouts.items()))


def agree(
    config: ReplicaConfig,
    sessions: list[SessionPlan],
    starts_s: list[float],
    disturbances: list[tuple[float, str]],
    releases: bool = False,
) -> None:
    runs: list[Any] = [
        Run(make, config, sessions, starts_s, disturbances, releases) for make in (ExactReplica, FastReplica)
    ]
    exact, fast = (run.run() for run in runs)
    assert [answer[:2] for answer in runs[1].answers] == [answer[:2] for answer in runs[0].answers]
    assert [answer[3] for answer in runs[1].answers] == [answer[3] for answer in runs[0].answers]
    assert [a[2] for a in runs[1].answers] == pytest.approx([a[2] for a in runs[0].answers], abs=1e-6)
    assert runs[1].seen == runs[0].seen
    assert fast == exact


def starts(data: st.DataObject, sessions: list[SessionPlan], within_s: float) -> list[float]:
    return [data.draw(st.floats(0.0, within_s)) + 0.00001 * index for index in range(len(sessions))]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_fast_replica_answers_as_the_exact_one(data: st.DataObject) -> None:
    config, sessions = data.draw(configs()), data.draw(plans())
    what = st.tuples(st.floats(0.0, 6.0), st.sampled_from(["flush", "pause", "abort", "look", "look"]))
    agree(config, sessions, starts(data, sessions, 3.0), data.draw(st.lists(what, max_size=5)))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_ended_sessions_are_evicted_first_as_by_the_exact_one(data: st.DataObject) -> None:
    """Without a flush: the blocks that it empties lie behind released ones in the exact pool, as in vLLM's, and are
    taken before any other by the fast one. What is evicted in their place is dead."""
    config, sessions = data.draw(configs()), data.draw(plans())
    what = st.tuples(st.floats(0.0, 6.0), st.sampled_from(["pause", "abort", "look", "look"]))
    agree(config, sessions, starts(data, sessions, 3.0), data.draw(st.lists(what, max_size=5)), releases=True)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_it_preempts_as_the_exact_one(data: st.DataObject) -> None:
    config, sessions = data.draw(tight_configs()), data.draw(crowds())
    agree(config, sessions, starts(data, sessions, 0.3), [])
