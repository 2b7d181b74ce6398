"""The decision log: one JSON line per event, with the decisions that it led to; enough to derive them again.

    {"tidegate": "0.1.0", "format": 1, "policy": "misa_t", "seed": 0, "params": {...}, "started": "..."}
    {"event": {"event": "request_arrived", "at_s": 1.5, ...}, "decisions": [{"decision": "place", ...}]}
    {"gap": 12}

`record` only appends to a queue. A thread encodes and writes what has gathered, every `flush_s`. When the disk cannot
follow and more than `queue_lines` wait, lines are dropped: counted, and marked in the log by a gap line, since a
request must not wait for the disk and a log with a hole must not look whole. What a full disk took of a batch is taken
back, so that the log goes on with a whole line once there is room.

Rotation: whoever moves the file away (logrotate) calls `reopen`, and the log goes on in a new file at the path, as the
next `part` of the log that `started` names. All parts together are the log; none but the first can be replayed alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import structlog

from tidegate import __version__
from tidegate.policy.params import CoreParams
from tidegate.types import AnyDecision, AnyEvent

FORMAT = 1

_BATCH_LINES = 256  # encoding holds the interpreter lock: half a millisecond at a time

log: structlog.stdlib.BoundLogger = structlog.get_logger("tidegate.record")


class Header(msgspec.Struct, kw_only=True):
    tidegate: str
    format: int
    policy: str
    seed: int
    params: dict[str, Any]
    started: str = ""
    part: int = 0  # counts rotations


def log_header(policy: str, seed: int, params: CoreParams) -> Header:
    """Of a log that this version writes: what a fresh scheduler needs to derive its decisions again."""
    return Header(tidegate=__version__, format=FORMAT, policy=policy, seed=seed, params=msgspec.to_builtins(params))


class Line(msgspec.Struct, frozen=True):
    event: AnyEvent
    decisions: Sequence[AnyDecision]


class Gap(msgspec.Struct, frozen=True):
    gap: int


class Recorder:
    """Written by one thread; `record` is called on another (the event loop's)."""

    def __init__(self, path: Path, header: Header, *, queue_lines: int = 100_000, flush_s: float = 0.5) -> None:
        self.written = 0
        self.dropped = 0
        self.bytes_written = 0
        self._pending: deque[Line | Gap] = deque()
        self._missing = 0  # dropped since the last line that was queued
        self._unwritten = 0  # lost by the disk since the last line that was written
        self._queue_lines = queue_lines
        self._flush_s = flush_s
        self._path = path
        self._header = header
        self._closing = threading.Event()
        self._moved = False  # the file, maybe: look before the next line
        self._encoder = msgspec.json.Encoder()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.stat().st_size:  # of a process that may have been killed: worth a look
            path.replace(path.with_name(path.name + ".1"))
        self._file: io.FileIO = path.open("wb", buffering=0)  # a buffer would keep what was counted as lost
        self._end = 0  # of the last whole batch in the file
        header.started = header.started or datetime.now(UTC).isoformat(timespec="seconds")
        self._put(self._encoder.encode(header) + b"\n")
        self._thread = threading.Thread(target=self._write_forever, name="decision-log", daemon=True)
        self._thread.start()

    def record(self, event: AnyEvent, decisions: Sequence[AnyDecision]) -> None:
        pending = self._pending
        if len(pending) >= self._queue_lines:
            self.dropped += 1
            self._missing += 1
            return
        if self._missing:
            pending.append(Gap(self._missing))
            self._missing = 0
        pending.append(Line(event, decisions))

    def reopen(self) -> None:
        """The file may have been moved away: go on at the path. Any thread; the writer does it before its next line."""
        self._moved = True

    @property
    def waiting(self) -> int:
        return len(self._pending)

    def close(self) -> None:
        """Writes what is left. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            if self._missing:
                self._pending.append(Gap(self._missing))
            self._write()
            self._file.close()

    def _write_forever(self) -> None:
        while not self._closing.wait(self._flush_s):
            self._write()

    def _write(self) -> None:
        if self._moved:
            self._moved = False
            self._go_on_at_path()
        pending = self._pending
        while count := min(len(pending), _BATCH_LINES):
            self._write_lines([pending.popleft() for _ in range(count)])

    def _write_lines(self, lines: list[Line | Gap]) -> None:
        count = len(lines)
        if self._unwritten:
            lines.insert(0, Gap(self._unwritten))
        data = self._encoder.encode_lines(lines)
        try:
            self._put(data)
        except OSError as exc:
            self._unwritten += count
            self.dropped += count
            log.error("decision log not written", path=str(self._path), lines=count, error=str(exc))
        else:
            self._unwritten = 0
            self.written += len(lines)
            self.bytes_written += len(data)

    def _put(self, data: bytes) -> None:
        """All of it or nothing."""
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            with contextlib.suppress(OSError):  # no regular file: nothing to take back
                self._file.truncate(self._end)
                self._file.seek(self._end)
            raise
        self._end += len(data)

    def _go_on_at_path(self) -> None:
        """Where that fails, the log goes on in the file that was moved."""
        try:
            if self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
            file = self._path.open("ab", buffering=0)  # whoever moved it may have made a new one already
        except OSError as exc:
            log.error("decision log not reopened", path=str(self._path), error=str(exc))
            return
        self._file.close()
        self._file, self._end = file, os.fstat(file.fileno()).st_size
        self._header.part += 1
        try:
            self._put(self._encoder.encode(self._header) + b"\n")
        except OSError as exc:  # a full disk: the next batch tries again, and fails or not with its lines
            log.error("decision log has no header", path=str(self._path), part=self._header.part, error=str(exc))
        else:
            log.info("decision log reopened", path=str(self._path), part=self._header.part)
