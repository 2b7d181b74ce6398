"""/v1/chat/completions and /v1/completions, as vLLM answers them."""

from __future__ import annotations

from typing import Any

import msgspec

from tidegate.engine import tokenizer
from tidegate.engine.core import EngineCore
from tidegate.engine.generation import Generation
from tidegate.engine.http import Call, Refusal, decode_body
from tidegate.engine.jobs import (
    Job,
    SharedFields,
    attended,
    check_model,
    new_id,
    pack_ids,
    session_of,
    start,
    top_candidates,
    usage,
)
from tidegate.engine.orca import load_header


class ChatBody(SharedFields, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0


class CompletionBody(SharedFields, kw_only=True):
    prompt: str | list[int | str | list[int]]
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = 16


_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)


async def chat(core: EngineCore, call: Call) -> None:
    body: ChatBody = decode_body(await call.body(), _CHAT)
    check_model(core, body.model)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    sampling = body.sampling(max_tokens=max_tokens, logprobs=max(1, body.top_logprobs or 0) if body.logprobs else None)
    job = start(
        core,
        [tokenizer.encode_chat(body.messages, body.tools)],
        sampling,
        id=new_id("chatcmpl", call.header(b"x-request-id") or body.request_id),
        session=session_of(call, body),
        salt=body.cache_salt,
        priority=body.priority,
        chat=True,
        streaming=bool(body.stream),
    )
    await _answer(core, call, _ChatShape(core, body), job)


async def completions(core: EngineCore, call: Call) -> None:
    body: CompletionBody = decode_body(await call.body(), _COMPLETION)
    check_model(core, body.model)
    if body.echo:
        raise Refusal("echo is not supported by this engine.", param="echo")
    job = start(
        core,
        prompts_of(body.prompt),
        body.sampling(max_tokens=body.max_tokens, logprobs=body.logprobs),
        id=new_id("cmpl", call.header(b"x-request-id") or body.request_id),
        session=session_of(call, body),
        salt=body.cache_salt,
        priority=body.priority,
        streaming=bool(body.stream),
    )
    await _answer(core, call, _CompletionShape(core, body), job)


def prompts_of(prompt: str | list[int | str | list[int]]) -> list[bytes]:
    """Text, ids, or a list of either."""
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    if not prompt:
        raise Refusal("The decoder prompt cannot be empty", param="prompt")
    if isinstance(prompt[0], int):
        return [pack_ids(prompt)]
    prompts = []
    for item in prompt:
        if isinstance(item, int):
            raise Refusal("prompts are either texts or lists of token ids", param="prompt")
        prompts.append(tokenizer.encode(item) if isinstance(item, str) else pack_ids(item))
    return prompts


async def _answer(core: EngineCore, call: Call, shape: _Shape, job: Job) -> None:
    with attended(core, call, job):
        if shape.body.stream:
            await _stream(core, call, shape, job)
        else:
            await job.finished()
            await call.json(shape.whole(job), headers=load_header(core, call))


async def _stream(core: EngineCore, call: Call, shape: _Shape, job: Job) -> None:
    options = shape.body.stream_options
    await call.start_events(load_header(core, call))
    unopened = set(range(len(job.generations)))
    async for index, generation, first, end in job.deltas():
        if index in unopened:  # with the first token, not before: the headers alone go out at once, as from vLLM
            unopened.discard(index)
            opening = shape.opening(job, index, generation)
            if opening is not None:
                await call.event(opening)
        chunk = shape.delta(job, index, generation, first, end)
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = usage(generation.prompt_tokens, generation.delivered, None)
        await call.event(chunk)
    if options is not None and options.include_usage:
        await call.event({**shape.head(job, streamed=True), "choices": [], "usage": job.usage()})
    await call.write(b"data: [DONE]\n\n", more=False)


class _Shape:
    """How an API writes the same facts."""

    object = ""
    chunk_object = ""

    def __init__(self, core: EngineCore, body: SharedFields) -> None:
        self.model = core.config.served_model_name
        self.body = body

    def head(self, job: Job, *, streamed: bool) -> dict[str, Any]:
        return {
            "id": job.id,
            "object": self.chunk_object if streamed else self.object,
            "created": job.created,
            "model": self.model,
        }

    def whole(self, job: Job) -> dict[str, Any]:
        raise NotImplementedError

    def opening(self, job: Job, index: int, generation: Generation) -> dict[str, Any] | None:
        return None

    def delta(self, job: Job, index: int, generation: Generation, first: int, end: int) -> dict[str, Any]:
        raise NotImplementedError

    def token_ids(self, generation: Generation, first: int, end: int) -> dict[str, Any]:
        return {"token_ids": generation.tokens_out(first, end)} if self.body.return_token_ids else {}


class _ChatShape(_Shape):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, job: Job) -> dict[str, Any]:
        prompt = job.generations[0].prompt
        return {
            **self.head(job, streamed=False),
            "choices": [self._choice(index, generation) for index, generation in enumerate(job.generations)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": job.usage(),
            "prompt_logprobs": None,
            "prompt_token_ids": tokenizer.unpack(prompt) if self.body.return_token_ids else None,
            "kv_transfer_params": None,
        }

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        end = generation.delivered
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": generation.text_out(0, end),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": chat_logprobs(generation, 0, end),
            "finish_reason": generation.finish_reason,
            "stop_reason": generation.stop_reason if generation.finish_reason == "stop" else None,
            "token_ids": generation.tokens_out(0, end) if self.body.return_token_ids else None,
        }

    def opening(self, job: Job, index: int, generation: Generation) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        chunk = {
            **self.head(job, streamed=True),
            "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}],
        }
        if self.body.return_token_ids:
            chunk["prompt_token_ids"] = tokenizer.unpack(generation.prompt)
        return chunk

    def delta(self, job: Job, index: int, generation: Generation, first: int, end: int) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": generation.text_out(first, end)},
            "logprobs": chat_logprobs(generation, first, end),
            "finish_reason": generation.finish_reason if generation.done else None,
            **self.token_ids(generation, first, end),
        }
        if generation.done:
            choice["stop_reason"] = generation.stop_reason if generation.finish_reason == "stop" else None
        return {**self.head(job, streamed=True), "choices": [choice]}


class _CompletionShape(_Shape):
    object = "text_completion"
    chunk_object = "text_completion"

    def whole(self, job: Job) -> dict[str, Any]:
        choices = []
        for index, generation in enumerate(job.generations):
            choice = self._choice(index, generation, 0, generation.delivered)
            choice.setdefault("token_ids", None)
            choice["prompt_logprobs"] = None
            choice["prompt_token_ids"] = tokenizer.unpack(generation.prompt) if self.body.return_token_ids else None
            choices.append(choice)
        return {
            **self.head(job, streamed=False),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": job.usage(),
            "kv_transfer_params": None,
        }

    def _choice(self, index: int, generation: Generation, first: int, end: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": generation.text_out(first, end),
            "logprobs": completion_logprobs(generation, first, end),
            "finish_reason": generation.finish_reason if generation.done else None,
            "stop_reason": (generation.stop_reason if generation.done and generation.finish_reason == "stop" else None),
            **self.token_ids(generation, first, end),
        }

    def delta(self, job: Job, index: int, generation: Generation, first: int, end: int) -> dict[str, Any]:
        choice = self._choice(index, generation, first, end)
        if first == 0 and self.body.return_token_ids:
            choice["prompt_token_ids"] = tokenizer.unpack(generation.prompt)
        return {**self.head(job, streamed=True), "choices": [choice]}


def chat_logprobs(generation: Generation, first: int, end: int) -> dict[str, Any] | None:
    count = generation.sampling.logprobs
    if count is None:
        return None
    content = []
    for index in range(first, end):
        candidates = [
            {"token": tokenizer.decode([id], special=True), "logprob": logprob, "bytes": list(tokenizer.piece(id))}
            for id, logprob in top_candidates(generation, index, count)
        ]
        content.append({**candidates[0], "top_logprobs": candidates})
    return {"content": content}


def completion_logprobs(generation: Generation, first: int, end: int) -> dict[str, Any] | None:
    count = generation.sampling.logprobs
    if count is None:
        return None
    offset = len(generation.text_out(0, first))
    shape: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for index in range(first, end):
        candidates = top_candidates(generation, index, max(1, count))
        text = tokenizer.decode([candidates[0][0]], special=True)
        shape["text_offset"].append(offset)
        shape["tokens"].append(text)
        shape["token_logprobs"].append(candidates[0][1])
        shape["top_logprobs"].append({tokenizer.decode([id], special=True): logprob for id, logprob in candidates})
        offset += len(text)
    return shape
