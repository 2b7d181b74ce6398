"""The APIs that the OpenAI client does not speak: Messages, vLLM's and SGLang's generate, tokenization."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.unit.engine.conftest import Http

from tidegate.engine import tokenizer
from tidegate.engine.server import EngineServer

ASK = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 12, "temperature": 0, "model": "m"}


async def events(http: Http, url: str, body: dict[str, Any]) -> list[Any]:
    async with http.session.post(url, json=body) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        text = await response.text()
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [item if item == "[DONE]" else msgspec.json.decode(item) for item in data]


async def test_messages(engine: EngineServer, http: Http) -> None:
    _, whole = await http.post(f"{engine.url}/v1/messages", {**ASK, "ignore_eos": True})
    assert whole["stop_reason"] == "max_tokens"
    assert whole["usage"]["output_tokens"] == 12
    stream = await events(http, f"{engine.url}/v1/messages", {**ASK, "ignore_eos": True, "stream": True})
    assert stream[0]["type"] == "message_start"
    text = "".join(event["delta"]["text"] for event in stream if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert stream[-2]["usage"]["output_tokens"] == 12
    assert stream[-1]["type"] == "message_stop"


async def test_messages_and_chat_share_their_prefix(engine: EngineServer, http: Http) -> None:
    long = {**ASK, "messages": [{"role": "user", "content": "hello there " * 40}]}
    await http.post(f"{engine.url}/v1/chat/completions", long)
    _, reply = await http.post(f"{engine.url}/v1/messages", long)
    assert reply["usage"]["cache_read_input_tokens"] > 100


async def test_generate_of_token_ids(engine: EngineServer, http: Http) -> None:
    body = {
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 2},
        "return_token_ids": True,
        "request_id": "mine",
    }
    _, whole = await http.post(f"{engine.url}/inference/v1/generate", body)
    assert whole["request_id"] == "generate-tokens-mine"
    assert whole["prompt_token_ids"] == [1, 2, 3]
    assert whole["usage"]["completion_tokens"] == 6
    choice = whole["choices"][0]
    assert [item["token_id"] for item in choice["logprobs"]["content"]] == choice["token_ids"]
    assert all(len(item["top_logprobs"]) == 2 for item in choice["logprobs"]["content"])
    stream = await events(
        http, f"{engine.url}/inference/v1/generate", {**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert stream[-1] == "[DONE]"
    assert stream[0]["prompt_token_ids"] == [1, 2, 3]
    ids = [id for event in stream[:-1] for choice in event["choices"] for id in choice["token_ids"]]
    assert ids == choice["token_ids"]
    assert stream[-2]["usage"]["completion_tokens"] == 6


async def test_sglangs_generate(engine: EngineServer, http: Http) -> None:
    body = {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "rid": "mine",
    }
    _, whole = await http.post(f"{engine.url}/generate", body)
    meta = whole["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 3, 6)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert [id for _, id, _ in meta["output_token_logprobs"]] == whole["output_ids"]
    assert tokenizer.decode(whole["output_ids"]) == whole["text"]
    stream = await events(http, f"{engine.url}/generate", {**body, "stream": True})
    assert stream[-1] == "[DONE]"
    assert stream[-2]["output_ids"] == whole["output_ids"]  # each event holds all so far
    _, batch = await http.post(f"{engine.url}/generate", {**body, "input_ids": [[1, 2, 3], [4]], "rid": None})
    assert batch[0]["output_ids"] == whole["output_ids"]
    assert len(batch) == 2


async def test_text_goes_to_sglangs_generate_too(engine: EngineServer, http: Http) -> None:
    _, reply = await http.post(f"{engine.url}/generate", {"text": "hello world"})
    assert reply["meta_info"]["prompt_tokens"] == tokenizer.count(tokenizer.encode("hello world"))
    status, _ = await http.post(f"{engine.url}/generate", {"text": "a", "input_ids": [1]})
    assert status == 400


async def test_tokenize_and_back(engine: EngineServer, http: Http) -> None:
    _, tokens = await http.post(f"{engine.url}/tokenize", {"prompt": "hello world", "return_token_strs": True})
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    _, text = await http.post(f"{engine.url}/detokenize", {"tokens": tokens["tokens"]})
    assert text == {"prompt": "hello world"}
    _, chat = await http.post(f"{engine.url}/tokenize", {"messages": ASK["messages"]})
    _, reply = await http.post(f"{engine.url}/v1/chat/completions", ASK)
    assert chat["count"] == reply["usage"]["prompt_tokens"]


async def test_version_health_ping_load(engine: EngineServer, http: Http) -> None:
    assert "version" in (await http.get(f"{engine.url}/version"))[1]
    assert await http.get(f"{engine.url}/load") == (200, {"server_load": 0})
    for path in ("/health", "/ping"):
        async with http.session.get(engine.url + path) as response:
            assert (response.status, await response.read()) == (200, b"")
