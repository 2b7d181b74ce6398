"""Stock clients through the gate."""

from __future__ import annotations

import asyncio
import json
import shutil

import aiohttp
import openai
import pytest

COMPLETION = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


def events() -> list[bytes]:
    chunks = []
    for word in ("hel", "lo"):
        delta = {"index": 0, "delta": {"content": word}, "finish_reason": None}
        chunks.append(COMPLETION | {"object": "chat.completion.chunk", "choices": [delta], "usage": None})
    return [b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks] + [b"data: [DONE]\n\n"]


@pytest.fixture
async def engine(bench):
    async def script(side, number: int) -> None:
        while True:
            _, body = await side.request()
            if json.loads(body or b"{}").get("stream"):
                side.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
                for event in events():
                    side.send(b"%x\r\n%b\r\n" % (len(event), event))
                    await asyncio.sleep(0.01)
                side.send(b"0\r\n\r\n")
            else:
                reply = json.dumps(COMPLETION | {"echo": len(body)}).encode()
                side.send(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(reply)
                )
                side.send(reply)

    return await bench.replica(script)


async def test_openai(bench, handler_type, engine) -> None:
    handler = handler_type(engine.url)
    listener = await bench.gate(handler)
    messages = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{listener.port}/v1", api_key="k", max_retries=0
    ) as client:
        for _ in range(2):
            whole = await client.chat.completions.create(model="m", messages=messages)
            assert whole.choices[0].message.content == "hello"
            stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
            assert "".join([chunk.choices[0].delta.content async for chunk in stream]) == "hello"
    assert engine.connections == 1
    assert handler.ends == [("ok", None)] * 4


async def test_openai_reads_the_gates_own_errors(bench, handler_type, engine) -> None:
    listener = await bench.gate(handler_type(engine.url), max_body_bytes=100)
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{listener.port}/v1", api_key="k", max_retries=0
    ) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model="m", prompt="x" * 200)
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


async def test_aiohttp(bench, handler_type, engine) -> None:
    listener = await bench.gate(handler_type(engine.url))
    url = f"http://127.0.0.1:{listener.port}/v1/completions"

    async def chunks():
        yield b'{"a": "'
        await asyncio.sleep(0.01)
        yield b"x" * 100_000 + b'"}'

    async with aiohttp.ClientSession() as client:
        for options in ({"data": chunks()}, {"data": b"{}" + b" " * 1_000_000}, {"json": {}, "expect100": True}):
            async with client.post(url, **options) as reply:
                assert (await reply.json())["choices"][0]["message"]["content"] == "hello"
        async with client.post(url, json={"stream": True}) as reply:
            assert await reply.read() == b"".join(events())


async def test_an_aiohttp_client_that_gives_up_aborts_the_replica(bench, handler_type) -> None:
    gone = asyncio.Event()

    async def script(side, number: int) -> None:
        await side.request()
        await side.gone()
        gone.set()

    handler = handler_type((await bench.replica(script)).url)
    listener = await bench.gate(handler)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.2)) as client:
        with pytest.raises(TimeoutError):
            await client.post(f"http://127.0.0.1:{listener.port}/", json={})
    await asyncio.wait_for(gone.wait(), 10)
    assert handler.ends == [("aborted", None)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
@pytest.mark.parametrize(
    "options",
    [
        ("--data-binary", "@-"),
        ("--data-binary", "@-", "--http1.0"),
        ("--data-binary", "@-", "-H", "Transfer-Encoding: chunked"),
        ("--data-binary", "@-", "-H", "Expect: 100-continue"),
    ],
)
async def test_curl(bench, handler_type, engine, options: tuple[str, ...]) -> None:
    listener = await bench.gate(handler_type(engine.url))
    body = b'{"a": "' + b"x" * 100_000 + b'"}'
    command = ("curl", "-sS", "--max-time", "10", *options, f"http://127.0.0.1:{listener.port}/v1/completions")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    out, error = await process.communicate(body)
    assert error == b""
    assert json.loads(out)["echo"] == len(body)
