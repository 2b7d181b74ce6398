"""RolloutScheduler on a real gate and engines: the mixture, the advice, cancellation, a gate that dies."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import openai
import pytest
from tests.e2e.conftest import Replica, StartGate
from tests.e2e.gate import Gate
from tests.e2e.inference import MODEL, TEXT, completion, token_ids
from tests.e2e.waiting import PATIENCE_S, until

from tidegate.client import Outcome, RolloutScheduler, Session

MIXTURE = {"agentic": 0.25, "rlvr": 0.75}
TURNS = {"agentic": 3, "rlvr": 1}
QUICK: dict[str, Any] = {"poll_s": 0.1}


@pytest.fixture
async def gate(start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession) -> Gate:
    gate = start_gate([replica.url for replica in replicas], "working_set")
    await gate.ready(client, 2)
    return gate


@pytest.fixture
async def sdk(gate: Gate) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


async def conversation(sdk: openai.AsyncOpenAI, session: Session) -> int:
    messages: list[Any] = [{"role": "user", "content": f"{TEXT} {session.id}"}]
    for _ in range(TURNS[session.workload or ""]):
        reply = await sdk.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=16, extra_headers=session.headers
        )
        messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
        messages += [{"role": "user", "content": TEXT}]
    return len(messages)


def conversations(sdk: openai.AsyncOpenAI) -> Iterator[Any]:
    async def one(session: Session) -> int:
        return await conversation(sdk, session)

    return itertools.repeat(one)


async def sleeper(client: aiohttp.ClientSession, session: Session) -> None:
    """A rollout in its first request, for as long as nobody stops it."""
    body = completion(token_ids(64, session.id), 4000)
    async with client.post(f"{session.base_url}/completions", json=body, headers=session.headers) as reply:
        await reply.read()


async def test_rollouts_come_in_the_mixture_and_none_is_left(
    gate: Gate, sdk: openai.AsyncOpenAI, client: aiohttp.ClientSession
) -> None:
    outcomes: list[Outcome[int]] = []
    async with RolloutScheduler(gate.url, mixture=MIXTURE, **QUICK) as scheduler:
        assert scheduler.stats().source == "following"
        rollouts = {workload: conversations(sdk) for workload in MIXTURE}
        assert await scheduler.run(rollouts, outcomes.append, sessions=80) == 80
        distance = scheduler.stats().tv_distance
    assert [outcome.error for outcome in outcomes if outcome.error] == []
    assert distance is not None
    assert distance < 0.02
    state = await gate.idle(client)
    completed = {name: klass["completed"] for name, klass in state["classes"].items()}
    assert completed == Counter(outcome.session.workload for outcome in outcomes)
    assert state["advice"]["mixture_given"]


async def test_what_is_in_flight_follows_the_advice_when_a_replica_is_lost(
    start_gate: StartGate, own_replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    for replica in own_replicas:
        await asyncio.to_thread(replica.wait_ready)
    settings = {"TIDEGATE_CORE_STATIC_CAP_CAP": "6", "TIDEGATE_CORE_ADVICE_REACTION_S": "0"}
    gate = start_gate([replica.url for replica in own_replicas], "static_cap", settings=settings)
    await gate.ready(client, 2)

    async def rollout(scheduler: RolloutScheduler) -> None:
        while True:
            async with scheduler.session(workload="rlvr") as session:
                body = completion(token_ids(64, session.id), 100)
                async with client.post(f"{session.base_url}/completions", json=body, headers=session.headers) as reply:
                    await reply.read()

    async with RolloutScheduler(gate.url, mixture={"rlvr": 1.0}, **QUICK) as scheduler:
        running = [asyncio.create_task(rollout(scheduler)) for _ in range(40)]

        async def seen() -> tuple[int, int]:
            stats = scheduler.stats()
            return stats.limit, stats.in_flight

        await until(seen, lambda found: found == (13, 13))  # six live on each replica, and one that waits
        own_replicas[1].process.kill()
        await until(seen, lambda found: found == (7, 7))
        await asyncio.to_thread(own_replicas[1].start)
        await until(seen, lambda found: found == (13, 13))
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    await gate.idle(client)


async def test_cancelled_in_mid_flight_no_session_is_left_at_the_gate(
    gate: Gate, client: aiohttp.ClientSession
) -> None:
    async def train() -> None:
        async with RolloutScheduler(gate.url, mixture=MIXTURE, **QUICK) as scheduler:

            async def long(session: Session) -> None:
                await sleeper(client, session)

            rollouts = {workload: itertools.repeat(long) for workload in MIXTURE}
            await scheduler.run(rollouts, lambda outcome: None)

    training = asyncio.create_task(train())
    await until(lambda: gate.state(client), lambda state: state["requests"]["in_flight"] >= 4)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    state = await gate.idle(client)
    assert sum(klass["live"] + klass["held"] for klass in state["classes"].values()) == 0


async def test_a_gate_that_is_killed_and_restarted_is_followed_again(
    gate: Gate, sdk: openai.AsyncOpenAI, client: aiohttp.ClientSession
) -> None:
    outcomes: list[Outcome[int]] = []

    async def patient(session: Session) -> int:
        """As SDKs do: a request that failed is made again."""
        while True:
            try:
                return await conversation(sdk, session)
            except (openai.APIConnectionError, openai.APIStatusError):
                await asyncio.sleep(0.05)

    async with RolloutScheduler(gate.url, mixture=MIXTURE, max_sessions=8, **QUICK) as scheduler:
        rollouts = {workload: itertools.repeat(patient) for workload in MIXTURE}
        running = asyncio.create_task(scheduler.run(rollouts, outcomes.append, sessions=60))

        async def source() -> str:
            return scheduler.stats().source

        await until(lambda: _number(outcomes), lambda number: number >= 10)
        gate.process.signal(signal.SIGKILL)
        await until(source, lambda found: found == "last")
        assert scheduler.stats().limit > 0
        gate.process.kill()  # reaped
        await asyncio.to_thread(gate.start)
        await until(source, lambda found: found == "following")
        async with asyncio.timeout(PATIENCE_S):
            assert await running == 60
        assert len(outcomes) == 60
    state = await gate.idle(client)
    assert state["advice"]["mixture_given"]  # it was told again


async def _number(outcomes: list[Outcome[int]]) -> int:
    return len(outcomes)


async def test_a_weight_update_through_the_gate(
    gate: Gate, sdk: openai.AsyncOpenAI, client: aiohttp.ClientSession
) -> None:
    said: list[str] = []
    async with RolloutScheduler(
        gate.url, on_pause=lambda: said.append("pause"), on_resume=lambda: said.append("resume"), **QUICK
    ) as scheduler:
        async with scheduler.session(workload="agentic") as session:
            await conversation(sdk, session)
            async with scheduler.pausing():
                assert (await gate.state(client))["paused"]
                await scheduler.update_weights({}, path="/reset_prefix_cache")
            assert not (await gate.state(client))["paused"]
            await conversation(sdk, session)
        assert (await gate.state(client))["epoch"] == 1
    assert said == ["pause", "resume"]
    await gate.idle(client)
