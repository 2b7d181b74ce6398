"""The gate's own routes, on a gate and embedded engines in this process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tidegate.config.engines import EnginesConfig
from tidegate.config.server import IdentityConfig, RecordConfig, ServerConfig
from tidegate.config.tree import Config
from tidegate.engine.config import EngineConfig
from tidegate.engine.server import EngineServer
from tidegate.engines.discovery import DuplicateWorkerUrl
from tidegate.observe.metrics import METRICS
from tidegate.policy.baselines.params import StaticCapParams
from tidegate.policy.params import AdmissionParams, CoreParams
from tidegate.server.gate import Gate

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing answers
QUICK = EnginesConfig(scrape_period_s=0.05, health_period_s=0.1, health_timeout_s=2.0, kv_events="off")


@pytest.fixture
async def engines() -> AsyncIterator[list[EngineServer]]:
    config = EngineConfig(kv_tokens=8192, time_scale=50.0)
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(EngineServer(config)) for _ in range(2)]


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


def config(*urls: str, policy: str = "sticky_least_loaded", **sections: Any) -> Config:
    server = msgspec.structs.replace(sections.pop("server", ServerConfig()), worker_urls=urls, port=0)
    return Config(
        policy=policy,
        server=server,
        engines=sections.pop("engines", QUICK),
        core=sections.pop("core", CoreParams(tick_s=0.05)),
        **sections,
    )


@pytest.fixture
async def gate(engines: list[EngineServer]) -> AsyncIterator[Gate]:
    async with Gate(config(*(engine.url for engine in engines))) as gate:
        await gate.replicas.wait_probed()
        yield gate


async def call(client: aiohttp.ClientSession, gate: Gate, method: str, path: str, **arguments: Any) -> tuple[int, Any]:
    async with client.request(method, gate.url + path, **arguments) as reply:
        text = await reply.text()
        return reply.status, json.loads(text) if "json" in reply.content_type else text


async def complete(client: aiohttp.ClientSession, gate: Gate, session: str | None, **headers: str) -> int:
    named = {"X-Session-ID": session} if session else {}
    body = {"model": "tidegate", "prompt": "hello", "max_tokens": 2}
    status, _ = await call(client, gate, "POST", "/v1/completions", json=body, headers={**named, **headers})
    return status


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            if true():
                return
            await asyncio.sleep(0.01)


def state(gate: Gate) -> Any:
    return json.loads(msgspec.json.encode(gate.state()))


# --- status ----------------------------------------------------------------------------------------------------------
async def test_health_readiness_and_state(gate: Gate, client: aiohttp.ClientSession) -> None:
    assert await call(client, gate, "GET", "/health") == (200, "OK")
    status, ready = await call(client, gate, "GET", "/readiness")
    assert (status, ready["status"], ready["healthy_workers"], ready["total_workers"]) == (200, "ready", 2, 2)
    status, shown = await call(client, gate, "GET", "/state")
    assert status == 200
    assert shown["sessions"] == {"live": 0, "held": 0, "paused": 0}
    assert [replica["health"]["state"] for replica in shown["replicas"]] == ["healthy", "healthy"]


async def test_a_gate_without_a_usable_replica_lives_and_is_not_ready(client: aiohttp.ClientSession) -> None:
    async with Gate(config(NOWHERE)) as gate:
        await gate.replicas.wait_probed()
        assert (await call(client, gate, "GET", "/health"))[0] == 200
        status, ready = await call(client, gate, "GET", "/readiness")
        assert (status, ready["status"]) == (503, "not_ready")
        assert ready["reasons"][NOWHERE]
        status, error = await call(client, gate, "GET", "/v1/models")
        assert (status, error["error"]["code"]) == (503, "no_replica")


async def test_settings_of_single_replicas_take_any_spelling_of_their_url() -> None:
    engines = msgspec.structs.replace(QUICK, kv_capacity_tokens_by_url={"HTTP://127.0.0.1:9/": 4321})
    async with Gate(config(NOWHERE, engines=engines)) as gate:
        assert [replica["kv_capacity_tokens"] for replica in state(gate)["replicas"]] == [4321]


async def test_every_metric_of_the_table_is_exposed_once_and_nothing_else(
    engines: list[EngineServer], client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    record = RecordConfig(path=str(tmp_path / "log"))
    async with Gate(config(*(engine.url for engine in engines), record=record)) as gate:
        await gate.replicas.wait_probed()
        await complete(client, gate, "s", **{"X-Workload-Class": "agentic"})
        await complete(client, gate, None)
        await complete(client, gate, "x" * 300)
        await call(client, gate, "GET", "/v1/models")
        _, text = await call(client, gate, "GET", "/metrics")
    families = [f for f in text_string_to_metric_families(text) if f.name.startswith("tidegate_")]
    names = [f.name + "_total" if f.type == "counter" else f.name for f in families]
    assert names == [metric.name for metric in METRICS]
    table = {metric.name: metric for metric in METRICS}
    for name, family in zip(names, families, strict=True):
        samples = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        assert len(samples) == len(set(samples)), name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(table[name].labels), name
    values = {(s.name, s.labels.get("workload_class")): s.value for f in families for s in f.samples}
    assert values["tidegate_prompt_tokens_total", "agentic"] > 0
    assert values["tidegate_request_duration_seconds_count", "unlabelled"] == 1


async def test_the_metrics_port_serves_metrics_and_nothing_else(
    engines: list[EngineServer], client: aiohttp.ClientSession
) -> None:
    async with Gate(config(engines[0].url, server=ServerConfig(prometheus_port=0))) as gate:
        assert gate.metrics_listener is not None
        base = f"http://127.0.0.1:{gate.metrics_listener.port}"
        async with client.get(f"{base}/metrics") as reply:
            assert "tidegate_build_info" in await reply.text()
        async with client.get(f"{base}/v1/models") as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (404, "not_found")


# --- sessions --------------------------------------------------------------------------------------------------------
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


# --- mixture ---------------------------------------------------------------------------------------------------------
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


# --- workers ---------------------------------------------------------------------------------------------------------
async def test_workers_have_vllm_routers_shapes(gate: Gate, client: aiohttp.ClientSession) -> None:
    urls = gate.replicas.urls
    _, listed = await call(client, gate, "GET", "/workers")
    assert [worker["url"] for worker in listed["workers"]] == urls
    assert listed["total"] == listed["stats"]["regular_count"] == 2
    worker = listed["workers"][0]
    assert {"url", "model_id", "worker_type", "is_healthy", "load", "connection_mode", "priority", "cost"} <= set(
        worker
    )
    assert worker["is_healthy"] is True
    assert (await call(client, gate, "GET", "/list_workers"))[1] == {"urls": urls}
    loads = (await call(client, gate, "GET", "/get_loads"))[1]
    assert loads == {"workers": [{"worker": url, "load": 0} for url in urls]}
    _, shown = await call(client, gate, "GET", f"/workers/{quote(urls[1], safe='')}")
    assert shown["url"] == urls[1]


async def test_adding_says_how_the_replica_is_and_may_be_repeated(
    engines: list[EngineServer], client: aiohttp.ClientSession
) -> None:
    async with Gate(config()) as gate:
        for message in ("Successfully added", "already exists"):
            status, said = await call(client, gate, "POST", "/workers", json={"url": engines[0].url + "/"})
            assert (status, said["success"]) == (200, True)
            assert message in said["message"]
            assert said["worker"]["is_healthy"] is True
        status, said = await call(client, gate, "POST", "/add_worker", params={"url": NOWHERE})
        assert status == 200
        assert said["worker"]["is_healthy"] is False
        assert said["worker"]["error"]
        assert await complete(client, gate, "s") == 200
        for known in (True, False):
            status, said = await call(client, gate, "DELETE", "/workers", params={"url": NOWHERE})
            assert (status, said["known"]) == (200, known)
        assert gate.replicas.urls == [engines[0].url]


@pytest.mark.parametrize(
    ("method", "path", "arguments", "status", "code"),
    [
        ("POST", "/workers", {"json": {}}, 400, "missing_worker_url"),
        ("POST", "/add_worker", {}, 400, "missing_worker_url"),
        ("POST", "/workers", {"json": {"url": "ftp://x"}}, 400, "invalid_worker_url"),
        ("DELETE", "/workers/%20", {}, 400, "invalid_worker_url"),
        ("GET", "/workers/http%3A%2F%2Fnobody", {}, 404, "unknown_worker"),
    ],
)
async def test_bad_worker_calls_have_stable_reasons(
    method: str,
    path: str,
    arguments: dict[str, Any],
    status: int,
    code: str,
    gate: Gate,
    client: aiohttp.ClientSession,
) -> None:
    assert (await call(client, gate, method, path, **arguments))[0] == status
    said = (await call(client, gate, method, path, **arguments))[1]
    assert said["error"]["code"] == code


async def test_a_url_that_stands_twice_does_not_start() -> None:
    with pytest.raises(DuplicateWorkerUrl):
        async with Gate(config("http://a:1", "a:1/")):
            pass


async def test_a_removed_replica_with_sessions_is_shown_as_leaving(gate: Gate, client: aiohttp.ClientSession) -> None:
    await complete(client, gate, "s")
    home = next(replica["url"] for replica in state(gate)["replicas"] if replica["sessions"])
    gate.replicas.remove(home)
    assert home not in [replica["url"] for replica in state(gate)["replicas"]]
    assert [replica["url"] for replica in state(gate)["leaving"]] == [home]


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


@pytest.mark.parametrize("shares", [{"a": 10**400}, {"a": 1e308, "b": 1e308}])
async def test_shares_that_have_no_sum_are_refused(
    gate: Gate, client: aiohttp.ClientSession, shares: dict[str, float]
) -> None:
    status, error = await call(client, gate, "PUT", "/mixture", data=json.dumps({"shares": shares}))
    assert (status, error["error"]["code"]) == (400, "invalid_field")


# --- control ---------------------------------------------------------------------------------------------------------
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


# --- shutdown --------------------------------------------------------------------------------------------------------
async def test_a_drain_refuses_what_is_held_and_lets_the_rest_end(
    engines: list[EngineServer], client: aiohttp.ClientSession
) -> None:
    core = CoreParams(tick_s=0.05, static_cap=StaticCapParams(cap=1), admission=AdmissionParams())
    async with Gate(config(engines[0].url, policy="static_cap", core=core)) as gate:
        await gate.replicas.wait_probed()
        body = {"model": "tidegate", "prompt": "x", "max_tokens": 3000, "ignore_eos": True}
        arguments = {"json": body, "headers": {"X-Session-ID": "runs"}}
        running = asyncio.create_task(call(client, gate, "POST", "/v1/completions", **arguments))
        await until(lambda: state(gate)["requests"]["in_flight"] == 1)
        held = asyncio.create_task(call(client, gate, "POST", "/v1/completions", json=body))
        await until(lambda: state(gate)["requests"]["waiting"] == 1)
        assert state(gate)["holds"][0]["reason"] == "replica_cap"
        cut = await gate.drain(30.0)
        status, said = await held
        assert (status, said["error"]["code"]) == (503, "shutting_down")
        status, said = await running
        assert (status, said["usage"]["completion_tokens"], cut) == (200, 3000, 0)


async def test_a_drain_cuts_what_does_not_end_and_says_so(
    engines: list[EngineServer], client: aiohttp.ClientSession
) -> None:
    async with Gate(config(engines[0].url)) as gate:
        await gate.replicas.wait_probed()
        await call(client, gate, "POST", "/pause", params={"mode": "keep"})
        gate.pausing.resume()  # the engines stand still, and the gate sends all the same
        body = {"model": "tidegate", "prompt": "x", "max_tokens": 10}
        running = asyncio.create_task(call(client, gate, "POST", "/v1/completions", json=body))
        await until(lambda: state(gate)["requests"]["in_flight"] == 1)
        assert await gate.drain(0.05) == 1
        with pytest.raises(aiohttp.ClientError):
            await running
        assert state(gate)["requests"]["in_flight"] == 0
