"""Admission: a new session waits at the door while the pool is full; one that was let in never does."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from tests.e2e.conftest import Replica, StartGate
from tests.e2e.gate import Gate
from tests.e2e.inference import token_ids
from tests.e2e.turns import attempt, finish, turn
from tests.e2e.waiting import until

ONE_SESSION = {"TIDEGATE_CORE_STATIC_CAP_CAP": "1"}


@pytest.fixture
async def gate(start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession) -> Gate:
    """Two replicas, one session each."""
    gate = start_gate([replica.url for replica in replicas], "static_cap", settings=ONE_SESSION)
    await gate.ready(client, 2)
    return gate


async def held(gate: Gate, client: aiohttp.ClientSession, count: int) -> Any:
    return await until(lambda: gate.state(client), lambda state: state["sessions"]["held"] == count)


async def test_the_third_session_waits_until_one_of_two_finishes(gate: Gate, client: aiohttp.ClientSession) -> None:
    await asyncio.gather(turn(client, gate.url, "a"), turn(client, gate.url, "b"))
    waiting = asyncio.create_task(turn(client, gate.url, "c"))
    await held(gate, client, 1)
    for session in ("a", "b"):
        await turn(client, gate.url, session)
    assert not waiting.done()
    await finish(client, gate.url, "a")
    await waiting
    assert (await gate.state(client))["sessions"] == {"live": 2, "held": 0, "paused": 0}


async def test_held_sessions_enter_in_the_order_they_came(gate: Gate, client: aiohttp.ClientSession) -> None:
    await asyncio.gather(turn(client, gate.url, "a"), turn(client, gate.url, "b"))
    entered: list[int] = []

    async def enter(number: int) -> None:
        await turn(client, gate.url, f"waits {number}")
        entered.append(number)
        await finish(client, gate.url, f"waits {number}")

    tasks = []
    for number in range(4):
        tasks.append(asyncio.create_task(enter(number)))
        await held(gate, client, number + 1)
    await finish(client, gate.url, "a")
    await asyncio.gather(*tasks)
    assert entered == [0, 1, 2, 3]


async def test_a_held_client_that_leaves_is_forgotten_at_once(gate: Gate, client: aiohttp.ClientSession) -> None:
    await asyncio.gather(turn(client, gate.url, "a"), turn(client, gate.url, "b"))
    leaves, stays = (asyncio.create_task(turn(client, gate.url, session)) for session in ("leaves", "stays"))
    await held(gate, client, 2)
    leaves.cancel()
    await held(gate, client, 1)
    await finish(client, gate.url, "a")
    await stays
    await finish(client, gate.url, "b")
    await finish(client, gate.url, "stays")
    await gate.idle(client)


async def test_a_sessionless_request_is_held_like_any_other(gate: Gate, client: aiohttp.ClientSession) -> None:
    await asyncio.gather(turn(client, gate.url, "a"), turn(client, gate.url, "b"))
    waiting = asyncio.create_task(turn(client, gate.url, None))
    await held(gate, client, 1)
    await finish(client, gate.url, "a")
    await waiting
    await finish(client, gate.url, "b")
    await gate.idle(client)


async def test_hold_timeout_answers_503_with_retry_after(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    gate = start_gate([replicas[0].url], "static_cap", settings=ONE_SESSION, flags=["--hold-timeout", "0.3"])
    await gate.ready(client, 1)
    await turn(client, gate.url, "a")
    status, headers, reply = await attempt(client, gate.url, "b")
    assert (status, reply["error"]["code"]) == (503, "hold_timeout")
    assert int(headers["Retry-After"]) >= 1
    await turn(client, gate.url, "a")
    assert (await gate.state(client))["sessions"] == {"live": 1, "held": 0, "paused": 0}


async def test_overload_reject_answers_429_to_new_sessions_only(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    gate = start_gate([replicas[0].url], "static_cap", settings=ONE_SESSION, flags=["--overload", "reject"])
    await gate.ready(client, 1)
    await turn(client, gate.url, "a")
    status, headers, reply = await attempt(client, gate.url, "b")
    assert (status, reply["error"]["code"]) == (429, "overloaded")
    assert int(headers["Retry-After"]) >= 1
    await turn(client, gate.url, "a")
    await finish(client, gate.url, "a")
    await turn(client, gate.url, "b")


async def test_misa_t_holds_what_does_not_fit_the_kv_cache(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    """Sessions of 5,000 tokens, 16,384 tokens of KV: four cannot live at once, and all of them get through."""
    gate = start_gate([replicas[0].url], "misa_t")
    await gate.ready(client, 1)
    sessions = [f"big {number}" for number in range(6)]
    peak = 0

    async def whole_session(session: str) -> None:
        nonlocal peak
        announced = {"session_id": session, "workload": "agentic", "expected_tokens": 5000}
        async with client.post(f"{gate.url}/start_session", json=announced) as reply:
            assert reply.status == 200
        for _ in range(2):
            await turn(client, gate.url, session, token_ids(5000, session), 2, "agentic")
            peak = max(peak, (await gate.state(client))["sessions"]["live"])
        await finish(client, gate.url, session)

    await asyncio.gather(*(whole_session(session) for session in sessions))
    assert 1 <= peak <= 3
    state = await gate.idle(client)
    assert state["classes"]["agentic"]["held"] == 0
