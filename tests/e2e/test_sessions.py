"""Sessions: pinned to one replica, ended in every way a client has of saying so, and by silence."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from tests.e2e.conftest import Replica, StartGate
from tests.e2e.gate import Gate
from tests.e2e.inference import completion, encode, token_ids
from tests.e2e.kv_events import stored_blocks
from tests.e2e.turns import JSON, attempt, finish, rollout, turn
from tests.e2e.waiting import until

SHORT_TTL = {"TIDEGATE_CORE_LEDGER_IDLE_TTL_INITIAL_S": "0.5", "TIDEGATE_CORE_LEDGER_IDLE_TTL_FLOOR_S": "0.5"}


@pytest.fixture
async def gate(start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession) -> Gate:
    gate = start_gate([replica.url for replica in replicas])
    await gate.ready(client, 2)
    return gate


async def live(gate: Gate, client: aiohttp.ClientSession) -> int:
    return int((await gate.state(client))["sessions"]["live"])


@pytest.mark.parametrize("policy", ["consistent_hash", "sticky_least_loaded", "misa_t"])
async def test_a_session_stays_on_one_replica_by_the_engines_own_events(
    policy: str, start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    gate = start_gate([replica.url for replica in replicas], policy)
    await gate.ready(client, 2)
    sessions = [f"{policy}-{number}" for number in range(8)]

    async def whole_session(session: str) -> None:
        await rollout(client, gate.url, session, 3)
        await finish(client, gate.url, session)

    await asyncio.gather(*(whole_session(session) for session in sessions))

    async def homes() -> dict[str, list[int]]:
        stored = [await stored_blocks(replica.kv_replay_endpoint) for replica in replicas]
        return {session: [number for number, blocks in enumerate(stored) if blocks[session]] for session in sessions}

    found = await until(homes, lambda homes: all(homes.values()))
    assert all(len(numbers) == 1 for numbers in found.values()), found
    assert {number for numbers in found.values() for number in numbers} == {0, 1}, found


async def test_later_turns_find_their_prefix_cached(gate: Gate, client: aiohttp.ClientSession) -> None:
    replies = await rollout(client, gate.url, "cached prefix", 3)
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    assert cached[0] < cached[1] < cached[2]


END_CALLS: dict[str, Any] = {
    "POST /finish_session?session_id=": ("POST", "/finish_session", {"params": {"session_id": "s"}}),
    "POST /finish_session body": ("POST", "/finish_session", {"json": {"session_id": "s"}}),
    "DELETE /v1/router/session": ("DELETE", "/v1/router/session", {"headers": {"X-Session-ID": "s"}}),
    "POST /programs/release": ("POST", "/programs/release", {"json": {"program_id": "s"}}),
    "POST /close_session": ("POST", "/close_session", {"json": {"session_id": "s"}}),
}


@pytest.mark.parametrize("call", END_CALLS)
async def test_each_end_call_ends_the_session_and_may_be_repeated(
    call: str, gate: Gate, client: aiohttp.ClientSession
) -> None:
    method, path, arguments = END_CALLS[call]
    await turn(client, gate.url, "s")
    await turn(client, gate.url, "s2")
    assert await live(gate, client) == 2
    for _ in range(2):
        async with client.request(method, gate.url + path, **arguments) as reply:
            assert reply.status == 200, await reply.text()
        assert await live(gate, client) == 1


async def test_a_request_with_the_final_header_ends_its_session(gate: Gate, client: aiohttp.ClientSession) -> None:
    await turn(client, gate.url, "last")
    assert await live(gate, client) == 1
    headers = {**JSON, "x-dynamo-session-id": "last", "x-dynamo-session-final": "true"}
    async with client.post(f"{gate.url}/v1/completions", data=encode(completion("x")), headers=headers) as reply:
        assert reply.status == 200
        await reply.read()
    await gate.idle(client)


async def test_a_request_after_the_end_opens_the_session_anew(gate: Gate, client: aiohttp.ClientSession) -> None:
    for _ in range(2):
        await turn(client, gate.url, "again")
        assert await live(gate, client) == 1
        await finish(client, gate.url, "again")
        assert await live(gate, client) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"session_id": "in the body"},
        {"session_params": {"id": "in the body"}},
        {"vllm_xargs": {"session_id": "in the body"}},
        {"program_id": "in the body"},
        {"metadata": {"session_id": "in the body"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_session_named_in_the_body_is_the_one_named_in_a_header(
    fields: dict[str, Any], gate: Gate, client: aiohttp.ClientSession
) -> None:
    await turn(client, gate.url, "in the body")
    await attempt(client, gate.url, None, **fields)  # that a field is named so is the engine's to like or not
    assert await live(gate, client) == 1
    await finish(client, gate.url, "in the body")
    await gate.idle(client)


async def test_a_request_id_is_no_session(gate: Gate, client: aiohttp.ClientSession) -> None:
    headers = {**JSON, "X-Request-ID": "looks like a session"}
    async with client.post(f"{gate.url}/v1/completions", data=encode(completion("x")), headers=headers) as reply:
        assert reply.status == 200
        await reply.read()
    await gate.idle(client)


async def test_a_sessionless_request_is_counted_while_it_runs_and_released_at_its_end(
    gate: Gate, client: aiohttp.ClientSession
) -> None:
    body = completion(token_ids(20, "no session"), 2000, stream=True)
    async with client.post(f"{gate.url}/v1/completions", data=encode(body), headers=JSON) as reply:
        await reply.content.readany()
        state = await gate.state(client)
        assert (state["requests"]["in_flight"], state["sessions"]["live"]) == (1, 1)
        await reply.read()
    await gate.idle(client)


async def test_start_session_announces_a_class_and_admits_nothing(gate: Gate, client: aiohttp.ClientSession) -> None:
    announced = {"session_id": "announced", "workload": "swe", "group": "g", "expected_tokens": 500}
    async with client.post(f"{gate.url}/start_session", json=announced) as reply:
        assert reply.status == 200
    assert await live(gate, client) == 0
    await turn(client, gate.url, "announced")
    assert (await gate.state(client))["classes"]["swe"]["live"] == 1
    await finish(client, gate.url, "announced")
    assert (await gate.state(client))["classes"]["swe"]["live"] == 0


async def test_start_session_takes_a_query_too(gate: Gate, client: aiohttp.ClientSession) -> None:
    async with client.post(f"{gate.url}/start_session", params={"session_id": "q", "workload": "math"}) as reply:
        assert reply.status == 200
    await turn(client, gate.url, "q")
    assert (await gate.state(client))["classes"]["math"]["live"] == 1


async def test_an_idle_session_expires_and_a_busy_one_does_not(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    gate = start_gate([replicas[0].url], settings=SHORT_TTL)
    await gate.ready(client, 1)
    body = completion(token_ids(20, "busy"), 7000, stream=True)
    headers = {**JSON, "X-Session-ID": "busy"}
    async with client.post(f"{gate.url}/v1/completions", data=encode(body), headers=headers) as reply:
        await reply.content.readany()
        await turn(client, gate.url, "idle")
        assert await live(gate, client) == 2
        state = await until(lambda: gate.state(client), lambda state: state["sessions"]["live"] < 2)
        assert state["sessions"]["live"] == 1
        assert state["requests"]["in_flight"] == 1
    await gate.idle(client)


@pytest.mark.parametrize("session", ["x" * 257, "tab\there"], ids=["over 256 bytes", "control character"])
async def test_a_bad_session_id_is_refused_and_leaves_no_trace(
    session: str, gate: Gate, client: aiohttp.ClientSession
) -> None:
    status, _, reply = await attempt(client, gate.url, session)
    assert status == 400
    assert reply["error"]["code"] == "invalid_session_id"
    await gate.idle(client)
