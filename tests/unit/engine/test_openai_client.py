"""The stock OpenAI client against the engine: every API of its that vLLM has."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from tidegate.engine import tokenizer
from tidegate.engine.server import EngineServer

MESSAGES = [{"role": "user", "content": "Tell me something about admission control, please. " * 8}]


@pytest.fixture
async def client(engine: EngineServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_models_lists_the_served_one_with_its_length(client: openai.AsyncOpenAI, engine: EngineServer) -> None:
    (model,) = (await client.models.list()).data
    assert model.id == "m"
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == engine.config.model_len


async def test_a_chat_of_several_turns_finds_its_prefix(client: openai.AsyncOpenAI) -> None:
    messages = list(MESSAGES)
    for turn in range(3):
        reply = await client.chat.completions.create(model="m", messages=messages, max_completion_tokens=30)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == tokenizer.count(tokenizer.encode_chat(messages))
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
        details = reply.usage.prompt_tokens_details
        assert details is not None
        if turn:
            # All of the turn before but for the block in which it ended.
            assert details.cached_tokens is not None
            assert details.cached_tokens > known - 16  # noqa: F821
        known = reply.usage.total_tokens  # noqa: F841
        content = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]


async def test_at_temperature_zero_the_reply_is_the_same_cached_or_not(client: openai.AsyncOpenAI) -> None:
    replies = [
        await client.chat.completions.create(model="m", messages=MESSAGES, temperature=0, max_tokens=12)
        for _ in range(2)
    ]
    assert replies[0].choices[0].message.content == replies[1].choices[0].message.content
    cached = [reply.usage.prompt_tokens_details.cached_tokens for reply in replies]  # type: ignore[union-attr]
    assert cached[0] == 0 < cached[1]  # type: ignore[operator]


async def test_choices_differ_and_a_seed_repeats_them(client: openai.AsyncOpenAI) -> None:
    async def texts(seed: int) -> list[str]:
        reply = await client.completions.create(model="m", prompt="x", n=3, seed=seed, max_tokens=8)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == 1
        return [choice.text for choice in reply.choices]

    first = await texts(1)
    assert len(set(first)) == 3
    assert await texts(1) == first
    assert await texts(2) != first


async def test_a_streamed_chat_is_the_whole_one(client: openai.AsyncOpenAI) -> None:
    ask = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    whole = await client.chat.completions.create(**ask)
    stream = await client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_a_streamed_completion_of_several_choices_keeps_them_apart(client: openai.AsyncOpenAI) -> None:
    ask = {"model": "m", "prompt": "x y z", "n": 2, "seed": 5, "max_tokens": 20}
    whole = await client.completions.create(**ask)
    texts = ["", ""]
    async for chunk in await client.completions.create(**ask, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


async def test_token_ids_go_in_and_come_out(client: openai.AsyncOpenAI) -> None:
    reply = await client.completions.create(
        model="m", prompt=[5, 6, 7], max_tokens=4, logprobs=2, extra_body={"ignore_eos": True, "return_token_ids": True}
    )
    choice = reply.choices[0]
    assert choice.model_extra is not None
    assert choice.model_extra["prompt_token_ids"] == [5, 6, 7]
    assert tokenizer.decode(choice.model_extra["token_ids"]) == choice.text
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert [len(top) for top in choice.logprobs.top_logprobs or []] == [2, 2, 2, 2]
    assert choice.finish_reason == "length"


async def test_several_prompts_are_answered_in_order(client: openai.AsyncOpenAI) -> None:
    async def ask(prompt: object) -> list[str]:
        reply = await client.completions.create(model="m", prompt=prompt, temperature=0, max_tokens=6)  # type: ignore[arg-type]
        return [choice.text for choice in reply.choices]

    assert await ask(["a", "b"]) == [*await ask("a"), *await ask("b")]
    assert await ask([[1, 2], [3]]) == [*await ask([1, 2]), *await ask([3])]


async def test_chat_logprobs(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True}
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(item.token for item in logprobs.content) == reply.choices[0].message.content
    assert all(len(item.top_logprobs) == 3 and item.top_logprobs[0].token == item.token for item in logprobs.content)


async def test_stop_strings(client: openai.AsyncOpenAI) -> None:
    ask = {"model": "m", "prompt": "x", "temperature": 0, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    text = (await client.completions.create(**ask)).choices[0].text
    stopped = (await client.completions.create(**ask, stop=[text[20:24]])).choices[0]
    assert stopped.text == text[: text.find(text[20:24])]
    assert stopped.finish_reason == "stop"


async def test_responses(client: openai.AsyncOpenAI) -> None:
    ask = {"model": "m", "input": "hello", "instructions": "be brief", "temperature": 0, "max_output_tokens": 9}
    whole = await client.responses.create(**ask, extra_body={"ignore_eos": True})
    assert whole.status == "incomplete"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 9
    stream = await client.responses.create(**ask, stream=True, extra_body={"ignore_eos": True})
    events = [event async for event in stream]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.completed"
    assert events[-1].response.status == "incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_response_continues_from_items(client: openai.AsyncOpenAI) -> None:
    items: list[object] = [{"role": "user", "content": "hello " * 30}]
    first = await client.responses.create(model="m", input=items, max_output_tokens=20)  # type: ignore[arg-type]
    items += [item.model_dump() for item in first.output]
    items += [{"type": "function_call_output", "call_id": "c", "output": "42"}, {"role": "user", "content": "more"}]
    second = await client.responses.create(model="m", input=items, max_output_tokens=20)  # type: ignore[arg-type]
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 16 * 16


async def test_an_unknown_model_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.chat.completions.create(model="other", messages=MESSAGES)


async def test_a_prompt_that_is_too_long_is_a_bad_request(client: openai.AsyncOpenAI, engine: EngineServer) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.completions.create(model="m", prompt=[1] * engine.config.model_len, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.completions.create(model="m", prompt=[1] * 100, max_tokens=engine.config.model_len)
