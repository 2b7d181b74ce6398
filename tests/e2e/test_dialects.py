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
