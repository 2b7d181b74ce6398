"""The decision log keeps every line in order, or says how many are missing; a replay proves that it is enough."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.observe.recording import header, lines, record, some_events

from tidegate.errors import ConfigError
from tidegate.observe.recorder import Recorder
from tidegate.observe.replay import replay
from tidegate.types import (
    Tick,
)


def test_every_event_is_written_in_order_with_its_decisions(tmp_path: Path) -> None:
    log, events = tmp_path / "new" / "log.jsonl", some_events()
    recorder = record(log, events)
    first, *rest = lines(log)
    assert first["policy"] == "sticky_least_loaded"
    assert [line["event"] for line in rest] == [json.loads(msgspec.json.encode(event)) for event in events]
    assert sum(len(line["decisions"]) for line in rest) >= 20
    assert (recorder.written, recorder.dropped) == (len(events), 0)
    recorder.close()


def test_a_log_replays_to_the_same_decisions(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    record(log, some_events())
    report = replay(log)
    assert report.same
    assert report.events == len(some_events())
    assert report.decisions >= 20


def test_a_changed_decision_is_found(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    record(log, some_events())
    text = log.read_text().splitlines()
    place = next(number for number, line in enumerate(text) if '"place"' in line)
    text[place] = text[place].replace('"replica":"http://a"', '"replica":"http://z"').replace("http://b", "http://z")
    log.write_text("\n".join(text) + "\n")
    report = replay(log)
    assert not report.same
    assert report.first_difference is not None
    assert report.first_difference.line == place + 1
    assert report.first_difference.recorded != report.first_difference.derived


def test_lines_that_the_disk_is_too_slow_for_leave_a_gap_that_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is held while lines come: those beyond the queue are counted, and missing visibly."""
    log, go_on, entered = tmp_path / "log.jsonl", threading.Event(), threading.Event()
    recorder = Recorder(log, header(), queue_lines=10, flush_s=0.001)
    write = recorder._write_lines

    def slow(batch: list[Any]) -> None:
        entered.set()
        go_on.wait()
        write(batch)

    monkeypatch.setattr(recorder, "_write_lines", slow)
    recorder.record(Tick(at_s=0.0), [])
    assert entered.wait(10)
    for number in range(1, 26):
        recorder.record(Tick(at_s=float(number)), [])
    assert recorder.dropped == 15
    go_on.set()
    recorder.close()
    events = [line for line in lines(log)[1:]]
    assert events[-1] == {"gap": 15}
    assert [line["event"]["at_s"] for line in events[:-1]] == [float(number) for number in range(11)]
    report = replay(log)
    assert (report.gaps, report.same) == (15, False)


def test_a_full_disk_is_counted_and_shows_in_the_log_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes half a batch, twice: none of it stays, and the log goes on with whole lines."""
    log = tmp_path / "log.jsonl"
    recorder = Recorder(log, header(), flush_s=60.0)
    file = recorder._file

    class Full:
        truncate, seek = file.truncate, file.seek
        takes = True

        def write(self, data: memoryview) -> int | None:
            self.takes = not self.takes
            if self.takes:
                raise OSError(28, "No space left on device")
            return file.write(data[: len(data) // 2])

    monkeypatch.setattr(recorder, "_file", Full())
    for at_s in (1.0, 2.0, 3.0):
        recorder.record(Tick(at_s=at_s), [])
    recorder._write()
    assert recorder.dropped == 3
    recorder.record(Tick(at_s=4.0), [])
    recorder._write()
    assert recorder.dropped == 4
    monkeypatch.setattr(recorder, "_file", file)
    recorder.record(Tick(at_s=5.0), [])
    recorder.close()
    assert [line.get("gap") or line["event"]["at_s"] for line in lines(log)[1:]] == [4, 5.0]
    assert replay(log).gaps == 4


def test_the_log_of_the_process_before_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    record(log, some_events())
    before = log.read_bytes()
    record(log, [])
    assert (tmp_path / "log.jsonl.1").read_bytes() == before
    assert len(lines(log)) == 1


def test_what_many_threads_of_work_do_is_not_lost_at_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    recorder = Recorder(log, header(), flush_s=0.0001)
    for number in range(5000):
        recorder.record(Tick(at_s=float(number)), [])
    recorder.close()
    assert [line["event"]["at_s"] for line in lines(log)[1:]] == [float(number) for number in range(5000)]


def test_a_log_whose_writer_was_killed_replays_up_to_its_last_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    record(log, some_events())
    log.write_bytes(log.read_bytes()[:-20])
    report = replay(log)
    assert report.truncated
    assert report.same
    assert report.events == len(some_events()) - 1


def test_lines_that_stand_twice_are_said_and_where(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    record(log, some_events())
    head, *rest = log.read_text().splitlines(keepends=True)
    log.write_text("".join([head, *(line for line in rest for _ in range(2))]))
    with pytest.raises(
        ConfigError, match=r"log\.jsonl:\d+: this event cannot follow those before it: .* arrived twice"
    ):
        replay(log)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a decision log"),
        ("{}", "not a decision log"),
        ("hello\n", "not a decision log"),
        (json.dumps(msgspec.to_builtins(header(format=99))), "format 99"),
        (json.dumps(msgspec.to_builtins(header(params={"tick_s": -1}))), "other constants"),
        (json.dumps(msgspec.to_builtins(header())) + "\n{nonsense}\n", ":2: not a line of a decision log"),
        (json.dumps(msgspec.to_builtins(header(policy="gone"))), "unknown policy 'gone'"),
    ],
)
def test_what_is_not_a_decision_log_is_refused(text: str, said: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(text)
    with pytest.raises(ConfigError, match=said):
        replay(log)


def test_an_absent_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        replay(tmp_path / "absent")
