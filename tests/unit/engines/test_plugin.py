"""The plugin of one replica, against a server that answers as it would."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.engines.stub import StubReplica, eventually, stub_replica

from tidegate.config.engines import EnginesConfig
from tidegate.engines import plugin as module
from tidegate.engines.control import Result, control_session
from tidegate.engines.plugin import PROTOCOL, Plugin, Tally, understood
from tidegate.integrations.vllm_plugin import protocol

INFO: dict[str, Any] = {
    "plugin": "tidegate",
    "version": "0.1.0",
    "protocol": PROTOCOL,
    "features": ["release", "demote", "protect", "sessions"],
    "off": None,
    "instance": "a",
}
DONE = (200, '{"moved_blocks": 3}')


@contextlib.asynccontextmanager
async def told(replica: StubReplica, *, timeout_s: float = 10.0, **headers: str) -> AsyncIterator[Plugin]:
    async with control_session(EnginesConfig()) as session:
        plugin = Plugin(replica.url, session, Tally(), timeout_s=timeout_s, headers=headers)
        task = asyncio.create_task(plugin.run())
        try:
            yield plugin
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@contextlib.asynccontextmanager
async def in_use(**answers: tuple[int, str]) -> AsyncIterator[tuple[StubReplica, Plugin]]:
    async with stub_replica() as replica:
        replica.answers["/tidegate/info"] = (200, json.dumps(INFO))
        for hint in ("release", "demote", "protect"):
            replica.answers[f"/tidegate/{hint}"] = answers.get(hint, DONE)
        async with told(replica) as plugin:
            plugin.doubt()
            await eventually(lambda: plugin.view.used)
            yield replica, plugin


def sent(replica: StubReplica) -> list[tuple[str, list[str]]]:
    return [
        (path.rpartition("/")[2], json.loads(body)["session_ids"])
        for method, path, _, body in replica.calls
        if method == "POST"
    ]


def test_both_sides_speak_the_same_protocol() -> None:
    assert PROTOCOL == protocol.PROTOCOL
    assert set(protocol.FEATURES) >= {"release", "demote", "protect"}
    assert module.BATCH <= protocol.MAX_SESSIONS_PER_CALL


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, INFO, "ok"),
        (404, {"detail": "Not Found"}, "absent"),
        (405, None, "absent"),
        (401, {"error": {}}, "unauthorized"),
        (403, None, "unauthorized"),
        (200, {**INFO, "protocol": PROTOCOL + 1}, "protocol"),
        (200, {**INFO, "protocol": 0}, "protocol"),
        (200, {**INFO, "off": "prefix caching is off"}, "off_in_engine"),
        (200, "<html>", "unanswered"),
        (200, {"protocol": "1"}, "unanswered"),
        (200, [], "unanswered"),
        (500, INFO, "unanswered"),
        (None, None, "unanswered"),
    ],
)
def test_what_an_answer_means(status: int | None, body: Any, reason: str) -> None:
    view = understood(Result(url="http://a", status=status, ok=status == 200, body=body))
    assert view.reason == reason
    assert view.used == (reason == "ok")


def test_another_protocol_is_said_to_be_newer_or_older() -> None:
    newer = understood(Result(url="http://a", status=200, ok=True, body={**INFO, "protocol": PROTOCOL + 1}))
    older = understood(Result(url="http://a", status=200, ok=True, body={**INFO, "protocol": PROTOCOL - 1}))
    assert "newer" in newer.detail
    assert "older" in older.detail
    assert newer.version == "0.1.0"


async def test_sessions_are_told_of_in_few_calls() -> None:
    async with in_use() as (replica, plugin):
        for number in range(300):
            plugin.tell("release", f"s{number}")
        await eventually(lambda: sum(len(sessions) for _, sessions in sent(replica)) == 300)
        assert len(sent(replica)) <= 3
        tally = plugin._tally
        await eventually(lambda: tally.sessions[replica.url, "release"] == 300)
        assert tally.moved_blocks[replica.url, "release"] == 3 * len(sent(replica))


async def test_what_was_told_last_of_a_session_counts() -> None:
    async with in_use() as (replica, plugin):
        plugin.tell("demote", "a")
        plugin.tell("protect", "a")
        plugin.tell("demote", "b")
        plugin.tell("release", "b")
        await eventually(lambda: len(sent(replica)) == 2)
        assert sorted(sent(replica)) == [("protect", ["a"]), ("release", ["b"])]


async def test_a_release_that_has_not_gone_out_is_taken_back() -> None:
    async with in_use() as (replica, plugin):
        plugin.tell("release", "a")
        assert plugin.untell("release", "a")
        assert not plugin.untell("release", "a")
        plugin.tell("release", "b")
        await eventually(lambda: sent(replica) == [("release", ["b"])])


async def test_calls_wait_for_the_one_under_way() -> None:
    async with in_use() as (replica, plugin):
        replica.hanging.add("/tidegate/release")
        plugin.tell("release", "first")
        await eventually(lambda: len(sent(replica)) == 1)
        for number in range(10):
            plugin.tell("release", f"s{number}")
        await asyncio.sleep(0)
        assert len(sent(replica)) == 1
        replica.release()
        await eventually(lambda: len(sent(replica)) == 2)
        assert len(sent(replica)[1][1]) == 10


async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 5)
    async with in_use() as (replica, plugin):
        replica.hanging.add("/tidegate/release")
        plugin.tell("release", "first")
        await eventually(lambda: len(sent(replica)) == 1)
        for number in range(8):
            plugin.tell("release", f"s{number}")
        assert plugin._tally.failures[replica.url, "queue_full"] == 3
        replica.release()
        await eventually(lambda: len(sent(replica)) == 2)
        assert sent(replica)[1][1] == ["s3", "s4", "s5", "s6", "s7"]


async def test_a_failed_call_is_counted_and_the_plugin_asked_again() -> None:
    async with in_use(release=(503, '{"error": {}}')) as (replica, plugin):
        replica.answers["/tidegate/info"] = (404, "")
        plugin.tell("release", "a")
        await eventually(lambda: plugin.view.reason == "absent")
        assert plugin._tally.failures[replica.url, "status_503"] == 1
        plugin.tell("release", "b")
        assert len(sent(replica)) == 1


async def test_a_call_without_an_answer_costs_its_timeout_and_nothing_else() -> None:
    async with stub_replica() as replica:
        replica.answers["/tidegate/info"] = (200, json.dumps(INFO))
        replica.hanging.add("/tidegate/release")
        async with told(replica, timeout_s=0.3) as plugin:
            plugin.doubt()
            await eventually(lambda: plugin.view.used)
            plugin.tell("release", "a")
            await eventually(lambda: plugin._tally.failures[replica.url, "unanswered"] == 1)
            await eventually(lambda: plugin.view.used)  # it answered the question that followed


async def test_an_engine_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 0.02)
    async with stub_replica() as replica:
        replica.answers["/tidegate/info"] = (500, "")
        async with told(replica) as plugin:
            plugin.doubt()
            await eventually(lambda: plugin.view.reason == "unanswered")
            replica.answers["/tidegate/info"] = (200, json.dumps(INFO))
            await eventually(lambda: plugin.view.used)


async def test_a_hint_that_the_plugin_does_not_know_is_not_sent() -> None:
    async with stub_replica() as replica:
        replica.answers["/tidegate/info"] = (200, json.dumps({**INFO, "features": ["release"]}))
        replica.answers["/tidegate/release"] = DONE
        async with told(replica) as plugin:
            plugin.doubt()
            await eventually(lambda: plugin.view.used)
            plugin.tell("demote", "a")
            plugin.tell("release", "b")
            await eventually(lambda: sent(replica) == [("release", ["b"])])


@contextlib.asynccontextmanager
async def sglang(**answers: tuple[int, str]) -> AsyncIterator[tuple[StubReplica, Plugin]]:
    async with stub_replica() as replica:
        replica.answers["/server_info"] = (200, '{"enable_session_radix_cache": true, "version": "0.5.23"}')
        replica.answers["/close_session"] = answers.get("close_session", (200, ""))
        async with told(replica) as plugin:
            plugin.doubt()
            await eventually(lambda: plugin.view.used)
            yield replica, plugin


def closed(replica: StubReplica) -> list[str]:
    return [json.loads(body)["session_id"] for _, path, _, body in replica.calls if path == "/close_session"]


async def test_sessions_of_an_sglang_that_keeps_them_are_closed_and_nothing_else() -> None:
    async with sglang() as (replica, plugin):
        assert (plugin.view.kind, plugin.view.version) == ("session_radix_cache", "0.5.23")
        plugin.tell("demote", "paused")
        for number in range(20):
            plugin.tell("release", f"s{number}")
        await eventually(lambda: len(closed(replica)) == 20)
        assert set(closed(replica)) == {f"s{number}" for number in range(20)}
        await eventually(lambda: plugin._tally.sessions[replica.url, "release"] == 20)


async def test_an_sglang_that_refuses_is_asked_again() -> None:
    async with sglang(close_session=(400, "")) as (replica, plugin):
        plugin.tell("release", "a")
        await eventually(lambda: plugin._tally.failures[replica.url, "status_400"] == 1)


@pytest.mark.parametrize("info", ["{}", '{"enable_session_radix_cache": false}', "[]", '{"vllm_config": {}}'])
async def test_other_engines_are_told_nothing(info: str) -> None:
    async with stub_replica() as replica:
        replica.answers["/server_info"] = (200, info)
        async with told(replica) as plugin:
            plugin.doubt()
            await eventually(lambda: plugin.view.reason == "absent")


async def test_the_key_goes_along() -> None:
    async with stub_replica() as replica:
        replica.answers["/tidegate/info"] = (200, json.dumps(INFO))
        async with told(replica, Authorization="Bearer k") as plugin:
            plugin.doubt()
            await eventually(lambda: plugin.view.used)
            assert replica.headers[-1]["authorization"] == "Bearer k"
