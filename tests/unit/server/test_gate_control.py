"""Control calls through a live gate: what reaches each replica, what is reported, what the gate concludes."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.unit.server.live import NOWHERE, QUICK, call, complete, config, state, until
from yarl import URL

from tidegate.engine.config import EngineConfig
from tidegate.engine.server import EngineServer
from tidegate.policy.baselines.params import StaticCapParams
from tidegate.policy.params import CoreParams
from tidegate.proxy.framing import VIA_HEADER
from tidegate.server.gate import Gate


async def test_a_control_call_reports_on_each_replica(gate: Gate, client: aiohttp.ClientSession) -> None:
    status, report = await call(client, gate, "POST", "/pause", params={"mode": "keep"})
    assert (status, report["success"], report["status"]) == (200, True, "paused")
    assert set(report["replicas"]) == set(gate.replicas.urls)
    assert (await call(client, gate, "GET", "/is_paused"))[1]["is_paused"] is True
    await call(client, gate, "POST", "/resume")
    assert (await call(client, gate, "GET", "/is_paused"))[1]["is_paused"] is False


@pytest.mark.parametrize(
    ("query", "aborts"), [({}, True), ({"mode": "abort"}, True), ({"mode": "keep"}, False), ({"mode": "wait"}, False)]
)
async def test_a_pause_aborts_requests_unless_it_says_otherwise(
    gate: Gate, client: aiohttp.ClientSession, query: dict[str, str], aborts: bool
) -> None:
    """Its empty replies are then no draining replica's: abort is the engines' default."""
    called: list[bool] = []
    gate.driver.aborts_called = lambda: called.append(True)  # type: ignore[method-assign]
    routes = gate._routes(gate.driver.scheduler, gate.driver._identifier)
    gate.driver.router = routes
    assert (await call(client, gate, "POST", "/pause", params=query))[0] == 200
    assert bool(called) is aborts


async def test_one_failure_makes_a_control_call_fail_and_a_question_be_answered(
    engines: list[EngineServer], client: aiohttp.ClientSession
) -> None:
    async with Gate(config(engines[0].url, NOWHERE)) as gate:
        await gate.replicas.wait_probed()
        status, report = await call(client, gate, "POST", "/reset_prefix_cache")
        assert (status, report["success"], report["error"]["code"]) == (502, False, "control_failed")
        assert report["replicas"][engines[0].url]["ok"] is True
        assert report["replicas"][NOWHERE]["error"]
        assert state(gate)["epoch"] == 0  # only one of them went cold
        status, report = await call(client, gate, "GET", "/is_paused")
        assert (status, report["is_paused"]) == (200, False)


async def test_a_control_call_that_comes_round_in_a_circle_is_seen(client: aiohttp.ClientSession) -> None:
    async with Gate(config()) as gate:
        gate.replicas.add(gate.url)  # a list of workers with the gate's own URL in it
        status, report = await call(client, gate, "POST", "/reset_prefix_cache")
        assert (status, report["error"]["code"]) == (508, "control_failed")
        assert report["replicas"][gate.url]["body"]["error"]["code"] == "loop_detected"


async def test_a_control_call_keeps_the_gates_that_it_has_passed(client: aiohttp.ClientSession) -> None:
    """The first of two gates in a circle sees its own name only if the second one leaves it there."""
    passed: list[list[str]] = []

    async def resume(request: web.Request) -> web.Response:
        passed.append(request.headers.getall("Via"))
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/resume", resume)
    async with TestServer(app) as server, Gate(config(str(server.make_url("")))) as gate:
        await call(client, gate, "POST", "/resume", headers={"Via": "1.1 another-gate"})
        assert passed == [["1.1 another-gate", *VIA_HEADER.values()]]


async def test_an_abort_that_cannot_be_read_aborts_nothing_that_is_held(
    gate: Gate, client: aiohttp.ClientSession
) -> None:
    asked: list[object] = []
    gate.driver.abort_held = lambda ids=(): asked.append(ids) or 0  # type: ignore[method-assign,func-returns-value]
    gate.driver.router = gate._routes(gate.driver.scheduler, gate.driver._identifier)
    for path in ("/abort_requests", "/abort_request"):
        async with client.post(f"{gate.url}{path}", data=b'{"rid": "a"') as reply:
            assert reply.status in (400, 404)  # of the engine's
    assert asked == []


async def test_a_refusal_by_all_has_their_status(gate: Gate, client: aiohttp.ClientSession) -> None:
    status, report = await call(client, gate, "POST", "/begin_weight_update")  # SGLang's: these engines have none
    assert (status, report["success"]) == (404, False)


async def test_control_without_replicas_is_refused(client: aiohttp.ClientSession) -> None:
    async with Gate(config()) as gate:
        status, said = await call(client, gate, "POST", "/pause")
        assert (status, said["error"]["code"]) == (503, "no_replica")
        assert state(gate)["paused"] is False


async def test_a_pause_that_no_replica_took_is_no_pause(client: aiohttp.ClientSession) -> None:
    async with Gate(config(NOWHERE)) as gate:
        status, _ = await call(client, gate, "POST", "/pause")
        assert status == 502
        assert state(gate)["paused"] is False


async def test_many_update_calls_of_one_pause_are_one_epoch(gate: Gate, client: aiohttp.ClientSession) -> None:
    for epoch in (1, 2):
        await call(client, gate, "POST", "/pause", params={"mode": "keep", "clear_cache": "false"})
        for _ in range(3):
            await call(client, gate, "POST", "/reset_prefix_cache")
        await call(client, gate, "POST", "/resume")
        assert state(gate)["epoch"] == epoch


async def test_a_resume_at_the_engines_is_noticed(
    gate: Gate, engines: list[EngineServer], client: aiohttp.ClientSession
) -> None:
    await call(client, gate, "POST", "/pause", params={"mode": "keep"})
    await until(lambda: all(monitor.engine_paused for monitor in gate.replicas.monitors()))
    await asyncio.sleep(0.1)
    assert state(gate)["paused"] is True
    for engine in engines:
        async with client.post(f"{engine.url}/resume") as reply:
            assert reply.status == 200
    await until(lambda: not state(gate)["paused"])
    assert await complete(client, gate, "s") == 200


async def test_a_cache_reset_through_the_gate_makes_what_kv_events_said_void(client: aiohttp.ClientSession) -> None:
    """The engine publishes a cleared cache no sooner than its next step: until then nothing is known."""
    watching = msgspec.structs.replace(QUICK, kv_events="auto", residency_period_s=0.05)
    engine_config = EngineConfig(kv_tokens=8192, time_scale=50.0, kv_events_port=0, kv_events_replay_port=0)
    async with EngineServer(engine_config) as engine, Gate(config(engine.url, engines=watching)) as gate:

        def resident_tokens() -> int | None:
            (replica,) = state(gate)["replicas"]
            tokens: int | None = replica["kv_resident_tokens"]
            return tokens

        await gate.replicas.wait_probed()
        body = {"model": "tidegate", "prompt": list(range(5, 105)), "max_tokens": 2}
        assert (await call(client, gate, "POST", "/v1/completions", json=body))[0] == 200
        await until(lambda: bool(resident_tokens()))
        assert (await call(client, gate, "POST", "/reset_prefix_cache"))[0] == 200
        for _ in range(20):
            await asyncio.sleep(0.02)
            assert resident_tokens() is None


@pytest.mark.parametrize("path", ["/abort_requests", "/abort_request"])
async def test_an_abort_of_all_answers_what_is_held_and_leaves_no_trace(
    path: str, engines: list[EngineServer], client: aiohttp.ClientSession
) -> None:
    core = CoreParams(tick_s=0.05, static_cap=StaticCapParams(cap=1))
    async with Gate(config(engines[0].url, policy="static_cap", core=core)) as gate:
        await gate.replicas.wait_probed()
        assert await complete(client, gate, "admitted") == 200
        held = [asyncio.create_task(complete(client, gate, f"held {number}")) for number in range(3)]
        await until(lambda: state(gate)["requests"]["waiting"] == 3)
        status, report = await call(client, gate, "POST", path, json={"abort_all": True})
        assert (status, report["held_aborted"]) == (200, 3)
        assert await asyncio.gather(*held) == [499] * 3
        assert state(gate)["sessions"] == {"live": 1, "held": 0, "paused": 0}
        assert await complete(client, gate, "admitted") == 200


@pytest.mark.parametrize("prefix", ["", "cmpl-", "chatcmpl-"])
async def test_an_abort_of_named_requests_answers_those_of_them_that_are_held(
    prefix: str, engines: list[EngineServer], client: aiohttp.ClientSession
) -> None:
    core = CoreParams(tick_s=0.05, static_cap=StaticCapParams(cap=1))
    async with Gate(config(engines[0].url, policy="static_cap", core=core)) as gate:
        await gate.replicas.wait_probed()
        assert await complete(client, gate, "admitted") == 200
        named = asyncio.create_task(complete(client, gate, "named", **{"X-Request-Id": "r-1"}))
        held = asyncio.create_task(complete(client, gate, "held", **{"X-Request-Id": "r-2"}))
        await until(lambda: state(gate)["requests"]["waiting"] == 2)
        ids = [f"{prefix}r-1", "cmpl-x"]
        status, report = await call(client, gate, "POST", "/abort_requests", json={"request_ids": ids})
        assert (status, report["held_aborted"]) == (200, 1)
        assert await named == 499
        await call(client, gate, "POST", "/finish_session", params={"session_id": "admitted"})
        assert await held == 200


@pytest.mark.parametrize("path", ["/pause/", "/%70ause", "//pause"])
async def test_a_control_call_in_another_spelling_reaches_every_replica_too(
    path: str, gate: Gate, client: aiohttp.ClientSession
) -> None:
    target = URL(gate.url + path + "?mode=keep", encoded=True)
    async with client.post(target) as reply:
        report = await reply.json()
    assert (reply.status, set(report["replicas"])) == (200, set(gate.replicas.urls))
    assert state(gate)["paused"] is True
    await call(client, gate, "POST", "/resume")
