"""The sessions API and the mixture, on a live gate."""

from __future__ import annotations

import io
import json
from typing import Any

import aiohttp
import pytest
from tests.unit.server.live import call, complete, config, state

from tidegate.config.server import IdentityConfig
from tidegate.engine.server import EngineServer
from tidegate.server.gate import Gate


async def test_calls_say_whether_the_session_was_known(gate: Gate, client: aiohttp.ClientSession) -> None:
    started = {"session_id": "s", "workload": "swe", "group": "g", "expected_tokens": 10}
    assert (await call(client, gate, "POST", "/start_session", json=started))[1]["known"] is False
    assert (await call(client, gate, "POST", "/start_session", json=started))[1]["known"] is True
    for known in (True, False):
        status, said = await call(client, gate, "POST", "/finish_session", params={"session_id": "s"})
        assert (status, said) == (200, {"status": "ok", "session_id": "s", "known": known})


@pytest.mark.parametrize(
    ("path", "arguments", "code"),
    [
        ("/start_session", {}, "missing_session_id"),
        ("/finish_session", {"json": {"session_id": ""}}, "missing_session_id"),
        ("/finish_session", {"json": {"session_id": ["x"]}}, "invalid_field"),
        ("/finish_session", {"json": {"session_id": True}}, "invalid_field"),
        ("/start_session", {"json": {"session_id": "s", "expected_tokens": "many"}}, "invalid_field"),
        ("/start_session", {"json": {"session_id": "s", "expected_tokens": -1}}, "invalid_field"),
        ("/start_session", {"params": {"session_id": "x" * 257}}, "invalid_session_id"),
        ("/start_session", {"json": {"session_id": "s", "workload": "a\nb"}}, "invalid_workload_class"),
        ("/programs/release", {"data": "{nonsense"}, "invalid_json"),
        ("/close_session", {"json": [1]}, "invalid_json"),
        ("/finish_session", {"data": io.BytesIO(b"x" * 2_000_000)}, "body_too_large"),
    ],
)
async def test_bad_session_calls_have_stable_reasons(
    path: str, arguments: dict[str, Any], code: str, gate: Gate, client: aiohttp.ClientSession
) -> None:
    status, said = await call(client, gate, "POST", path, **arguments)
    assert (status, said["error"]["code"]) == (413 if code == "body_too_large" else 400, code)


async def test_a_utf_8_header_and_a_query_name_the_same_session(gate: Gate, client: aiohttp.ClientSession) -> None:
    assert await complete(client, gate, "sitzung-ü") == 200
    _, said = await call(client, gate, "POST", "/finish_session", params={"session_id": "sitzung-ü"})
    assert said["known"] is True


@pytest.mark.parametrize("header", ["X-Session-ID", "x_session_id", "My-Trajectory"])
async def test_headers_name_a_session_at_its_end_as_they_do_in_its_requests(
    engines: list[EngineServer], client: aiohttp.ClientSession, header: str
) -> None:
    identity = IdentityConfig(session_headers=("my-trajectory",))
    async with Gate(config(engines[0].url, identity=identity)) as gate:
        await gate.replicas.wait_probed()
        named = {header: "s\u00e9", "X-Workload-Class": "\u00e9"}
        assert (await call(client, gate, "POST", "/start_session", headers=named))[1]["session_id"] == "s\u00e9"
        assert await complete(client, gate, None, **named) == 200
        assert set(state(gate)["classes"]) == {"\u00e9"}
        assert (await call(client, gate, "DELETE", "/v1/router/session", headers=named))[1]["known"] is True
        assert state(gate)["sessions"]["live"] == 0


@pytest.mark.parametrize("count", [10**17, 10**400, -1, True])
async def test_an_expectation_that_is_no_count_of_tokens_is_refused(
    gate: Gate, client: aiohttp.ClientSession, count: object
) -> None:
    body = json.dumps({"session_id": "s", "expected_tokens": count})
    status, error = await call(client, gate, "POST", "/start_session", data=body)
    assert (status, error["error"]["code"]) == (400, "invalid_field")


async def test_the_trainer_sets_and_forgets_its_mixture(gate: Gate, client: aiohttp.ClientSession) -> None:
    for name in ("a", "b"):
        await complete(client, gate, name, **{"X-Workload-Class": name})
    assert (await call(client, gate, "GET", "/mixture"))[1]["given"] is False
    status, said = await call(client, gate, "PUT", "/mixture", json={"shares": {"a": 3, "b": 1}})
    assert (status, said["shares"]) == (200, {"a": 0.75, "b": 0.25})
    assert state(gate)["classes"]["a"]["share"] == 0.75
    assert (await call(client, gate, "GET", "/mixture"))[1] == {"given": True, "shares": said["shares"]}
    await call(client, gate, "DELETE", "/mixture")
    assert (await call(client, gate, "GET", "/mixture"))[1]["given"] is False


@pytest.mark.parametrize("shares", [None, {}, [1], {"a": -1}, {"a": "x"}, {"a": True}, {"a": 0}])
async def test_a_mixture_that_is_none_is_refused(shares: Any, gate: Gate, client: aiohttp.ClientSession) -> None:
    status, said = await call(client, gate, "PUT", "/mixture", json={"shares": shares})
    assert (status, said["error"]["code"]) == (400, "invalid_field")


@pytest.mark.parametrize("shares", [{"a": 10**400}, {"a": 1e308, "b": 1e308}])
async def test_shares_that_have_no_sum_are_refused(
    gate: Gate, client: aiohttp.ClientSession, shares: dict[str, float]
) -> None:
    status, error = await call(client, gate, "PUT", "/mixture", data=json.dumps({"shares": shares}))
    assert (status, error["error"]["code"]) == (400, "invalid_field")
