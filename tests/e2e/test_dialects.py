"""Control calls in either engine's words, on pools of either engine and of both."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.conftest import StartGate
from tests.e2e.embedded import EmbeddedReplica
from tests.e2e.gate import Gate
from tests.e2e.turns import attempt, turn
from tests.e2e.waiting import until

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, EmbeddedReplica]]:
    logs: Path = tmp_path_factory.mktemp("dialects")
    pool = {name: EmbeddedReplica(logs / f"{name}.log", dialect=name) for name in ("vllm", "sglang")}
    for replica in pool.values():
        replica.start()
    try:
        for replica in pool.values():
            replica.wait_ready()
        yield pool
    finally:
        for replica in pool.values():
            replica.process.kill()


async def gate_of(start_gate: StartGate, client: aiohttp.ClientSession, *replicas: EmbeddedReplica) -> Gate:
    gate = start_gate([replica.url for replica in replicas])
    await gate.ready(client, len(replicas))
    return gate


async def ask(client: aiohttp.ClientSession, method: str, url: str, **arguments: Any) -> tuple[int, Any]:
    async with client.request(method, url, **arguments) as reply:
        return reply.status, await reply.json()


async def is_paused(client: aiohttp.ClientSession, pool: dict[str, EmbeddedReplica]) -> tuple[bool, bool]:
    async with client.get(f"{pool['vllm'].url}/is_paused") as reply:
        vllm = (await reply.json())["is_paused"]
    async with client.get(f"{pool['sglang'].url}/ready") as reply:
        return vllm, reply.status == 503


@pytest.mark.parametrize(
    ("pause", "resume", "mode"),
    [
        ("/pause", "/resume", {"params": {"mode": "keep"}}),
        ("/pause_generation", "/continue_generation", {"json": {"mode": "in_place"}}),
    ],
)
async def test_a_mixed_pool_pauses_and_resumes_in_either_dialect(
    pause: str,
    resume: str,
    mode: dict[str, Any],
    pool: dict[str, EmbeddedReplica],
    start_gate: StartGate,
    client: aiohttp.ClientSession,
) -> None:
    gate = await gate_of(start_gate, client, *pool.values())
    status, report = await ask(client, "POST", gate.url + pause, **mode)
    assert (status, report["success"]) == (200, True), report
    called = {name: report["replicas"][replica.url]["called"] for name, replica in pool.items()}
    assert called == {"vllm": "POST /pause", "sglang": "POST /pause_generation"}
    assert await is_paused(client, pool) == (True, True)
    status, report = await ask(client, "GET", f"{gate.url}/is_paused")
    assert (status, report["is_paused"]) == (200, True)
    waits = asyncio.create_task(turn(client, gate.url, f"waits {pause}"))
    await until(lambda: gate.state(client), lambda state: state["requests"]["waiting"] == 1)
    status, report = await ask(client, "POST", gate.url + resume, json={})
    assert (status, report["success"]) == (200, True), report
    called = {name: report["replicas"][replica.url]["called"] for name, replica in pool.items()}
    assert called == {"vllm": "POST /resume", "sglang": "POST /continue_generation"}
    await waits
    assert await is_paused(client, pool) == (False, False)
    assert (await ask(client, "GET", f"{gate.url}/is_paused"))[1]["is_paused"] is False


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
async def test_a_cache_reset_in_either_dialect_empties_every_cache(
    path: str, pool: dict[str, EmbeddedReplica], start_gate: StartGate, client: aiohttp.ClientSession
) -> None:
    gate = await gate_of(start_gate, client, *pool.values())
    sessions = [f"{path} {number}" for number in range(2)]
    for session in sessions:
        await turn(client, gate.url, session)
    status, report = await ask(client, "POST", gate.url + path)
    assert (status, report["success"]) == (200, True), report
    called = {name: report["replicas"][replica.url]["called"] for name, replica in pool.items()}
    assert called == {"vllm": "POST /reset_prefix_cache", "sglang": "POST /flush_cache"}
    assert (await gate.state(client))["epoch"] == 1
    for session in sessions:
        assert (await turn(client, gate.url, session))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "body"), [("/abort_requests", {}), ("/abort_request", {"abort_all": True})], ids=["vllm", "sglang"]
)
async def test_an_abort_of_all_in_either_dialect_ends_what_runs_and_what_is_held(
    path: str,
    body: dict[str, Any],
    pool: dict[str, EmbeddedReplica],
    start_gate: StartGate,
    client: aiohttp.ClientSession,
) -> None:
    gate = start_gate(
        [replica.url for replica in pool.values()], "static_cap", settings={"TIDEGATE_CORE_STATIC_CAP_CAP": "1"}
    )
    await gate.ready(client, 2)
    running = [asyncio.create_task(attempt(client, gate.url, f"runs {n}", max_tokens=8000)) for n in range(2)]
    await until(lambda: gate.state(client), lambda state: state["requests"]["in_flight"] == 2)
    held = asyncio.create_task(attempt(client, gate.url, "held"))
    await until(lambda: gate.state(client), lambda state: state["requests"]["waiting"] == 1)
    status, report = await ask(client, "POST", gate.url + path, json=body)
    assert (status, report["success"], report["held_aborted"]) == (200, True, 1), report
    status, _, refused = await held
    assert (status, refused["error"]["code"]) == (499, "aborted")
    for status, _, reply in await asyncio.gather(*running):
        assert (status, reply["choices"][0]["finish_reason"]) == (200, "abort")
    state = await gate.state(client)
    assert (state["requests"]["in_flight"], state["requests"]["waiting"]) == (0, 0)


# --- sessions that SGLang keeps --------------------------------------------------------------------------------------
async def knows(client: aiohttp.ClientSession, replica: EmbeddedReplica, session: str) -> bool:
    """Whether the engine takes a request in it."""
    body = {"input_ids": [5], "session_params": {"id": session}, "sampling_params": {"max_new_tokens": 1}}
    async with client.post(f"{replica.url}/generate", json=body) as reply:
        return reply.status == 200


ENDS: dict[str, tuple[str, str, dict[str, Any]] | None] = {
    "close": ("POST", "/close_session", {"json": {"session_id": "kept"}}),
    "finish": ("POST", "/finish_session", {"params": {"session_id": "kept"}}),
    "idle": None,
}


@pytest.mark.parametrize(
    ("end", "asked"), [("close", True), ("close", False), ("finish", True), ("finish", False), ("idle", True)]
)
async def test_a_session_that_a_client_opened_is_closed_at_the_engines_when_it_ends(
    end: str,
    asked: bool,
    pool: dict[str, EmbeddedReplica],
    start_gate: StartGate,
    client: aiohttp.ClientSession,
) -> None:
    ttl = {"TIDEGATE_CORE_LEDGER_IDLE_TTL_INITIAL_S": "0.5", "TIDEGATE_CORE_LEDGER_IDLE_TTL_FLOOR_S": "0.5"}
    gate = start_gate([replica.url for replica in pool.values()], settings=ttl if end == "idle" else {})
    await gate.ready(client, 2)
    opening = {"capacity_of_str_len": 1000, "session_id": "kept"}
    assert await ask(client, "POST", f"{gate.url}/open_session", json=opening) == (200, "kept")
    assert await knows(client, pool["sglang"], "kept")
    if asked:  # placed by the policy, on whichever replica; the other engine takes no notice of the session
        body = {"input_ids": [5, 6], "session_params": {"id": "kept"}, "sampling_params": {"max_new_tokens": 1}}
        assert (await ask(client, "POST", f"{gate.url}/generate", json=body))[0] == 200
    call = ENDS[end]
    if call is not None:
        method, path, arguments = call
        assert (await ask(client, method, gate.url + path, **arguments))[0] == 200

    async def known() -> bool:
        return await knows(client, pool["sglang"], "kept")

    await until(known, lambda known: not known)


async def test_a_turn_in_an_open_session_brings_only_what_is_new(
    pool: dict[str, EmbeddedReplica], start_gate: StartGate, client: aiohttp.ClientSession
) -> None:
    gate = await gate_of(start_gate, client, pool["sglang"])
    _, session = await ask(client, "POST", f"{gate.url}/open_session", json={"capacity_of_str_len": 1000})
    body: dict[str, Any] = {
        "input_ids": list(range(5, 105)),
        "rid": "first",
        "session_params": {"id": session},
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
    }
    await ask(client, "POST", f"{gate.url}/generate", json=body)
    body = {**body, "input_ids": [7], "rid": "second", "session_params": {"id": session, "rid": "first"}}
    _, reply = await ask(client, "POST", f"{gate.url}/generate", json=body)
    assert reply["meta_info"]["prompt_tokens"] == 100 + 4 + 1
    assert reply["meta_info"]["cached_tokens"] > 0
    (await ask(client, "POST", f"{gate.url}/close_session", json={"session_id": session}))


async def test_opening_a_session_without_an_sglang_replica_says_so(
    pool: dict[str, EmbeddedReplica], start_gate: StartGate, client: aiohttp.ClientSession
) -> None:
    gate = await gate_of(start_gate, client, pool["vllm"])
    status, said = await ask(client, "POST", f"{gate.url}/open_session", json={"capacity_of_str_len": 1})
    assert (status, said["error"]["code"]) == (404, "not_found")


async def test_a_session_that_is_open_already_is_the_engines_refusal(
    pool: dict[str, EmbeddedReplica], start_gate: StartGate, client: aiohttp.ClientSession
) -> None:
    gate = await gate_of(start_gate, client, pool["sglang"])
    opening = {"capacity_of_str_len": 1, "session_id": "twice"}
    assert (await ask(client, "POST", f"{gate.url}/open_session", json=opening))[0] == 200
    status, said = await ask(client, "POST", f"{gate.url}/open_session", json=opening)
    assert (status, said["error"]["code"]) == (400, "control_failed")
    await ask(client, "POST", f"{gate.url}/close_session", json={"session_id": "twice"})
