"""The gate as a whole: what it shows, and how it stops."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.server.live import NOWHERE, QUICK, call, complete, config, state, until

from tidegate.config.server import RecordConfig, ServerConfig
from tidegate.engine.server import EngineServer
from tidegate.observe.metrics import METRICS
from tidegate.policy.baselines.params import StaticCapParams
from tidegate.policy.params import AdmissionParams, CoreParams, ReplicaParams
from tidegate.server.gate import Gate
from tidegate.server.replicas import Replicas


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


async def test_state_metric_and_alarm_agree_on_what_is_stale(
    engines: list[EngineServer], client: aiohttp.ClientSession
) -> None:
    core = CoreParams(tick_s=0.05, replica=ReplicaParams(stale_after_s=0.5))
    async with Gate(config(engines[0].url, core=core)) as gate:
        await until(lambda: state(gate)["replicas"][0]["kv_capacity_tokens"] is not None)
        assert state(gate)["replicas"][0]["stale"] is False
        await engines[0].kill()
        await until(lambda: state(gate)["replicas"][0]["stale"])
        assert f"stale_state {engines[0].url}" in state(gate)["alarms"]
        _, text = await call(client, gate, "GET", "/metrics")
        assert f'tidegate_replica_stale{{replica="{engines[0].url}"}} 1.0' in text


async def test_a_fault_in_a_route_of_the_gates_own_has_the_shape_of_any_error(
    gate: Gate, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replicas, "urls", property(lambda self: 1 / 0))
    for method, path in (("GET", "/list_workers"), ("POST", "/pause")):
        status, said = await call(client, gate, method, path)
        assert (status, said["error"]["code"], said["error"]["type"]) == (500, "internal_error", "server_error")
    assert gate.driver.counters.faults == 2
    assert await call(client, gate, "GET", "/health") == (200, "OK")


async def test_a_gate_whose_ticks_fail_says_so_and_is_ready_again_when_they_do_not(
    gate: Gate, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(gate.driver, "tick", lambda: 1 / 0)
        await until(lambda: gate.driver.failed_ticks >= 3)
        status, ready = await call(client, gate, "GET", "/readiness")
        assert (status, ready["status"], ready["reasons"]) == (503, "not_ready", {"gate": "failed_ticks"})
        assert any(alarm.startswith("failed_ticks") for alarm in state(gate)["alarms"])
    await until(lambda: gate.driver.failed_ticks == 0)
    assert (await call(client, gate, "GET", "/readiness"))[0] == 200
    assert not state(gate)["alarms"]


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
