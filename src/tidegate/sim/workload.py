"""What a trainer asks for: sessions with their turns, by class, in the proportions of a mixture.

A `SessionPlan` is symbolic: lengths, tool gaps, and named token streams where sessions share a prefix. The simulator
runs plans as they are; the load driver turns them into token ids (`sim.prompts`). A `SessionSource` gives the n-th
session of one class as a pure function of its seed and n, so that every policy is offered the same sessions whatever
the order in which it completes them.

Releases model a closed-loop trainer: whenever a session ends, the next one starts, of the class that the mixture rho
asks for. `DeficitRelease` picks the class that is most behind its share among the sessions STARTED so far;
`RandomRelease` draws from rho.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from tidegate.types import WorkloadClass


class Segment(msgspec.Struct, frozen=True):
    """The next `tokens` of a prompt are the first ones of a named stream: the same for every session that names it."""

    stream: str
    tokens: int


class TurnPlan(msgspec.Struct, frozen=True, kw_only=True):
    new_tokens: int  # prompt tokens after the context so far (previous prompt + previous output)
    output_tokens: int
    gap_s: float = 0.0  # the tool's time before this turn
    keep_tokens: int | None = None  # the client rewrote its context: only its first tokens stay


class SessionPlan(msgspec.Struct, frozen=True, kw_only=True):
    workload: WorkloadClass
    index: int  # n-th session of its class
    turns: tuple[TurnPlan, ...]
    shared: tuple[Segment, ...] = ()  # the head of the first prompt; the rest of it is the session's own
    group: str | None = None

    def prompt_tokens(self) -> list[int]:
        """The prompt length of every turn, if outputs come out as planned."""
        lengths: list[int] = []
        context = 0
        for turn in self.turns:
            context = carried_tokens(turn, context) + turn.new_tokens
            lengths.append(context)
            context += turn.output_tokens
        return lengths

    def peak_tokens(self) -> int:
        """The largest context: the footprint that the session needs at its worst."""
        return max(prompt + turn.output_tokens for prompt, turn in zip(self.prompt_tokens(), self.turns, strict=True))


class SessionSource(Protocol):
    @property
    def workload(self) -> WorkloadClass: ...
    def session(self, index: int) -> SessionPlan: ...


class Release(Protocol):
    def next_class(self) -> WorkloadClass: ...


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    shares: dict[WorkloadClass, float]  # the mixture contract rho; sums to 1
    sources: dict[WorkloadClass, SessionSource]
    skipped: tuple[str, ...] = ()  # bad lines of its trace that were left out

    def with_shares(self, shares: Mapping[WorkloadClass, float]) -> Workload:
        unknown = sorted(set(shares) - set(self.sources))
        if unknown:
            raise ValueError(f"no such class in workload {self.name}: {', '.join(unknown)}")
        return msgspec.structs.replace(self, shares=normalised(shares))


class SessionStream:
    """The sessions of a workload in the order in which a trainer starts them."""

    def __init__(self, workload: Workload, release: Release) -> None:
        self._sources = workload.sources
        self._release = release
        self.started: dict[WorkloadClass, int] = dict.fromkeys(workload.shares, 0)

    def next_session(self) -> SessionPlan:
        workload = self._release.next_class()
        index = self.started[workload]
        self.started[workload] = index + 1
        return self._sources[workload].session(index)


class DeficitRelease:
    """The class most behind: the largest rho_b (n + 1) - started_b; the first named wins a tie."""

    def __init__(self, shares: Mapping[WorkloadClass, float]) -> None:
        self._shares = normalised(shares)
        self._started = dict.fromkeys(self._shares, 0)
        self._total = 0

    def next_class(self) -> WorkloadClass:
        self._total += 1
        workload = max(self._shares, key=lambda b: self._shares[b] * self._total - self._started[b])
        self._started[workload] += 1
        return workload


class RandomRelease:
    def __init__(self, shares: Mapping[WorkloadClass, float], seed: int) -> None:
        self._classes = list(shares)
        self._weights = list(normalised(shares).values())
        self._random = random.Random(f"{seed}/release")

    def next_class(self) -> WorkloadClass:
        return self._random.choices(self._classes, self._weights)[0]


def normalised(shares: Mapping[WorkloadClass, float]) -> dict[WorkloadClass, float]:
    total = sum(shares.values())
    if total <= 0 or min(shares.values()) <= 0:
        raise ValueError("every class of a mixture needs a positive share")
    return {workload: share / total for workload, share in shares.items()}


def carried_tokens(turn: TurnPlan, context: int) -> int:
    """How much of the context so far a turn's prompt repeats."""
    return context if turn.keep_tokens is None else min(context, turn.keep_tokens)


def fit_to_context(turns: Sequence[TurnPlan], limit_tokens: int) -> tuple[TurnPlan, ...]:
    """Cut a session where its context would pass the model's limit, as a client does. The first turn stays, clipped."""
    kept: list[TurnPlan] = []
    context = 0
    for turn in turns:
        base = carried_tokens(turn, context)
        context = base + turn.new_tokens + turn.output_tokens
        if context <= limit_tokens:
            kept.append(turn)
            continue
        if not kept:
            prompt = min(turn.new_tokens, limit_tokens - 1)
            output = max(1, min(turn.output_tokens, limit_tokens - prompt))
            kept.append(msgspec.structs.replace(turn, new_tokens=prompt, output_tokens=output))
        break
    return tuple(kept)
