"""Runs a decision log's events through a fresh Scheduler and compares every decision, byte for byte.

A log that was rotated is given in all its parts, the oldest first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tidegate import __version__
from tidegate.config.load import check_policy
from tidegate.errors import ConfigError
from tidegate.observe.recorder import FORMAT, Header
from tidegate.policy.params import CoreParams
from tidegate.policy.scheduler import Scheduler
from tidegate.types import AnyEvent


class RecordedLine(msgspec.Struct):
    event: AnyEvent | None = None
    decisions: msgspec.Raw = msgspec.Raw(b"[]")
    gap: int | None = None


class Difference(msgspec.Struct, frozen=True):
    log: str  # the file
    line: int  # of it, from 1
    event: Any
    recorded: Any
    derived: Any


class Report(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    version: str  # that wrote the log
    events: int
    decisions: int
    gaps: int  # lines that the writer had to drop; the state is not exact after the first
    truncated: bool  # the last line is not whole: the writer was killed
    first_difference: Difference | None

    @property
    def same(self) -> bool:
        return self.first_difference is None and not self.gaps


def replay(*paths: Path) -> Report:
    """Raises ConfigError when the files are not the parts of one decision log of this version's format."""
    header, scheduler = _begin(paths[0])
    decoder = msgspec.json.Decoder(RecordedLine)
    encoder = msgspec.json.Encoder()
    events = decisions = gaps = 0
    first: Difference | None = None
    truncated = False
    for part, path in enumerate(paths):
        lines = _lines(path)
        _check_part(path, _header(path, next(lines, b"")), header, part)
        for number, text in enumerate(lines, start=2):
            if not text.endswith(b"\n"):
                truncated = True
                break
            try:
                line = decoder.decode(text)
            except msgspec.DecodeError as exc:
                raise ConfigError(f"{path}:{number}: not a line of a decision log: {exc}") from exc
            if line.event is None:
                gaps += line.gap or 0
                continue
            try:
                derived = scheduler.handle(line.event)
            except (ValueError, LookupError) as exc:  # lines are missing, or stand twice
                raise ConfigError(f"{path}:{number}: this event cannot follow those before it: {exc}") from exc
            events += 1
            decisions += len(derived)
            if first is None and encoder.encode(derived) != bytes(line.decisions):
                first = Difference(
                    str(path),
                    number,
                    msgspec.to_builtins(line.event),
                    msgspec.json.decode(line.decisions),
                    msgspec.to_builtins(derived),
                )
    return Report(
        policy=header.policy,
        version=header.tidegate,
        events=events,
        decisions=decisions,
        gaps=gaps,
        truncated=truncated,
        first_difference=first,
    )


def _begin(path: Path) -> tuple[Header, Scheduler]:
    header = _header(path, next(_lines(path), b""))
    check_policy(header.policy, str(path))
    return header, Scheduler(header.policy, _params(path, header), header.seed)


def _check_part(path: Path, header: Header, first: Header, part: int) -> None:
    if header.started != first.started:
        raise ConfigError(f"{path}: of another log: it started at {header.started}, not at {first.started}")
    if header.part != part:
        raise ConfigError(
            f"{path}: part {header.part} of a rotated log where part {part} is needed: give all parts, the oldest first"
        )


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}") from exc


def _header(path: Path, line: bytes) -> Header:
    try:
        header = msgspec.json.decode(line, type=Header)
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{path}: not a decision log: {exc}") from exc
    if header.format != FORMAT:
        raise ConfigError(f"{path}: format {header.format}, this is tidegate {__version__} with format {FORMAT}")
    return header


def _params(path: Path, header: Header) -> CoreParams:
    try:
        return msgspec.convert(header.params, CoreParams)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path}: written by tidegate {header.tidegate} with other constants: {exc}") from exc
