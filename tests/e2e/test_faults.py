"""Replicas that die, drain and come back while rollouts run through them."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.conftest import Replica, StartGate
from tests.e2e.engine_metrics import total
from tests.e2e.gate import Gate, replica_of
from tests.e2e.inference import chat, completion, encode, token_ids
from tests.e2e.turns import JSON, finish, turn
from tests.e2e.waiting import until

LONG_TOKENS = 7000


@pytest.fixture
def pair(own_replicas: list[Replica]) -> list[Replica]:
    """Both run when the test begins."""
    ended = [replica for replica in own_replicas if not replica.process.alive]
    for replica in ended:
        replica.restart()
    for replica in ended:
        replica.wait_ready()
    return own_replicas


@pytest.fixture
async def gate(start_gate: StartGate, pair: list[Replica], client: aiohttp.ClientSession, tmp_path: Path) -> Gate:
    settings = {"TIDEGATE_RECORD_PATH": str(tmp_path / "decisions.jsonl")}
    gate = start_gate([replica.url for replica in pair], settings=settings)
    await gate.ready(client, 2)
    return gate


async def serving(gate: Gate, client: aiohttp.ClientSession, pair: list[Replica]) -> tuple[Replica, Replica]:
    """The replica that runs the one request there is, and the other."""
    state = await until(
        lambda: gate.state(client), lambda state: any(replica["requests"] for replica in state["replicas"])
    )
    busy, idle = sorted(pair, key=lambda replica: -replica_of(state, replica.url)["requests"])
    return busy, idle


def stream(client: aiohttp.ClientSession, gate: Gate, session: str) -> Any:
    body = completion(token_ids(20, session), LONG_TOKENS, stream=True)
    headers = {**JSON, "X-Session-ID": session}
    return client.post(f"{gate.url}/v1/completions", data=encode(body), headers=headers)


async def prompt_tokens(client: aiohttp.ClientSession, replica: Replica) -> float:
    return await total(client, replica.url, "vllm:prompt_tokens_total")


async def test_a_replica_killed_before_the_first_byte_passes_its_request_on(
    gate: Gate, pair: list[Replica], client: aiohttp.ClientSession
) -> None:
    prompt = token_ids(20, "unsent")
    request = asyncio.create_task(turn(client, gate.url, "unsent", prompt, LONG_TOKENS))
    busy, other = await serving(gate, client, pair)
    await until(lambda: total(client, busy.url, "vllm:num_requests_running"), lambda running: running == 1)
    busy.process.kill()
    reply = await request
    assert reply["usage"]["completion_tokens"] == LONG_TOKENS
    assert replica_of(await gate.state(client), other.url)["sessions"] == 1
    await finish(client, gate.url, "unsent")
    await gate.idle(client)


async def test_a_replica_killed_mid_stream_cuts_it_and_nothing_is_replayed(
    gate: Gate, pair: list[Replica], client: aiohttp.ClientSession
) -> None:
    async with stream(client, gate, "cut") as reply:
        assert await reply.content.readany()
        busy, other = await serving(gate, client, pair)
        before = await prompt_tokens(client, other)
        busy.process.kill()
        with pytest.raises(aiohttp.ClientPayloadError):
            await reply.read()
    assert await prompt_tokens(client, other) == before
    state = await gate.state(client)
    assert state["requests"]["in_flight"] == 0
    await turn(client, gate.url, "cut")  # the session goes on elsewhere
    assert replica_of(await gate.state(client), other.url)["sessions"] == 1


async def test_a_draining_replica_answers_nobody_with_its_shutdown(
    gate: Gate, pair: list[Replica], client: aiohttp.ClientSession
) -> None:
    """While it drains, vLLM says 200 to whoever comes, without a token: finish_reason `abort`, or a stream that ends at
    once. Prompts that it would have to tokenize get a 500."""
    for number in range(6):
        await turn(client, gate.url, f"old {number}")
    async with stream(client, gate, "keeps it draining") as reply:
        await reply.content.readany()
        busy, other = await serving(gate, client, pair)
        busy.process.signal(signal.SIGTERM)
        try:
            await until(lambda: drained_answer(client, busy), lambda text: '"abort"' in text)
            sessions = [f"{age} {number}" for age in ("old", "new") for number in range(6)]
            ways = itertools.cycle([ask, ask_for_a_stream, ask_in_words])
            generated = await asyncio.gather(*(next(ways)(client, gate, session) for session in sessions))
        finally:
            busy.process.kill()
    assert generated == [4] * 12
    assert replica_of(await gate.state(client), other.url)["sessions"] >= 12


async def drained_answer(client: aiohttp.ClientSession, replica: Replica) -> str:
    async with client.post(f"{replica.url}/v1/completions", json=completion(token_ids(8, "drained?"), 1)) as reply:
        return await reply.text()


async def ask(client: aiohttp.ClientSession, gate: Gate, session: str) -> int:
    """How many tokens came back."""
    return int((await turn(client, gate.url, session))["usage"]["completion_tokens"])


async def ask_for_a_stream(client: aiohttp.ClientSession, gate: Gate, session: str) -> int:
    body = completion(token_ids(64, session), 4, stream=True, stream_options={"include_usage": True})
    headers = {**JSON, "X-Session-ID": session}
    async with client.post(f"{gate.url}/v1/completions", data=encode(body), headers=headers) as reply:
        lines = (await reply.text()).split("\n\n")
    assert lines[-2] == "data: [DONE]"
    usages = [json.loads(line.removeprefix("data: ")).get("usage") for line in lines[:-2]]
    return next((int(usage["completion_tokens"]) for usage in usages if usage), 0)


async def ask_in_words(client: aiohttp.ClientSession, gate: Gate, session: str) -> int:
    headers = {**JSON, "X-Session-ID": session}
    body = encode(chat(max_tokens=4, ignore_eos=True))
    async with client.post(f"{gate.url}/v1/chat/completions", data=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        return int((await reply.json())["usage"]["completion_tokens"])


@pytest.mark.vllm
async def test_a_replica_told_to_end_while_idle_keeps_no_request(
    gate: Gate, pair: list[Replica], client: aiohttp.ClientSession
) -> None:
    """vLLM without a running request takes some more while it shuts down, never answers them, and does not end as long
    as their clients wait. They go elsewhere once it has stopped listening."""
    sessions = [f"s{number}" for number in range(4)]
    await asyncio.gather(*(turn(client, gate.url, session) for session in sessions))
    ending, other = pair
    assert replica_of(await gate.state(client), ending.url)["sessions"] == 2
    ending.process.signal(signal.SIGTERM)
    try:
        await asyncio.gather(*(turn(client, gate.url, session) for session in sessions))
    finally:
        ending.process.kill()
    assert replica_of(await gate.state(client), other.url)["sessions"] == 4


async def test_a_restarted_replica_is_used_again_and_known_to_be_empty(
    gate: Gate, pair: list[Replica], client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    sessions = [f"s{number}" for number in range(6)]
    await asyncio.gather(*(turn(client, gate.url, session) for session in sessions))
    gone = pair[0]
    gone.process.kill()
    await asyncio.gather(*(turn(client, gate.url, session) for session in sessions))
    state = await until(lambda: gate.state(client), lambda state: not replica_of(state, gone.url)["ready"])
    assert replica_of(state, pair[1].url)["sessions"] == 6
    gone.start()
    await until(lambda: gate.state(client), lambda state: replica_of(state, gone.url)["ready"], within_s=300)
    await asyncio.gather(*(turn(client, gate.url, f"later {number}") for number in range(4)))
    state = await gate.state(client)
    assert replica_of(state, gone.url)["sessions"] == 4  # the least loaded one takes all new sessions

    async def resets() -> list[Any]:
        events = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
        return [event for event in events if "replica_reset" in json.dumps(event) and gone.url in json.dumps(event)]

    await until(resets, lambda found: len(found) >= 1)


@pytest.mark.embedded
async def test_a_continuation_waits_while_the_only_replica_restarts(
    start_gate: StartGate, pair: list[Replica], client: aiohttp.ClientSession
) -> None:
    """Also before its health has told: here it never does."""
    only = pair[0]
    blind = {"TIDEGATE_ENGINES_EJECT_AFTER": "1000000", "TIDEGATE_ENGINES_UNHEALTHY_AFTER": "1000000"}
    gate = start_gate([only.url], settings=blind)
    await gate.ready(client, 1)
    await turn(client, gate.url, "s")
    only.process.kill()
    request = asyncio.create_task(turn(client, gate.url, "s"))

    async def refused() -> int:
        async with client.get(f"{gate.url}/metrics") as reply:
            lines = [line for line in (await reply.text()).splitlines() if "replica_errors_total{" in line]
        return sum(int(float(line.split()[-1])) for line in lines if "connect_failed" in line)

    await until(refused, lambda count: count >= 6)  # twice as many as may fail a request that reaches them
    assert not request.done()
    only.start()
    assert (await request)["choices"]
