"""Clients that leave: the engine stops generating, and every count goes back to zero."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import aiohttp
import pytest
from tests.e2e.conftest import Replica, StartGate
from tests.e2e.engine_metrics import running_requests, unfinished_requests
from tests.e2e.inference import completion, encode, token_ids
from tests.e2e.turns import JSON, finish, turn
from tests.e2e.waiting import until

LONG_TOKENS = 7000


@pytest.mark.parametrize("stream", [True, False], ids=["mid-stream", "before the first byte"])
async def test_a_client_that_leaves_frees_the_engine(
    stream: bool, start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    gate = start_gate([replicas[0].url])
    await gate.ready(client, 1)
    await until(lambda: running_requests(client, replicas[0].url), lambda running: running == 0)
    body = completion(token_ids(20, "leaves"), LONG_TOKENS, stream=stream)

    async def request() -> None:
        headers = {**JSON, "X-Session-ID": "leaves"}
        async with client.post(f"{gate.url}/v1/completions", data=encode(body), headers=headers) as reply:
            await reply.read()

    task = asyncio.create_task(request())
    await until(lambda: running_requests(client, replicas[0].url), lambda running: running == 1)
    task.cancel()
    await until(lambda: running_requests(client, replicas[0].url), lambda running: running == 0)
    state = await until(lambda: gate.state(client), lambda state: state["requests"]["in_flight"] == 0)
    assert state["sessions"]["live"] == 1  # the rollout may go on: an aborted request does not end its session
    await turn(client, gate.url, "leaves")
    await finish(client, gate.url, "leaves")
    await gate.idle(client)


@pytest.mark.parametrize("policy", ["sticky_least_loaded", "static_cap", "misa_t"])
async def test_counts_return_to_zero_after_many_sessions_with_random_aborts(
    policy: str, start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    settings = {"TIDEGATE_CORE_STATIC_CAP_CAP": "4"}
    gate = start_gate([replica.url for replica in replicas], policy, settings=settings)
    await gate.ready(client, 2)
    rng = random.Random(f"soak {policy}")
    completed = 0

    async def session(name: str, turns: int, workload: str | None, patience_s: float | None) -> None:
        nonlocal completed
        try:
            async with asyncio.timeout(patience_s):
                for number in range(turns):
                    prompt = token_ids(64 * (number + 1), name)
                    await turn(client, gate.url, name, prompt, 16, workload)
                completed += 1
        except TimeoutError:
            pass  # left in the middle of whatever it was doing
        await finish(client, gate.url, name)

    plans = [
        (
            f"{policy} {n}",
            rng.randint(1, 4),
            rng.choice(["a", "b", None]),
            rng.choice([None, None, rng.uniform(0, 0.5)]),
        )
        for n in range(40)
    ]
    await asyncio.gather(*(session(*plan) for plan in plans))
    state = await gate.idle(client)
    assert completed >= sum(patience is None for *_, patience in plans)
    assert all(each["live"] == 0 and each["held"] == 0 for each in state["classes"].values()), state["classes"]
    assert all(replica["kv_used_tokens"] == 0 for replica in state["replicas"]), state["replicas"]
    for replica in replicas:
        await until(partial(unfinished_requests, client, replica.url), lambda count: count == 0)
