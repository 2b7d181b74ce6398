"""What trainers do to a pool while it serves: pause it, reset it, change its members."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from tests.e2e.conftest import Replica, StartGate
from tests.e2e.gate import Gate, replica_of
from tests.e2e.process import free_ports
from tests.e2e.turns import finish, turn
from tests.e2e.waiting import until


@pytest.fixture
async def gate(start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession) -> AsyncIterator[Gate]:
    gate = start_gate([replica.url for replica in replicas])
    await gate.ready(client, 2)
    yield gate
    for replica in replicas:
        await post(client, f"{replica.url}/resume")


async def post(client: aiohttp.ClientSession, url: str, **arguments: Any) -> Any:
    async with client.post(url, **arguments) as reply:
        assert reply.status == 200, (url, reply.status, await reply.text())
        return await reply.json()


async def engine_paused(client: aiohttp.ClientSession, replica: Replica) -> bool:
    async with client.get(f"{replica.url}/is_paused") as reply:
        return bool((await reply.json())["is_paused"])


async def pool_paused(gate: Gate, client: aiohttp.ClientSession, expected: bool) -> Any:
    return await until(lambda: gate.state(client), lambda state: state["paused"] is expected)


async def waiting(gate: Gate, client: aiohttp.ClientSession, count: int) -> Any:
    return await until(lambda: gate.state(client), lambda state: state["requests"]["waiting"] == count)


async def test_requests_wait_through_a_pause_and_run_after_it(
    gate: Gate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    await turn(client, gate.url, "old")
    await post(client, f"{gate.url}/pause", params={"mode": "keep"})
    assert [await engine_paused(client, replica) for replica in replicas] == [True, True]
    async with client.get(f"{gate.url}/is_paused") as reply:
        assert (await reply.json())["is_paused"] is True
    requests = [asyncio.create_task(turn(client, gate.url, session)) for session in ("old", "new")]
    state = await waiting(gate, client, 2)
    assert state["requests"]["in_flight"] == 0
    assert state["paused"] is True
    await post(client, f"{gate.url}/resume")
    await asyncio.gather(*requests)
    assert [await engine_paused(client, replica) for replica in replicas] == [False, False]
    assert (await gate.state(client))["paused"] is False


async def test_a_held_client_that_leaves_during_a_pause_is_forgotten(gate: Gate, client: aiohttp.ClientSession) -> None:
    await post(client, f"{gate.url}/pause", params={"mode": "keep"})
    request = asyncio.create_task(turn(client, gate.url, "gone"))
    await waiting(gate, client, 1)
    request.cancel()
    await waiting(gate, client, 0)
    await post(client, f"{gate.url}/resume")
    await gate.idle(client)


async def test_a_pause_made_at_the_engines_is_seen(
    gate: Gate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    for replica in replicas:
        await post(client, f"{replica.url}/pause", params={"mode": "keep"})
    await pool_paused(gate, client, True)
    request = asyncio.create_task(turn(client, gate.url, "waits"))
    await waiting(gate, client, 1)
    for replica in replicas:
        await post(client, f"{replica.url}/resume")
    await request
    await pool_paused(gate, client, False)


async def test_a_cache_reset_reaches_every_engine_and_starts_an_epoch(
    gate: Gate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    before = (await gate.state(client))["epoch"]
    prompt_tokens = {}
    for session in ("one", "two"):
        prompt_tokens[session] = (await turn(client, gate.url, session))["usage"]["prompt_tokens"]
    await post(client, f"{gate.url}/reset_prefix_cache")
    assert (await gate.state(client))["epoch"] == before + 1
    for session in ("one", "two"):
        assert (await turn(client, gate.url, session))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.embedded
async def test_a_weight_update_starts_an_epoch(gate: Gate, client: aiohttp.ClientSession) -> None:
    before = (await gate.state(client))["epoch"]
    await post(client, f"{gate.url}/update_weights", json={"update_info": {}})
    assert (await gate.state(client))["epoch"] == before + 1


async def test_aborting_all_requests_reaches_every_engine(
    gate: Gate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    report = await post(client, f"{gate.url}/abort_requests", json={"request_ids": ["nobody's"]})
    text = str(report)
    assert all(replica.url in text for replica in replicas), report


async def test_a_replica_added_while_running_takes_sessions_and_a_removed_one_gives_them_up(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    first, second = (replica.url for replica in replicas)
    gate = start_gate([first])
    await gate.ready(client, 1)
    await turn(client, gate.url, "a")
    await post(client, f"{gate.url}/workers", json={"url": second})
    await gate.ready(client, 2)
    await turn(client, gate.url, "b")
    assert replica_of(await gate.state(client), second)["sessions"] == 1
    async with client.delete(f"{gate.url}/workers/{quote(second, safe='')}") as reply:
        assert reply.status in (200, 202, 204)
    await turn(client, gate.url, "b")
    state = await until(lambda: gate.state(client), lambda state: [r["url"] for r in state["replicas"]] == [first])
    assert replica_of(state, first)["sessions"] == 2
    for session in ("a", "b"):
        await finish(client, gate.url, session)
    await gate.idle(client)


async def test_workers_can_be_added_listed_and_removed_the_old_way(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    gate = start_gate([replicas[0].url])
    await post_text(client, f"{gate.url}/add_worker", replicas[1].url)
    await gate.ready(client, 2)
    await post_text(client, f"{gate.url}/add_worker", replicas[1].url)  # again: nothing changes
    async with client.get(f"{gate.url}/list_workers") as reply:
        assert sorted((await reply.json())["urls"]) == sorted(replica.url for replica in replicas)
    async with client.get(f"{gate.url}/get_loads") as reply:
        assert reply.status == 200
    await post_text(client, f"{gate.url}/remove_worker", replicas[1].url)
    async with client.get(f"{gate.url}/list_workers") as reply:
        assert (await reply.json())["urls"] == [replicas[0].url]


async def post_text(client: aiohttp.ClientSession, url: str, worker: str) -> None:
    async with client.post(url, params={"url": worker}) as reply:
        assert reply.status == 200, await reply.text()


@pytest.mark.parametrize("url", ["", "not a url", "ftp://127.0.0.1:1", "http://"])
async def test_a_bad_worker_url_is_refused(url: str, gate: Gate, client: aiohttp.ClientSession) -> None:
    async with client.post(f"{gate.url}/workers", json={"url": url}) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["code"]
    assert len((await gate.state(client))["replicas"]) == 2


async def test_an_unreachable_worker_at_start_degrades_the_pool_and_does_not_stop_it(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    (nobody,) = free_ports(1)
    absent = f"http://127.0.0.1:{nobody}"
    gate = start_gate([absent, replicas[0].url])
    await gate.ready(client, 1)
    await asyncio.gather(*(turn(client, gate.url, f"s{number}") for number in range(4)))
    state = await gate.state(client)
    assert replica_of(state, absent)["ready"] is False
    assert replica_of(state, absent)["reason"]
    assert replica_of(state, replicas[0].url)["sessions"] == 4
