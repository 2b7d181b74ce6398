"""Engines with the plugin: what a gate tells them, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.conftest import Replica, StartGate, _start
from tests.e2e.embedded import EmbeddedReplica
from tests.e2e.gate import Gate
from tests.e2e.inference import completion, encode, token_ids
from tests.e2e.turns import attempt, finish, turn
from tests.e2e.waiting import until

BLOCK_TOKENS = 32


@pytest.fixture(scope="module")
def plugged(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """One engine with the plugin, of this module's own."""
    (replica,) = _start(backend, tmp_path_factory.mktemp("plugged"), 1, plugin=True)
    yield replica
    replica.process.kill()


@pytest.fixture(autouse=True)
async def fresh(plugged: Replica, client: aiohttp.ClientSession) -> None:
    """Nothing cached."""

    async def reset() -> bool:
        async with client.post(f"{plugged.url}/reset_prefix_cache") as reply:
            return bool((await reply.json())["success"])

    await until(reset, bool)


async def gate_of(
    start_gate: StartGate, replica: Replica, client: aiohttp.ClientSession, *, used: bool = True, **options: Any
) -> Gate:
    gate = start_gate([replica.url], **options)
    await gate.ready(client, 1)
    await until(lambda: plugin(gate, client), lambda view: view["used"] is used and view["reason"] != "not_asked")
    return gate


async def plugin(gate: Gate, client: aiohttp.ClientSession) -> Any:
    (replica,) = (await gate.state(client))["replicas"]
    return replica["plugin"]


async def exposition(gate: Gate, client: aiohttp.ClientSession) -> str:
    async with client.get(f"{gate.url}/metrics") as reply:
        return await reply.text()


async def resident(replica: Replica, client: aiohttp.ClientSession) -> Any:
    async with client.get(f"{replica.url}/tidegate/sessions") as reply:
        return (await reply.json())["sessions"]


async def until_resident(replica: Replica, client: aiohttp.ClientSession, accept: Callable[[Any], bool]) -> Any:
    return await until(lambda: resident(replica, client), accept)


async def test_a_finished_session_is_released(
    start_gate: StartGate, plugged: Replica, client: aiohttp.ClientSession
) -> None:
    gate = await gate_of(start_gate, plugged, client)
    for session in ("stays", "ends"):
        await turn(client, gate.url, session, token_ids(512, session))
    assert {name: entry["blocks"] for name, entry in (await resident(plugged, client)).items()} == {
        "stays": 16,
        "ends": 16,
    }
    await finish(client, gate.url, "ends")
    await until_resident(plugged, client, lambda sessions: set(sessions) == {"stays"})
    text = await exposition(gate, client)
    assert f'tidegate_plugin_moved_blocks_total{{hint="release",replica="{plugged.url}"}} 16.0' in text
    assert f'tidegate_plugin_used{{reason="ok",replica="{plugged.url}"}} 1.0' in text


async def test_a_session_that_the_engine_would_not_find_is_released_too(
    start_gate: StartGate, plugged: Replica, client: aiohttp.ClientSession
) -> None:
    gate = await gate_of(start_gate, plugged, client)
    headers = {"Content-Type": "application/json", "X-SMG-Routing-Key": "routed"}
    body = encode(completion(token_ids(512, "routed")))
    async with client.post(f"{gate.url}/v1/completions", data=body, headers=headers) as reply:
        assert reply.status == 200
    assert set(await resident(plugged, client)) == {"routed"}
    await finish(client, gate.url, "routed")
    await until_resident(plugged, client, lambda sessions: sessions == {})


async def test_a_live_sessions_kv_outlasts_that_of_finished_ones(
    start_gate: StartGate, plugged: Replica, client: aiohttp.ClientSession
) -> None:
    gate = await gate_of(start_gate, plugged, client)
    live = token_ids(6000, "live")
    await turn(client, gate.url, "live", live)
    for number in range(4):
        dead = f"dead-{number}"
        await turn(client, gate.url, dead, token_ids(4000, dead))
        await finish(client, gate.url, dead)
        await until_resident(plugged, client, lambda sessions, dead=dead: dead not in sessions)
    reply = await turn(client, gate.url, "live", live + token_ids(50, "next"))
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 6000 - 2 * BLOCK_TOKENS


async def test_a_paused_session_is_demoted_and_protected_when_it_goes_on(
    start_gate: StartGate, plugged: Replica, client: aiohttp.ClientSession
) -> None:
    small = {"TIDEGATE_ENGINES_KV_CAPACITY_TOKENS": "4000"}
    gate = await gate_of(start_gate, plugged, client, policy="working_set", settings=small)
    prompts = {session: token_ids(1500, session) for session in ("older", "newer")}
    for session, prompt in prompts.items():
        await turn(client, gate.url, session, prompt)
    await turn(client, gate.url, "older", prompts["older"] + token_ids(1600, "growth"))
    paused = asyncio.create_task(turn(client, gate.url, "newer", prompts["newer"] + token_ids(300, "on")))
    await until_resident(plugged, client, lambda sessions: sessions["newer"]["demoted"])
    assert (await gate.state(client))["sessions"]["paused"] == 1
    await finish(client, gate.url, "older")
    await paused
    sessions = await until_resident(plugged, client, lambda sessions: set(sessions) == {"newer"})
    assert not sessions["newer"]["demoted"]
    await finish(client, gate.url, "newer")


async def test_a_client_that_leaves_and_finishes_leaves_nothing_behind(
    start_gate: StartGate, plugged: Replica, client: aiohttp.ClientSession
) -> None:
    """Its finish call may overtake the end of its request in the engine."""
    gate = await gate_of(start_gate, plugged, client)
    leaving = asyncio.create_task(attempt(client, gate.url, "leaves", token_ids(2000, "leaves"), 4000))
    await until_resident(plugged, client, lambda sessions: "leaves" in sessions)
    leaving.cancel()
    await finish(client, gate.url, "leaves")
    await until_resident(plugged, client, lambda sessions: sessions == {})


async def test_switched_off_nothing_is_told(
    start_gate: StartGate, plugged: Replica, client: aiohttp.ClientSession
) -> None:
    gate = await gate_of(start_gate, plugged, client, used=False, settings={"TIDEGATE_ENGINES_PLUGIN": "off"})
    assert (await plugin(gate, client))["reason"] == "switched_off"
    await turn(client, gate.url, "ends", token_ids(512, "ends"))
    await finish(client, gate.url, "ends")
    await gate.idle(client)
    assert set(await resident(plugged, client)) == {"ends"}


async def test_an_engine_without_it_is_used_as_ever(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    gate = await gate_of(start_gate, replicas[0], client, used=False)
    assert (await plugin(gate, client))["reason"] == "absent"
    await turn(client, gate.url, "some")
    await finish(client, gate.url, "some")
    await gate.idle(client)


@pytest.mark.embedded
async def test_a_finished_session_is_closed_in_an_sglang_that_keeps_sessions(
    start_gate: StartGate, tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    sglang = EmbeddedReplica(tmp_path / "sglang.log", dialect="sglang", plugin=True)
    sglang.start()
    try:
        sglang.wait_ready()
        gate = await gate_of(start_gate, sglang, client)
        assert (await plugin(gate, client))["kind"] == "session_radix_cache"
        live = token_ids(6000, "live")
        await turn(client, gate.url, "live", live)
        for number in range(4):
            dead = f"dead-{number}"
            await turn(client, gate.url, dead, token_ids(4000, dead))
            await finish(client, gate.url, dead)
            told = f'tidegate_plugin_sessions_total{{hint="release",replica="{sglang.url}"}} {number + 1}.0'
            await until(lambda: exposition(gate, client), lambda text, told=told: told in text)
        reply = await turn(client, gate.url, "live", live + token_ids(50, "next"))
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 6000 - 2 * BLOCK_TOKENS
    finally:
        sglang.process.kill()


async def test_a_restarted_engine_is_asked_again(
    start_gate: StartGate, plugged: Replica, client: aiohttp.ClientSession
) -> None:
    gate = await gate_of(start_gate, plugged, client)
    before = (await plugin(gate, client))["instance"]
    await turn(client, gate.url, "before", token_ids(512, "before"))
    plugged.restart()
    await until(lambda: plugin(gate, client), lambda view: view["used"] and view["instance"] != before, within_s=300.0)
    await gate.ready(client, 1)
    await finish(client, gate.url, "before")  # of which the engine knows nothing
    await turn(client, gate.url, "after", token_ids(512, "after"))
    await finish(client, gate.url, "after")
    await until_resident(plugged, client, lambda sessions: sessions == {})
    async with client.get(f"{gate.url}/workers") as reply:
        (worker,) = (await reply.json())["workers"]
    assert worker["plugin"]["used"]
