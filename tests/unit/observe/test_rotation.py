"""A decision log that is moved away while it is written goes on, and its parts replay as one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from tests.unit.observe.recording import header, lines, some_events

from tidegate.cli.replay import replay as replay_command
from tidegate.errors import ConfigError
from tidegate.observe.recorder import Recorder
from tidegate.observe.replay import replay
from tidegate.policy.scheduler import Scheduler
from tidegate.types import Tick


def rotated(log: Path, parts: int) -> list[Path]:
    """Written in so many parts, the last at `log`; its paths, the oldest first."""
    recorder = Recorder(log, header(), flush_s=60.0)
    scheduler = Scheduler("sticky_least_loaded", seed=3)
    events = some_events()
    size = len(events) // parts + 1
    paths = []
    for part in range(parts):
        for event in events[part * size : (part + 1) * size]:
            recorder.record(event, scheduler.handle(event))
        recorder._write()
        if part + 1 < parts:
            paths.append(log.rename(log.with_name(f"{log.name}-{part}")))
            recorder.reopen()
    recorder.close()
    return [*paths, log]


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_all_parts_together_are_the_log(parts: int, tmp_path: Path) -> None:
    paths = rotated(tmp_path / "log.jsonl", parts)
    assert [lines(path)[0]["part"] for path in paths] == list(range(parts))
    written = [line["event"] for path in paths for line in lines(path)[1:]]
    assert written == [msgspec.json.decode(msgspec.json.encode(event)) for event in some_events()]
    report = replay(*paths)
    assert report.same
    assert (report.events, report.gaps) == (len(some_events()), 0)


def test_a_part_alone_or_out_of_order_is_no_log(tmp_path: Path) -> None:
    first, second, third = rotated(tmp_path / "log.jsonl", 3)
    for wrong in ((second,), (second, first), (first, third), (first, first)):
        with pytest.raises(ConfigError, match="give all parts, the oldest first"):
            replay(*wrong)
    other = tmp_path / "other"
    other.mkdir()
    (foreign,) = rotated(other / "log.jsonl", 1)
    text = foreign.read_text().splitlines()
    started = lines(foreign)[0]["started"]
    foreign.write_text("\n".join([text[0].replace(started, "1999-01-01T00:00:00+00:00"), *text[1:]]) + "\n")
    with pytest.raises(ConfigError, match="of another log"):
        replay(first, foreign)


def test_a_difference_names_its_part(tmp_path: Path) -> None:
    first, second = rotated(tmp_path / "log.jsonl", 2)
    second.write_text(second.read_text().replace("http://a", "http://z", 1))
    said = CliRunner().invoke(replay_command, [str(first), str(second)])
    assert said.exit_code == 1
    assert f"{second}:" in said.output


def test_a_log_that_was_not_moved_goes_on_as_it_was(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    recorder = Recorder(log, header(), flush_s=60.0)
    for at_s in (1.0, 2.0):
        recorder.record(Tick(at_s=at_s), [])
        recorder.reopen()
        recorder._write()
    recorder.close()
    assert [line["event"]["at_s"] for line in lines(log)[1:]] == [1.0, 2.0]


def test_a_file_that_the_mover_made_is_used(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    recorder = Recorder(log, header(), flush_s=60.0)
    log.rename(tmp_path / "old")
    log.touch(mode=0o640)
    made = log.stat().st_ino
    recorder.reopen()
    recorder.record(Tick(at_s=1.0), [])
    recorder.close()
    assert log.stat().st_ino == made
    assert [line.get("part", 0) for line in lines(log)] == [1, 0]


def test_where_no_file_can_be_made_the_log_goes_on_in_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log.jsonl"
    recorder = Recorder(log, header(), flush_s=60.0)
    old = log.rename(tmp_path / "old")

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        recorder.reopen()
        recorder.record(Tick(at_s=1.0), [])
        recorder._write()
    recorder.close()
    assert [line["event"]["at_s"] for line in lines(old)[1:]] == [1.0]
    assert recorder.dropped == 0
