"""/inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from tidegate.engine.core import EngineCore
from tidegate.engine.generation import Generation
from tidegate.engine.http import Call, Refusal, decode_body
from tidegate.engine.jobs import (
    Job,
    SharedFields,
    StreamOptions,
    attended,
    check_model,
    new_id,
    pack_ids,
    start,
    top_candidates,
)


class SamplingParams(SharedFields, kw_only=True):
    """vLLM's SamplingParams; only the sampling fields of `SharedFields` mean something here."""

    logprobs: int | None = None
    max_tokens: int | None = 16


class GenerateBody(Struct, kw_only=True):
    token_ids: list[int]
    sampling_params: SamplingParams
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    return_token_ids: bool | None = False


_BODY = msgspec.json.Decoder(GenerateBody)


async def generate(core: EngineCore, call: Call) -> None:
    body: GenerateBody = decode_body(await call.body(), _BODY)
    check_model(core, body.model)
    if not body.token_ids:
        raise Refusal("token_ids must hold at least one token", kind="Bad Request", param="body.token_ids")
    params = body.sampling_params
    job = start(
        core,
        [pack_ids(body.token_ids)],
        params.sampling(max_tokens=params.max_tokens, logprobs=params.logprobs),
        id=new_id("generate-tokens", call.header(b"x-request-id") or body.request_id),
        session=call.header(b"x-session-id"),  # this API has no session field
        salt=body.cache_salt,
        priority=body.priority,
        streaming=bool(body.stream),
    )
    with attended(core, call, job):
        if body.stream:
            await _stream(call, body, job)
        else:
            await job.finished()
            await call.json(_whole(core, body, job))


def _choice(index: int, generation: Generation, first: int, end: int) -> dict[str, Any]:
    stopped = generation.done and generation.finish_reason == "stop"
    return {
        "index": index,
        "logprobs": token_logprobs(generation, first, end),
        "finish_reason": generation.finish_reason if generation.done else None,
        "stop_reason": generation.stop_reason if stopped else None,
        "token_ids": generation.tokens_out(first, end),
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "default", "start": 0, "end": end}] if generation.done else None,
    }


def _whole(core: EngineCore, body: GenerateBody, job: Job) -> dict[str, Any]:
    return {
        "request_id": job.id,
        "model": core.config.served_model_name,
        "created": job.created,
        "usage": job.usage(),
        "prompt_logprobs": None,
        "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        "kv_transfer_params": None,
        "output_mode": "tokens",
        "choices": [
            _choice(index, generation, 0, generation.delivered) for index, generation in enumerate(job.generations)
        ],
    }


async def _stream(call: Call, body: GenerateBody, job: Job) -> None:
    prompt = body.token_ids if body.return_token_ids else None
    await call.start_events()
    async for index, generation, first, end in job.deltas():
        chunk: dict[str, Any] = {
            "request_id": job.id,
            "usage": None,
            "output_mode": "tokens",
            "choices": [_choice(index, generation, first, end)],
        }
        if prompt is not None:
            chunk["prompt_token_ids"], prompt = prompt, None
        await call.event(chunk)
    if body.stream_options is not None and body.stream_options.include_usage:
        await call.event({"request_id": job.id, "usage": job.usage(), "output_mode": "tokens", "choices": []})
    await call.write(b"data: [DONE]\n\n", more=False)


def token_logprobs(generation: Generation, first: int, end: int) -> dict[str, Any] | None:
    count = generation.sampling.logprobs
    if count is None:
        return None
    content = []
    for index in range(first, end):
        candidates = [
            {"token_id": id, "logprob": logprob, "rank": rank}
            for rank, (id, logprob) in enumerate(top_candidates(generation, index, max(1, count)), start=1)
        ]
        content.append({**candidates[0], "top_logprobs": candidates})
    return {"content": content}
