"""Session sources: single-turn classes from published percentiles, synthetic multi-turn ones, recorded traces.

Every source draws session n from its own generator, seeded by (seed, class, n).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import msgspec

from tidegate.sim.distributions import QuantileFunction, percentile
from tidegate.sim.traces import TraceSession
from tidegate.sim.workload import Segment, SessionPlan, SessionSource, TurnPlan, fit_to_context
from tidegate.types import WorkloadClass

# A prompt that repeats less than this of the one before was rewritten (compacted, or started over); above it, what is
# missing is rounding to cache blocks.
REWRITE_BELOW = 0.9


class SingleTurn:
    """One prompt, one output: RLVR and RLHF. Prompt and output lengths are independent."""

    def __init__(
        self,
        workload: WorkloadClass,
        prompt: QuantileFunction,
        output: QuantileFunction,
        *,
        seed: int,
        limit_tokens: int,
        factor: float = 1.0,
    ) -> None:
        self.workload = workload
        self._prompt = prompt
        self._output = output
        self._seed = seed
        self._limit_tokens = limit_tokens
        self._factor = factor

    def session(self, index: int) -> SessionPlan:
        rng = random.Random(f"{self._seed}/{self.workload}/{index}")
        prompt = _scaled(self._prompt.value(rng.random()), self._factor)
        output = _scaled(self._output.value(rng.random()), self._factor)
        turn = TurnPlan(new_tokens=prompt, output_tokens=output)
        return SessionPlan(workload=self.workload, index=index, turns=fit_to_context([turn], self._limit_tokens))


class MultiTurn:
    """A context that grows turn by turn, with a tool gap before each turn but the first."""

    def __init__(
        self,
        workload: WorkloadClass,
        *,
        seed: int,
        limit_tokens: int,
        first_tokens: int,
        turns: int,
        new_tokens: tuple[int, int],
        output_tokens: int,
        gap_s: QuantileFunction,
    ) -> None:
        self.workload = workload
        self._seed = seed
        self._limit_tokens = limit_tokens
        self._first_tokens = first_tokens
        self._turns = turns
        self._new_tokens = new_tokens
        self._output_tokens = output_tokens
        self._gap_s = gap_s

    def session(self, index: int) -> SessionPlan:
        rng = random.Random(f"{self._seed}/{self.workload}/{index}")
        turns = [
            TurnPlan(
                new_tokens=rng.randint(*self._new_tokens) + (0 if turn else self._first_tokens),
                output_tokens=self._output_tokens,
                gap_s=self._gap_s.value(rng.random()) if turn else 0.0,
            )
            for turn in range(self._turns)
        ]
        return SessionPlan(workload=self.workload, index=index, turns=fit_to_context(turns, self._limit_tokens))


class TraceScale(msgspec.Struct, frozen=True, kw_only=True):
    """From a recorded session to one that an engine can hold. The maps must be monotone: they keep the growth."""

    prompt: Callable[[float], float]
    output: Callable[[float], float]
    limit_tokens: int
    time_factor: float = 1.0
    # Recorded gaps reach hours because a person went away; a rollout's environment has no person. Cut, not dropped.
    gap_limit_s: float = math.inf
    # Every k recorded turns become one: outputs and gaps are summed, the context grows as recorded.
    merge_turns: int = 1


class TraceReplay:
    """Recorded sessions in a seeded order, each once before any comes again."""

    def __init__(self, workload: WorkloadClass, sessions: Sequence[TraceSession], scale: TraceScale, *, seed: int):
        if not sessions:
            raise ValueError(f"no recorded session for class {workload}")
        self.workload = workload
        self._sessions = sessions
        self._scale = scale
        self._seed = seed
        self._round = -1
        self._order = list(range(len(sessions)))

    def session(self, index: int) -> SessionPlan:
        recorded = self._sessions[self._position(index)]
        turns = fit_to_context(list(_replayed(recorded, self._scale)), self._scale.limit_tokens)
        shared = min(_scaled(self._scale.prompt(recorded.shared_prefix_tokens), 1.0), turns[0].new_tokens)
        segments = (Segment(f"{self.workload}/system", shared),) if recorded.shared_prefix_tokens else ()
        return SessionPlan(workload=self.workload, index=index, turns=turns, shared=segments)

    def _position(self, index: int) -> int:
        turn, offset = divmod(index, len(self._sessions))
        if turn != self._round:
            self._order = list(range(len(self._sessions)))
            random.Random(f"{self._seed}/{self.workload}/order/{turn}").shuffle(self._order)
            self._round = turn
        return self._order[offset]


class Grouped:
    """GRPO: every `size` consecutive sessions of a source are rollouts of one task and share its first prompt."""

    def __init__(self, source: SessionSource, size: int, *, limit_tokens: int) -> None:
        if size < 1:
            raise ValueError(f"a group of {size} sessions")
        self.workload = source.workload
        self._source = source
        self._size = size
        self._limit_tokens = limit_tokens

    def session(self, index: int) -> SessionPlan:
        plan = self._source.session(index)
        number = index // self._size
        leader = self._source.session(number * self._size)
        group = f"{self.workload}/group/{number}"
        prompt = leader.turns[0].new_tokens
        own = prompt - sum(segment.tokens for segment in leader.shared)
        first = msgspec.structs.replace(plan.turns[0], new_tokens=prompt)
        return msgspec.structs.replace(
            plan,
            turns=fit_to_context((first, *plan.turns[1:]), self._limit_tokens),
            shared=(*leader.shared, Segment(group, own)),
            group=group,
        )


def linear_map(factor: float) -> Callable[[float], float]:
    return lambda tokens: tokens * factor


def quantile_map(samples: Sequence[int], target: QuantileFunction, factor: float) -> Callable[[float], float]:
    """Rank among the recorded lengths -> the same rank in a published distribution: its percentiles come out, and the
    order of lengths within a session, its growth, stays as recorded."""
    ordered = sorted(samples)
    return lambda tokens: target.value(bisect_left(ordered, tokens) / len(ordered)) * factor


def context_factor(sessions: Sequence[TraceSession], limit_tokens: int) -> float:
    """Scales lengths so that the 99th percentile of the recorded contexts (prompt + output of a turn) is the limit;
    longer sessions are cut where they reach it."""
    contexts = [turn.prompt_tokens + turn.output_tokens for session in sessions for turn in session.turns]
    return limit_tokens / percentile(contexts, 0.99)


def _scaled(tokens: float, factor: float) -> int:
    return max(1, round(tokens * factor))


def _replayed(recorded: TraceSession, scale: TraceScale) -> Iterator[TurnPlan]:
    context = 0
    for start in range(0, len(recorded.turns), scale.merge_turns):
        merged = recorded.turns[start : start + scale.merge_turns]
        output = _scaled(sum(scale.output(turn.output_tokens) for turn in merged), 1.0)
        gap_s = sum(min(turn.gap_s, scale.gap_limit_s) for turn in merged) * scale.time_factor
        kept = _rewritten_to(recorded, max(1, start - scale.merge_turns + 1), start)
        keep_tokens = None if kept is None else min(context, _scaled(scale.prompt(kept), 1.0))
        base = context if keep_tokens is None else keep_tokens
        # What the recorded client dropped between turns (its own reasoning, say) must not add up over the session:
        # the next prompt takes the recorded length again.
        new = max(1, _scaled(scale.prompt(merged[0].prompt_tokens), 1.0) - base)
        yield TurnPlan(new_tokens=new, output_tokens=output, gap_s=gap_s if start else 0.0, keep_tokens=keep_tokens)
        context = base + new + output


def _rewritten_to(recorded: TraceSession, first: int, last: int) -> int | None:
    """The shortest prefix that survived a rewrite in turns first..last; None: the context only grew."""
    kept: int | None = None
    for index in range(first, last + 1):
        prefix = recorded.turns[index].prefix_tokens
        if index and prefix < REWRITE_BELOW * recorded.turns[index - 1].prompt_tokens:
            kept = prefix if kept is None else min(kept, prefix)
    return kept
