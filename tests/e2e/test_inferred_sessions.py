"""Rollouts of clients that name no session, through a gate that infers it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from tests.e2e.conftest import Replica, StartGate
from tests.e2e.gate import Gate
from tests.e2e.inference import MODEL, SAMPLING, completion, token_ids
from tests.e2e.waiting import until


@pytest.fixture
async def gate(start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession) -> Gate:
    gate = start_gate([replica.url for replica in replicas], "misa_t", flags=["--infer-sessions"])
    await gate.ready(client, 2)
    return gate


async def post(client: aiohttp.ClientSession, gate: Gate, path: str, body: Any) -> Any:
    async with client.post(gate.url + path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def generate(client: aiohttp.ClientSession, gate: Gate, name: str, turns: int) -> None:
    prompt = token_ids(64, name)
    for number in range(turns):
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": 8, **SAMPLING}}
        reply = await post(client, gate, "/inference/v1/generate", body)
        prompt = [*prompt, *reply["choices"][0]["token_ids"], *token_ids(32, f"{name} {number}")]


async def complete(client: aiohttp.ClientSession, gate: Gate, name: str, turns: int) -> None:
    prompt = token_ids(64, name)
    for number in range(turns):
        reply = await post(client, gate, "/v1/completions", completion(prompt, 8, return_token_ids=True))
        prompt = [*prompt, *reply["choices"][0]["token_ids"], *token_ids(32, f"{name} {number}")]


async def chat(client: aiohttp.ClientSession, gate: Gate, name: str, turns: int) -> None:
    messages = [{"role": "user", "content": f"{name} kalo mine tavi " * 10}]
    for number in range(turns):
        body = {"model": MODEL, "messages": messages, "max_tokens": 8, **SAMPLING}
        reply = await post(client, gate, "/v1/chat/completions", body)
        said = reply["choices"][0]["message"]["content"]
        messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": f"more {number}"}]


async def streamed(client: aiohttp.ClientSession, gate: Gate, name: str, turns: int) -> None:
    prompt = f"{name} kalo mine tavi " * 10
    for number in range(turns):
        async with client.post(f"{gate.url}/v1/completions", json=completion(prompt, 8, stream=True)) as reply:
            lines = [line.removeprefix(b"data: ") for line in (await reply.read()).split(b"\n\n")]
        events = [json.loads(line) for line in lines if line.startswith(b"{")]
        prompt += "".join(event["choices"][0]["text"] for event in events if event["choices"]) + f" more {number}"


CLIENTS = {"generate": generate, "completions": complete, "chat": chat, "stream": streamed}


@pytest.mark.parametrize("kind", CLIENTS)
async def test_each_rollout_is_one_session(kind: str, gate: Gate, client: aiohttp.ClientSession) -> None:
    await asyncio.gather(*(CLIENTS[kind](client, gate, f"{kind} {number}", 4) for number in range(4)))
    state = await until(lambda: gate.state(client), lambda state: state["requests"]["in_flight"] == 0)
    assert state["sessions"]["live"] == 4
    assert state["inferred"] == {"sessions": 4, "opened": 4, "continued": 12}
    async with client.get(f"{gate.url}/metrics") as reply:
        text = await reply.text()
    assert 'tidegate_inferred_requests_total{turn="further"} 12.0' in text
    assert 'tidegate_placements_total{reason="continuation"} 12.0' in text  # each on the replica that has its KV


async def test_two_that_go_on_from_one_reply_are_two_sessions(gate: Gate, client: aiohttp.ClientSession) -> None:
    prompt = token_ids(64, "branch")
    reply = await post(client, gate, "/v1/completions", completion(prompt, 8, return_token_ids=True))
    prompt = [*prompt, *reply["choices"][0]["token_ids"]]
    for seed in ("left", "right"):
        await post(client, gate, "/v1/completions", completion([*prompt, *token_ids(8, seed)], 8))
    state = await gate.state(client)
    assert (state["sessions"]["live"], state["inferred"]["continued"]) == (2, 1)


async def test_without_the_setting_each_request_is_a_session_of_its_own(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    gate = start_gate([replica.url for replica in replicas], "misa_t")
    await gate.ready(client, 2)
    await generate(client, gate, "plain", 2)
    state = await gate.state(client)
    assert (state["sessions"]["live"], state["inferred"]) == (0, None)
