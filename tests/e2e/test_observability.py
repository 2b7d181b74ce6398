"""What the gate says of its pool is what the engines say, and what it decided can be derived again."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.conftest import Replica, StartGate
from tests.e2e.engine_metrics import kv_capacity_tokens, total
from tests.e2e.gate import TIDEGATE, replica_of
from tests.e2e.inference import token_ids
from tests.e2e.turns import finish, rollout, turn
from tests.e2e.waiting import until


async def test_capacity_is_the_engines_own(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    gate = start_gate([replica.url for replica in replicas])
    state = await gate.ready(client, 2)
    for replica in replicas:
        capacity = replica_of(state, replica.url)["kv_capacity_tokens"]
        assert capacity == await kv_capacity_tokens(client, replica.url) == replica.kv_capacity_tokens


async def test_kv_use_is_the_sum_of_what_the_engine_counted(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    gate = start_gate([replicas[0].url])
    await gate.ready(client, 1)
    replies = [await rollout(client, gate.url, f"counted {number}", 2) for number in range(3)]
    used = sum(turns[-1]["usage"]["total_tokens"] for turns in replies)
    assert replica_of(await gate.state(client), replicas[0].url)["kv_used_tokens"] == used


async def test_resident_kv_comes_from_the_engines_events(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    gate = start_gate([replicas[0].url])
    await gate.ready(client, 1)

    async def resident() -> int | None:
        value = replica_of(await gate.state(client), replicas[0].url)["kv_resident_tokens"]
        return None if value is None else int(value)

    await turn(client, gate.url, "resident", token_ids(3200, "resident"))
    await until(resident, lambda tokens: tokens is not None and tokens >= 3200 // 32 * 32)


async def test_state_has_what_it_promises(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    gate = start_gate([replica.url for replica in replicas], "misa_t")
    await gate.ready(client, 2)
    await turn(client, gate.url, "s", workload="rlhf")
    state = await gate.state(client)
    assert state["policy"] == "misa_t"
    assert state["sessions"] == {"live": 1, "held": 0, "paused": 0}
    assert state["requests"]["in_flight"] == 0
    assert isinstance(state["epoch"], int)
    promised = {"url", "ready", "sessions", "requests", "kv_capacity_tokens", "kv_used_tokens", "stale"}
    assert all(promised <= replica.keys() for replica in state["replicas"])
    assert {"live", "held", "cap", "footprint_tokens", "residency_s"} <= state["classes"]["rlhf"].keys()
    assert state["classes"]["rlhf"]["live"] == 1


async def test_metrics_parse_and_have_no_label_per_session(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    gate = start_gate([replica.url for replica in replicas])
    await gate.ready(client, 2)
    sessions = [f"unbounded label {number}" for number in range(5)]
    await asyncio.gather(*(turn(client, gate.url, session, workload="rlvr") for session in sessions))
    async with client.get(f"{gate.url}/metrics") as reply:
        assert reply.status == 200
        text = await reply.text()
    own = [family for family in text_string_to_metric_families(text) if family.name.startswith("tidegate_")]
    assert len(own) > 10
    assert all(family.documentation for family in own)
    labels = {value for family in own for sample in family.samples for value in sample.labels.values()}
    assert "rlvr" in labels
    assert not labels & set(sessions)


async def test_metrics_count_what_the_engines_counted(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    gate = start_gate([replicas[0].url])
    await gate.ready(client, 1)
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [await total(client, replicas[0].url, name) for name in names]
    await rollout(client, gate.url, "tokens counted", 3)
    engine = [await total(client, replicas[0].url, name) - was for name, was in zip(names, before, strict=True)]
    names = ("tidegate_prompt_tokens_total", "tidegate_completion_tokens_total")
    assert [await total(client, gate.url, name) for name in names] == engine


@pytest.mark.parametrize("policy", ["misa_t", "static_cap", "power_of_two"])
async def test_the_decision_log_replays_to_the_same_decisions(
    policy: str, start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    log = tmp_path / "decisions.jsonl"
    settings = {"TIDEGATE_RECORD_PATH": str(log), "TIDEGATE_CORE_STATIC_CAP_CAP": "2"}
    gate = start_gate([replica.url for replica in replicas], policy, settings=settings)
    await gate.ready(client, 2)

    async def session(name: str) -> None:
        await rollout(client, gate.url, name, 2, "agentic")
        await finish(client, gate.url, name)

    await asyncio.gather(*(session(f"{policy} {number}") for number in range(8)))
    await gate.idle(client)
    gate.process.terminate()
    command = [str(TIDEGATE), "replay", str(log)]
    replay = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert replay.returncode == 0, replay.stdout + replay.stderr
    lines = log.read_text().splitlines()
    places = sum(line.count('"decision":"place"') for line in lines)
    assert places == 16

    # One decision changed, and it must say so.
    changed = next(number for number, line in enumerate(lines) if '"decision":"place"' in line)
    lines[changed] = lines[changed].replace(replicas[0].url, "X").replace(replicas[1].url, replicas[0].url)
    lines[changed] = lines[changed].replace('"replica":"X"', json.dumps({"replica": replicas[1].url})[1:-1])
    log.write_text("\n".join(lines) + "\n")
    replay = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert replay.returncode != 0
