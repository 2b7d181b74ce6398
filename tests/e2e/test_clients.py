"""Stock clients, multi-turn, with nothing but their base URL changed."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

import aiohttp
import openai
import pytest
from tests.e2e.conftest import Replica, StartGate
from tests.e2e.gate import Gate
from tests.e2e.inference import MODEL, TEXT, chat

TURNS = 3


@pytest.fixture
async def gate(start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession) -> Gate:
    gate = start_gate([replica.url for replica in replicas], "misa_t")
    await gate.ready(client, 2)
    return gate


async def assert_sessions(gate: Gate, client: aiohttp.ClientSession, workload: str, count: int) -> None:
    state = await gate.state(client)
    assert state["classes"][workload]["live"] == count
    assert state["sessions"]["live"] == count
    for number in range(count):
        async with client.post(f"{gate.url}/finish_session", params={"session_id": f"{workload} {number}"}) as reply:
            assert reply.status == 200
    await gate.idle(client)


def headers(session: str, workload: str) -> dict[str, str]:
    return {"X-Session-ID": session, "X-Workload-Class": workload}


async def test_openai_client(gate: Gate, client: aiohttp.ClientSession) -> None:
    def conversation() -> list[str]:
        with openai.OpenAI(base_url=f"{gate.url}/v1", api_key="none", max_retries=0) as sdk:
            assert [model.id for model in sdk.models.list()] == [MODEL]
            messages: list[Any] = [{"role": "user", "content": TEXT}]
            answers = []
            for _ in range(TURNS):
                reply = sdk.chat.completions.create(
                    model=MODEL,
                    messages=messages,
                    max_tokens=8,
                    temperature=0,
                    logprobs=True,
                    extra_body={"return_token_ids": True},
                    extra_headers=headers("sync 0", "sync"),
                )
                assert reply.usage is not None
                assert reply.choices[0].logprobs is not None
                answers.append(reply.choices[0].message.content or "")
                messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": TEXT}]
            return answers

    answers = await asyncio.to_thread(conversation)
    assert len(answers) == TURNS
    await assert_sessions(gate, client, "sync", 1)


async def test_openai_async_client_streams(gate: Gate, client: aiohttp.ClientSession) -> None:
    async def conversation(sdk: openai.AsyncOpenAI, number: int) -> int:
        messages: list[Any] = [{"role": "user", "content": f"{TEXT} {number}"}]
        chunks = 0
        for _ in range(TURNS):
            stream = await sdk.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=8,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers=headers(f"async {number}", "async"),
            )
            answer, usage = "", None
            async for chunk in stream:
                chunks += 1
                usage = chunk.usage or usage
                answer += "".join(choice.delta.content or "" for choice in chunk.choices)
            assert usage is not None
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": TEXT}]
        return chunks

    async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="none", max_retries=0) as sdk:
        chunks = await asyncio.gather(*(conversation(sdk, number) for number in range(2)))
    assert all(count > 2 * TURNS for count in chunks)
    await assert_sessions(gate, client, "async", 2)


async def test_openai_client_gets_its_own_error_types(gate: Gate) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="none", max_retries=0) as sdk:
        with pytest.raises(openai.NotFoundError):
            await sdk.chat.completions.create(model="no such model", messages=[{"role": "user", "content": TEXT}])
        with pytest.raises(openai.BadRequestError) as refused:
            await sdk.completions.create(model=MODEL, prompt=TEXT, extra_headers={"X-Session-ID": "x" * 300})
    assert refused.value.code == "invalid_session_id"


async def test_curl(gate: Gate, client: aiohttp.ClientSession) -> None:
    async def curl(*arguments: str) -> str:
        command = ["curl", "--silent", "--show-error", "--fail-with-body", *arguments]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    messages = [{"role": "user", "content": TEXT}]
    for number in range(TURNS):
        body = json.dumps(chat() | {"messages": messages, "stream": number == TURNS - 1})
        output = await curl(
            f"{gate.url}/v1/chat/completions",
            *("-H", "Content-Type: application/json", "-H", "X-Session-ID: curl 0", "-H", "X-Workload-Class: curl"),
            *("--data", body),
        )
        if number < TURNS - 1:
            answer = json.loads(output)["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": TEXT}]
    assert output.endswith("data: [DONE]\n\n")
    await assert_sessions(gate, client, "curl", 1)


async def test_curl_expects_100_continue_before_a_large_body(gate: Gate) -> None:
    """curl sends Expect: 100-continue with bodies over 1 MB and waits for the answer."""
    body = json.dumps(chat() | {"a_field_of_next_year": "x" * 2_000_000})
    command = ["curl", "--silent", "--verbose", "--http1.1", f"{gate.url}/v1/chat/completions", "--data", "@-"]
    command += ["-H", "Content-Type: application/json", "-H", "Expect: 100-continue"]
    done = await asyncio.to_thread(subprocess.run, command, input=body, capture_output=True, text=True, timeout=60)
    assert "100 Continue" in done.stderr
    assert json.loads(done.stdout)["object"] == "chat.completion"
