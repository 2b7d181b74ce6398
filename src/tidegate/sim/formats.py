"""Sessions from elsewhere, as recorded sessions: told apart by their first line.

sessions   ours, see `sim.traces`
rollouts   {"group", "stream", "prompt_len", "out_lens": [..], "obs_lens": [..]} a line: a prompt, then an answer and an
           observation in turns; `group` names what shares its prompt and is the class, if `workload` is not given
mooncake   {"timestamp" [ms], "input_length", "output_length", "hash_ids"} a line, one request each: a request whose
           blocks (of 512 tokens) continue those of an earlier one is that session's next turn
azure      CSV TIMESTAMP,ContextTokens,GeneratedTokens: single requests
decisions  a decision log of the router: what its clients asked for

Every bad line is refused with its file, number and fault, or counted and named with `skip_bad`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tidegate.errors import ConfigError
from tidegate.sim.traces import (
    MAX_TIME_S,
    Trace,
    TraceSession,
    TraceTurn,
    check_counts,
    check_session,
    read_trace,
    shortened,
)
from tidegate.types import AnyEvent, RequestArrived, RequestEnded, SessionFinished

MOONCAKE_BLOCK_TOKENS = 512

T = TypeVar("T")
Read = Callable[["Lines"], list[TraceSession]]


class Lines:
    """A file's lines, and what to do with bad ones."""

    def __init__(self, path: Path, *, skip_bad: bool) -> None:
        self.path = path
        self.skipped: list[str] = []
        self._skip_bad = skip_bad
        try:
            self.texts = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}", reason="invalid_trace") from error

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        return ((number, text) for number, text in enumerate(self.texts, start=1) if text.strip())

    def bad(self, number: int, problem: object) -> None:
        message = f"{self.path}:{number}: {shortened(problem)}"
        if not self._skip_bad:
            raise ConfigError(message, reason="invalid_trace")
        self.skipped.append(message)

    def decoded(self, kind: type[T]) -> Iterator[tuple[int, T]]:
        decoder = msgspec.json.Decoder(kind)
        for number, text in self.numbered():
            try:
                yield number, decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.bad(number, error)

    def checked(self, sessions: Iterable[tuple[int, TraceSession]]) -> list[TraceSession]:
        good = []
        for number, session in sessions:
            problem = check_session(session)
            if problem is None:
                good.append(session)
            else:
                self.bad(number, problem)
        return good


def read_sessions(path: Path, *, skip_bad: bool = False) -> Trace:
    lines = Lines(path, skip_bad=skip_bad)
    kind = _kind(lines)
    if kind == "sessions":
        return read_trace(path, skip_bad=skip_bad)
    sessions = _READERS[kind](lines)
    if not sessions:
        raise ConfigError(f"{path}: no usable session in {len(lines.texts)} lines", reason="invalid_trace")
    return Trace(tuple(sessions), tuple(lines.skipped))


def write_sessions(sessions: Iterable[TraceSession], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.Encoder().encode_lines(list(sessions)))


def _kind(lines: Lines) -> str:
    first = next((text for _, text in lines.numbered()), b"")
    if first.upper().startswith(b"TIMESTAMP,"):
        return "azure"
    try:
        keys = set(msgspec.json.decode(first, type=dict[str, Any]))
    except msgspec.DecodeError:
        return "sessions"  # its reader says what is wrong
    for kind, needs in _KEYS.items():
        if needs <= keys:
            return kind
    return "sessions"


# --- rollouts -----------------------------------------------------------------------------------------------------
class _Rollout(msgspec.Struct):
    group: str | int
    stream: str | int
    prompt_len: int
    out_lens: list[int]
    obs_lens: list[int]
    workload: str = "rollout"


def _rollouts(lines: Lines) -> list[TraceSession]:
    def sessions() -> Iterator[tuple[int, TraceSession]]:
        seen: dict[str, int] = {}
        for number, line in lines.decoded(_Rollout):
            name = f"{line.group}/{line.stream}"
            least = min([*line.out_lens, *line.obs_lens], default=0)
            if name in seen:
                lines.bad(number, f"stream {name} was already on line {seen[name]}")
                continue
            if least < 0:
                lines.bad(number, f"an output or observation of {least} tokens")
                continue
            seen[name] = number
            if len(line.obs_lens) not in (len(line.out_lens), len(line.out_lens) - 1):
                lines.bad(number, f"{len(line.out_lens)} outputs and {len(line.obs_lens)} observations")
                continue
            turns, prompt, before = [], line.prompt_len, 0
            for output, observed in zip(line.out_lens, [*line.obs_lens, 0], strict=False):
                turns.append(TraceTurn(prompt, before, output, 0.0, 0.0))
                before, prompt = prompt, prompt + output + observed
            yield number, TraceSession(name, line.workload, tuple(turns))

    return lines.checked(sessions())


# --- mooncake -----------------------------------------------------------------------------------------------------
class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def _mooncake(lines: Lines) -> list[TraceSession]:
    """A request continues the session whose last prompt's whole blocks are the head of its own."""
    open_sessions: dict[tuple[int, ...], tuple[int, list[TraceTurn], list[float]]] = {}
    every: list[tuple[int, list[TraceTurn]]] = []
    last_s: float | None = None
    for number, line in lines.decoded(_Mooncake):
        at_s = line.timestamp / 1000
        problem = check_counts(line.input_length, line.output_length)
        if problem is None and not (last_s or 0.0) <= at_s < (math.inf if last_s is None else last_s + MAX_TIME_S):
            problem = f"a timestamp of {at_s} s, the one before is {last_s} s"
        if problem is not None:
            lines.bad(number, problem)
            continue
        last_s = at_s
        blocks = tuple(line.hash_ids)
        known = next((blocks[:n] for n in range(len(blocks), 0, -1) if blocks[:n] in open_sessions), None)
        first, turns, times_s = open_sessions.pop(known) if known is not None else (number, [], [])
        before = turns[-1].prompt_tokens if turns else 0
        gap_s = max(0.0, at_s - times_s[-1]) if times_s else 0.0
        turns.append(TraceTurn(line.input_length, min(before, line.input_length), line.output_length, 0.0, gap_s))
        times_s.append(at_s)
        if len(turns) == 1:
            every.append((first, turns))
        whole = blocks[: line.input_length // MOONCAKE_BLOCK_TOKENS]
        if whole:
            open_sessions[whole] = (first, turns, times_s)
    return lines.checked((n, TraceSession(f"mooncake-{n}", "mooncake", tuple(turns))) for n, turns in every)


# --- azure --------------------------------------------------------------------------------------------------------
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _whole(row: dict[str, str], column: str) -> int:
    text = row[column.lower()]
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{column} {text!r} is not a whole number") from None


def _azure(lines: Lines) -> list[TraceSession]:
    def sessions() -> Iterator[tuple[int, TraceSession]]:
        rows = lines.numbered()
        first, header = next(rows)
        names = [name.strip().lower() for name in header.decode("utf-8", "replace").split(",")]
        absent = [column for column in _AZURE_COLUMNS if column.lower() not in names]
        if absent:
            raise ConfigError(f"{lines.path}:{first}: no column {', '.join(absent)}", reason="invalid_trace")
        last: datetime | None = None
        for number, text in rows:
            try:
                cells = next(csv.reader(io.StringIO(text.decode())))
                if len(cells) != len(names):
                    raise ValueError(f"{len(cells)} columns, not {len(names)}")
                row = dict(zip(names, (cell.strip() for cell in cells), strict=True))
                prompt, output = (_whole(row, column) for column in _AZURE_COLUMNS[1:])
                at = datetime.fromisoformat(row["timestamp"])
                if last is not None and at < last:
                    raise ValueError(f"a timestamp of {at} after one of {last}")
                last = at
            except (ValueError, TypeError, UnicodeDecodeError, csv.Error) as error:
                lines.bad(number, error)
                continue
            yield number, TraceSession(f"azure-{number}", "azure", (TraceTurn(prompt, 0, output, 0.0, 0.0),))

    return lines.checked(sessions())


# --- decision logs ------------------------------------------------------------------------------------------------
class _LogLine(msgspec.Struct):
    event: AnyEvent | None = None


class _Asked(msgspec.Struct):
    session: str
    workload: str
    arrived_s: float


def _decisions(lines: Lines) -> list[TraceSession]:
    """Answered requests by session. Tokens are as the replicas counted them; a gap is from an answer to the next
    request; what a prompt repeats is taken to be all of the one before it, as far as it is as long."""
    turns: dict[str, list[TraceTurn]] = {}
    ended_s: dict[str, float] = {}
    labels: dict[str, str] = {}
    asked: dict[int, _Asked] = {}
    numbers: dict[str, int] = {}
    generations: dict[str, int] = {}
    for number, line in lines.decoded(_LogLine):
        event = line.event
        if isinstance(event, RequestArrived):
            name = event.session or f"request-{event.request}"
            session = f"{name}#{generations.get(name, 0)}"
            label = labels.setdefault(session, event.workload or "unlabelled")
            numbers.setdefault(session, number)
            asked[event.request] = _Asked(session, label, event.at_s)
        elif isinstance(event, RequestEnded):
            request = asked.pop(event.request, None)
            if request is None or event.outcome != "ok" or not event.prompt_tokens:
                continue
            problem = check_counts(event.prompt_tokens, event.completion_tokens or 0)
            if problem is None and event.at_s < request.arrived_s:
                problem = f"request {event.request} was answered {request.arrived_s - event.at_s} s before it arrived"
            if problem is not None:
                lines.bad(number, problem)
                continue
            known = turns.setdefault(request.session, [])
            before = known[-1].prompt_tokens if known else 0
            gap_s = max(0.0, request.arrived_s - ended_s[request.session]) if known else 0.0
            spent_s = max(0.0, event.at_s - request.arrived_s)
            prefix = min(before, event.prompt_tokens)
            known.append(TraceTurn(event.prompt_tokens, prefix, event.completion_tokens or 0, spent_s, gap_s))
            ended_s[request.session] = event.at_s
        elif isinstance(event, SessionFinished):
            generations[event.session] = generations.get(event.session, 0) + 1
    return lines.checked((numbers[s], TraceSession(s, labels[s], tuple(known))) for s, known in turns.items())


_KEYS: dict[str, set[str]] = {
    "decisions": {"tidegate", "format", "policy"},
    "rollouts": {"prompt_len", "out_lens", "obs_lens"},
    "mooncake": {"input_length", "output_length"},
}
_READERS: dict[str, Read] = {"rollouts": _rollouts, "mooncake": _mooncake, "azure": _azure, "decisions": _decisions}
