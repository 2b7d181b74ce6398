"""Recorded sessions, read line by line.

A line is one session, in JSON:

    {"session": "cc-0001", "workload": "agentic", "shared_prefix_tokens": 17217,
     "turns": [[prompt_tokens, prefix_of_previous_prompt_tokens, output_tokens, model_time_s, gap_before_s], ...]}

`shared_prefix_tokens` are the first tokens of the first prompt, common to the trace's sessions (a system prompt).
The prefix of a turn is what its prompt repeats of the turn before; a small one means that the client rewrote its
context. Every line is checked; the error names the file, the line and what is wrong. With `skip_bad` such lines are
counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from tidegate.errors import ConfigError

# A number past these is a unit error or a broken recorder, not a long session: ten times the longest context on
# sale, the longest output limit, and a month without a turn.
MAX_PROMPT_TOKENS = 10_000_000
MAX_OUTPUT_TOKENS = 1_000_000
MAX_TIME_S = 30 * 86_400.0
MAX_PROBLEM_CHARS = 200


class TraceTurn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    prompt_tokens: int
    prefix_tokens: int
    output_tokens: int
    model_time_s: float
    gap_s: float


class TraceSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    session: str
    workload: str
    turns: tuple[TraceTurn, ...]
    shared_prefix_tokens: int = 0


class Trace(msgspec.Struct, frozen=True):
    sessions: tuple[TraceSession, ...]
    skipped: tuple[str, ...] = ()  # one message for each bad line, in skip_bad mode


_decoder = msgspec.json.Decoder(TraceSession)


def read_trace(path: Path, *, skip_bad: bool = False) -> Trace:
    sessions: list[TraceSession] = []
    skipped: list[str] = []
    seen: dict[str, int] = {}
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", reason="invalid_trace") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            session = _parse(line)
            if session.session in seen:
                raise ValueError(f"session {session.session!r} was already on line {seen[session.session]}")
        except ValueError as error:
            message = f"{path}:{number}: {shortened(error)}"
            if not skip_bad:
                raise ConfigError(message, reason="invalid_trace") from error
            skipped.append(message)
            continue
        seen[session.session] = number
        sessions.append(session)
    if not sessions:
        raise ConfigError(f"{path}: no usable session in {len(lines)} lines", reason="invalid_trace")
    return Trace(tuple(sessions), tuple(skipped))


def _parse(line: bytes) -> TraceSession:
    try:
        session = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # a ValidationError is a DecodeError
        raise ValueError(str(error)) from error
    for problem in _problems(session):
        raise ValueError(problem)
    return session


def shortened(problem: object) -> str:
    """A number of a thousand digits is no help."""
    text = str(problem)
    return text if len(text) <= MAX_PROBLEM_CHARS else f"{text[:MAX_PROBLEM_CHARS]}..."


def check_counts(prompt_tokens: int, output_tokens: int) -> str | None:
    """What is wrong with a request's sizes, if anything."""
    return next(_turn_problems(TraceTurn(prompt_tokens, 0, output_tokens, 0.0, 0.0)), None)


def check_session(session: TraceSession) -> str | None:
    """What is wrong with it, if anything."""
    return next(_problems(session), None)


def _problems(session: TraceSession) -> Iterator[str]:
    if not session.session or not session.workload:
        yield "session and workload must not be empty"
    if not session.turns:
        yield "no turns"
        return
    for index, turn in enumerate(session.turns):
        for problem in _turn_problems(turn):
            yield f"turn {index}: {problem}"
    if not 0 <= session.shared_prefix_tokens <= session.turns[0].prompt_tokens:
        yield f"shared_prefix_tokens {session.shared_prefix_tokens} is not within the first prompt"
    if session.turns[0].prefix_tokens:
        yield f"turn 0: prefix {session.turns[0].prefix_tokens} of a turn before it, and there is none"
    for index, (before, turn) in enumerate(pairwise(session.turns), start=1):
        if turn.prefix_tokens > before.prompt_tokens:
            yield f"turn {index}: prefix {turn.prefix_tokens} is longer than the prompt before, {before.prompt_tokens}"


def _turn_problems(turn: TraceTurn) -> Iterator[str]:
    if not 1 <= turn.prompt_tokens <= MAX_PROMPT_TOKENS:
        yield f"prompt of {turn.prompt_tokens} tokens"
    if not 0 <= turn.prefix_tokens <= turn.prompt_tokens:
        yield f"prefix {turn.prefix_tokens} is not within its prompt of {turn.prompt_tokens}"
    if not 0 <= turn.output_tokens <= MAX_OUTPUT_TOKENS:
        yield f"output of {turn.output_tokens} tokens"
    for name, value in (("model time", turn.model_time_s), ("gap", turn.gap_s)):
        if not (math.isfinite(value) and 0 <= value <= MAX_TIME_S):
            yield f"{name} of {value} s"
