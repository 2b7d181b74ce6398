"""What decisions mean for the KV that engines hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidegate.config.engines import EnginesConfig
from tidegate.errors import ConfigError
from tidegate.server.retention import Retention, plugin_headers
from tidegate.types import Ended, EpochStarted, Hold, Place, ReplicaHealth, ReplicaReset, Tick

A, B = "http://a", "http://b"
TICK = Tick(at_s=0.0)


class FakePlugin:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.taken_back: list[str] = []
        self.doubts = self.forgets = 0

    def tell(self, hint: str, session: str) -> None:
        self.told.append((hint, session))

    def untell(self, hint: str, session: str) -> bool:
        self.taken_back.append(session)
        return True

    def doubt(self) -> None:
        self.doubts += 1

    def forget(self) -> None:
        self.forgets += 1


class Shell:
    def __init__(self, **config: Any) -> None:
        self.retention = Retention(EnginesConfig(**config), None, {})  # type: ignore[arg-type]
        self.a, self.b = FakePlugin(), FakePlugin()
        self.retention._plugins.update({A: self.a, B: self.b})  # type: ignore[dict-item]

    def place(self, session: str, replica: str, reason: str = "continuation") -> None:
        self.retention.told(TICK, [Place(request=1, replica=replica, session=session, reason=reason)])

    def hold(self, session: str, reason: str) -> None:
        self.retention.told(TICK, [Hold(request=1, session=session, reason=reason)])

    def end(self, session: str, cause: str = "finished") -> None:
        ended = Ended(session=session, replica=A, workload="w", cause=cause, completed=True)
        self.retention.told(TICK, [ended])

    @property
    def at_rest(self) -> bool:
        return not self.retention._homes and not self.retention._demoted


@pytest.mark.parametrize("cause", ["finished", "expired", "evicted"])
def test_an_ended_session_is_released_where_it_was(cause: str) -> None:
    shell = Shell()
    shell.place("s", A)
    shell.place("s", A)
    shell.end("s", cause)
    assert (shell.a.told, shell.b.told) == ([("release", "s")], [])
    assert shell.at_rest


def test_a_session_that_never_ran_is_told_to_nobody() -> None:
    shell = Shell()
    shell.hold("s", "replica_cap")
    shell.end("s", "abandoned")
    assert shell.a.told == shell.b.told == []


def test_a_request_without_a_session_is_told_to_nobody() -> None:
    shell = Shell()
    shell.place("request:7", A)
    shell.end("request:7", "single_request")
    assert shell.a.told == []
    assert shell.at_rest


@pytest.mark.parametrize("reason", ["not_resident", "paused"])
def test_a_paused_session_is_demoted_and_protected_when_it_goes_on(reason: str) -> None:
    shell = Shell()
    shell.place("s", A)
    shell.hold("s", reason)
    shell.place("s", A)
    shell.place("s", A)
    assert shell.a.told == [("demote", "s"), ("protect", "s")]


@pytest.mark.parametrize("reason", ["pool_paused", "no_replica", "queued"])
def test_a_session_that_waits_for_something_else_keeps_its_kv(reason: str) -> None:
    shell = Shell()
    shell.place("s", A)
    shell.hold("s", reason)
    assert shell.a.told == []


def test_a_session_that_moved_is_demoted_where_it_was_and_released_everywhere() -> None:
    shell = Shell()
    shell.place("s", A)
    shell.place("s", B, "routed")
    assert (shell.a.told, shell.b.told) == ([("demote", "s")], [])
    shell.place("s", A, "routed")
    shell.end("s")
    assert shell.a.told[-1] == shell.b.told[-1] == ("release", "s")
    assert shell.at_rest


def test_a_session_that_ends_while_paused_is_released() -> None:
    shell = Shell()
    shell.place("s", A)
    shell.hold("s", "not_resident")
    shell.end("s")
    assert shell.a.told == [("demote", "s"), ("release", "s")]
    assert shell.at_rest


def test_the_release_of_a_former_life_is_taken_back_when_its_id_returns() -> None:
    shell = Shell()
    shell.place("s", A, "admitted")
    shell.end("s")
    shell.place("s", A, "admitted")
    assert shell.a.taken_back == ["s", "s"]


def test_what_replicas_go_through_is_looked_at() -> None:
    shell = Shell()
    for event in (
        ReplicaHealth(at_s=0.0, replica=A, usable=True, reason="ok"),
        ReplicaHealth(at_s=0.0, replica=A, usable=False, reason="ejected"),
        ReplicaReset(at_s=0.0, replica=A, reason="restart"),
        ReplicaReset(at_s=0.0, replica=A, reason="sleep"),
        ReplicaHealth(at_s=0.0, replica="http://unknown", usable=True, reason="ok"),
        EpochStarted(at_s=0.0, reason="update_weights"),
    ):
        shell.retention.told(event, [])
    assert (shell.a.doubts, shell.a.forgets) == (2, 3)
    assert (shell.b.doubts, shell.b.forgets) == (0, 1)


def test_switched_off_nothing_is_kept() -> None:
    shell = Shell(plugin="off")
    shell.place("s", A)
    shell.hold("s", "not_resident")
    shell.end("s")
    assert shell.a.told == []
    assert shell.at_rest
    assert Retention(EnginesConfig(plugin="off"), None, {}).view(A).reason == "switched_off"  # type: ignore[arg-type]


def test_the_key_is_read_from_its_file(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    assert plugin_headers(EnginesConfig(plugin_key_file=str(key))) == {"Authorization": "Bearer secret"}
    assert plugin_headers(EnginesConfig()) == {}


@pytest.mark.parametrize("content", [b"", b"\n", b"a\nb", b"\xff"])
def test_a_key_file_that_holds_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    key = tmp_path / "key"
    key.write_bytes(content)
    with pytest.raises(ConfigError):
        plugin_headers(EnginesConfig(plugin_key_file=str(key)))
    with pytest.raises(ConfigError):
        plugin_headers(EnginesConfig(plugin_key_file=str(tmp_path / "missing")))
