"""Bytes pass: what comes through the gate is what the engine said, on every path, whole or streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from tests.e2e.conftest import Replica, StartGate
from tests.e2e.engine_metrics import running_requests
from tests.e2e.gate import Gate
from tests.e2e.inference import PATHS, STREAMED, completion, encode, kept, masked, token_ids
from tests.e2e.waiting import until
from tests.e2e.wire import Wire

STREAM_ATTEMPTS = 20
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def gate(replicas: list[Replica], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """One replica behind it, so that there is one engine to compare with."""
    gate = Gate([replicas[0].url], tmp_path_factory.mktemp("relay") / "gate.log", policy="sticky_least_loaded")
    gate.start()
    yield gate
    gate.process.kill()


async def answer(
    client: aiohttp.ClientSession, base: str, path: str, body: dict[str, Any], **headers: str
) -> tuple[int, dict[str, list[str]], bytes]:
    async with client.post(base + path, data=encode(body), headers={**JSON, **headers}) as reply:
        return reply.status, kept(reply.headers), masked(await reply.read())


async def assert_same(client: aiohttp.ClientSession, gate: Gate, replica: Replica, path: str, body: Any) -> bytes:
    """The first answer warms the prefix cache: cached_tokens is part of what must be equal."""
    await answer(client, replica.url, path, body)
    direct = await answer(client, replica.url, path, body)
    named = {"X-Session-ID": f"relay-{path}", "X-Workload-Class": "rlhf"}
    relayed = await answer(client, gate.url, path, body, **named)
    assert direct[0] == 200, direct
    assert relayed == direct
    return relayed[2]


@pytest.mark.parametrize("name", PATHS)
async def test_reply_is_the_engines_own(
    name: str, client: aiohttp.ClientSession, gate: Gate, replicas: list[Replica]
) -> None:
    path, body = PATHS[name]
    await assert_same(client, gate, replicas[0], path, body)


@pytest.mark.vllm
@pytest.mark.parametrize("name", STREAMED)
async def test_stream_is_the_engines_own(
    name: str, client: aiohttp.ClientSession, gate: Gate, replicas: list[Replica]
) -> None:
    """Tokens that are ready at once share a chunk, so that an engine's own stream may differ from run to run on a busy
    machine; a relay that changed anything would differ every time."""
    path, body = PATHS[name]
    for _ in range(STREAM_ATTEMPTS):
        answers = [await answer(client, base, path, body | {"stream": True}) for base in (replicas[0].url, gate.url)]
        assert answers[1][2].count(b"data:") > 2
        if answers[0] == answers[1]:
            return
    assert answers[0] == answers[1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", PATHS)
async def test_not_a_byte_changes_between_client_and_engine(
    name: str, stream: bool, client: aiohttp.ClientSession, start_gate: StartGate, replicas: list[Replica]
) -> None:
    """Bodies as they are on the wire behind the gate, both ways; spelled as no serialiser would."""
    path, body = PATHS[name]
    sent = encode(body | {"stream": stream}).replace(b'": ', b'"  :\t') + b"\n "
    async with Wire(replicas[0].url) as wire:
        gate = start_gate([wire.url])
        await gate.ready(client, 1)
        for headers in ({"X-Session-ID": "wire"}, {}):  # with a session id the gate need not look into the body
            async with client.post(gate.url + path, data=sent, headers=JSON | headers) as reply:
                assert reply.status == 200
                received = await reply.read()
            seen = wire.exchanges(path)[-1]
            assert seen.complete
            assert seen.request == sent
            assert seen.reply == received
            if stream and name in STREAMED:
                assert seen.reply_pieces > 2


@pytest.mark.embedded
async def test_sglang_generate_is_the_engines_own(
    client: aiohttp.ClientSession, gate: Gate, replicas: list[Replica]
) -> None:
    body = {"input_ids": token_ids(20, 3), "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    await assert_same(client, gate, replicas[0], "/generate", body)


async def test_replies_depend_on_the_prompt_and_not_on_the_run(client: aiohttp.ClientSession, gate: Gate) -> None:
    """Without this, the comparisons above would hold for an engine that always says the same."""
    bodies = [completion(token_ids(20, seed), 8) for seed in ("one", "one", "other")]
    one, again, other = [(await answer(client, gate.url, "/v1/completions", body))[2] for body in bodies]
    assert one == again
    assert one != other


@pytest.mark.parametrize("name", ["chat", "completions-ids", "inference-generate"])
async def test_unknown_body_fields_pass(
    name: str, client: aiohttp.ClientSession, gate: Gate, replicas: list[Replica]
) -> None:
    path, body = PATHS[name]
    await assert_same(client, gate, replicas[0], path, body | {"a_field_of_next_year": {"x": [1, 1.0, None]}})


async def test_first_chunk_comes_while_the_engine_still_generates(
    client: aiohttp.ClientSession, gate: Gate, replicas: list[Replica]
) -> None:
    body = completion(token_ids(20, "long"), 4000, stream=True)
    async with client.post(f"{gate.url}/v1/completions", data=encode(body), headers=JSON) as reply:
        first = await reply.content.readany()
        assert first.startswith(b"data: {")
        assert await running_requests(client, replicas[0].url) == 1
        rest = await reply.read()
    assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/version"),
        ("HEAD", "/v1/models"),
        ("GET", "/no/such/path?x=%20y&x=1"),
        ("POST", "/no/such/path"),
        ("DELETE", "/v1/chat/completions"),
    ],
)
async def test_unknown_paths_and_methods_are_the_engines_to_answer(
    method: str, path: str, client: aiohttp.ClientSession, gate: Gate, replicas: list[Replica]
) -> None:
    answers = []
    for base in (replicas[0].url, gate.url):
        async with client.request(method, base + path) as reply:
            answers.append((reply.status, kept(reply.headers), masked(await reply.read())))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "prompt": "x", "max_tokens": -5}',
        b'{"model": "no such model", "prompt": "x"}',
        b'{"model": "m"}',
    ],
    ids=["bad value", "unknown model", "missing field"],
)
async def test_the_engines_errors_pass(
    body: bytes, client: aiohttp.ClientSession, gate: Gate, replicas: list[Replica]
) -> None:
    answers = []
    for base in (replicas[0].url, gate.url):
        async with client.post(f"{base}/v1/completions", data=body, headers=JSON | {"X-Session-ID": "wrong"}) as reply:
            answers.append((reply.status, kept(reply.headers), masked(await reply.read())))
    assert 400 <= answers[0][0] < 500
    assert answers[0] == answers[1]
    await gate.ready(client, 1)


async def test_a_long_prompt_sent_in_pieces_arrives_whole(
    client: aiohttp.ClientSession, gate: Gate, replicas: list[Replica]
) -> None:
    """Chunked upload, no Content-Length; the engine counts what it got."""
    prompt = token_ids(4000, "pieces")
    body = encode(completion(prompt, 1))

    async def pieces() -> Any:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]
            await asyncio.sleep(0)

    headers = JSON | {"X-Session-ID": "pieces"}
    async with client.post(f"{gate.url}/v1/completions", data=pieces(), headers=headers) as reply:
        assert reply.status == 200
        assert (await reply.json())["usage"]["prompt_tokens"] == len(prompt)


async def test_many_streams_at_once_stay_apart(
    client: aiohttp.ClientSession, gate: Gate, replicas: list[Replica]
) -> None:
    """Each client gets the reply to its own prompt; what is generated may depend on the batch it was generated in."""

    async def prompt_seen(number: int) -> list[int]:
        body = completion(token_ids(20, f"apart {number}"), 16, stream=True, return_token_ids=True)
        _, _, stream = await answer(client, gate.url, "/v1/completions", body)
        lines = stream.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines if line]
        assert len(chunks) > 1
        return list(chunks[0]["choices"][0]["prompt_token_ids"])

    seen = await asyncio.gather(*(prompt_seen(number) for number in range(12)))
    assert seen == [token_ids(20, f"apart {number}") for number in range(12)]
    await until(lambda: running_requests(client, replicas[0].url), lambda running: running == 0)
