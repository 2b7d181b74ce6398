"""/generate: SGLang's native API, for trainers that speak it (slime, miles)."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from tidegate.engine import tokenizer
from tidegate.engine.core import EngineCore
from tidegate.engine.generation import Generation, Sampling
from tidegate.engine.http import Call, Refusal, decode_body
from tidegate.engine.jobs import Job, attended, new_id, pack_ids, start

_DEFAULT_NEW_TOKENS = 128  # SGLang's


class SamplingParams(Struct, kw_only=True):
    max_new_tokens: int | None = _DEFAULT_NEW_TOKENS
    min_new_tokens: int = 0
    temperature: float = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    n: int = 1


class GenerateBody(Struct, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SamplingParams | None = None
    return_logprob: bool | None = False
    stream: bool = False
    rid: str | None = None
    session_id: str | None = None
    session_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    priority: int | None = None


_BODY = msgspec.json.Decoder(GenerateBody)


async def generate(core: EngineCore, call: Call) -> None:
    body: GenerateBody = decode_body(await call.body(), _BODY)
    prompts, batch = _prompts(body)
    params = body.sampling_params or SamplingParams()
    stop = params.stop or ()
    sampling = Sampling(
        max_tokens=params.max_new_tokens,
        min_tokens=params.min_new_tokens,
        ignore_eos=params.ignore_eos,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(params.stop_token_ids or ()),
        temperature=params.temperature,
        seed=params.sampling_seed,
        n=params.n,
        logprobs=1 if body.return_logprob else None,
    )
    params_of_session = body.session_params or {}
    opened = params_of_session.get("id") if core.config.dialect == "sglang" else None
    if opened is not None:
        before = core.sessions.context(str(opened), params_of_session.get("rid"))
        prompts = [before + prompt for prompt in prompts]
    session = body.session_id or params_of_session.get("id") or call.header(b"x-smg-routing-key")
    job = start(
        core,
        prompts,
        sampling,
        id=body.rid or new_id("rid", None)[4:],
        session=session or call.header(b"x-session-id"),
        salt=body.extra_key or body.cache_salt,
        priority=body.priority or 0,
        streaming=body.stream,
    )
    with attended(core, call, job):
        if body.stream:
            await _stream(call, body, job)
        else:
            await job.finished()
            answers = [_answer(job, index, generation) for index, generation in enumerate(job.generations)]
            await call.json(answers if batch or params.n > 1 else answers[0])
    if opened is not None:
        first = job.generations[0]
        core.sessions.keep(str(opened), job.id, prompts[0] + pack_ids(first.tokens_out(0, first.delivered)))


def _prompts(body: GenerateBody) -> tuple[list[bytes], bool]:
    """The prompts, and whether they came as a batch."""
    if (body.text is None) == (body.input_ids is None):
        raise Refusal("exactly one of text and input_ids is required")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        return [tokenizer.encode(text) for text in texts], not isinstance(body.text, str)
    ids = body.input_ids or []
    if not ids:
        raise Refusal("input_ids must not be empty", param="input_ids")
    if isinstance(ids[0], int):
        return [pack_ids(ids)], False
    return [pack_ids(item) for item in ids if isinstance(item, list)], True


def _answer(job: Job, index: int, generation: Generation) -> dict[str, Any]:
    end = generation.delivered
    ids = generation.tokens_out(0, end)
    finish: dict[str, Any] | None = None
    if generation.done:
        finish = {"type": generation.finish_reason}
        if generation.finish_reason == "length":
            finish["length"] = end
        elif generation.finish_reason == "stop" and generation.stop_reason is not None:
            finish["matched"] = generation.stop_reason
    meta: dict[str, Any] = {
        "id": job.id if len(job.generations) == 1 else f"{job.id}-{index}",
        "finish_reason": finish,
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": end,
        "cached_tokens": generation.cached_tokens or 0,
        "weight_version": "default",
        "e2e_latency": generation.last_token_s - generation.arrival_s if end else 0.0,  # model time
    }
    if generation.sampling.logprobs is not None:
        meta["output_token_logprobs"] = [[generation.logprob(i), id, None] for i, id in enumerate(ids)]
    return {"text": generation.text_out(0, end), "output_ids": ids, "meta_info": meta}


async def _stream(call: Call, body: GenerateBody, job: Job) -> None:
    """Each event holds all that has been generated so far."""
    await call.start_events()
    async for index, generation, _, _ in job.deltas():
        answer = _answer(job, index, generation)
        if len(job.generations) > 1:
            answer["index"] = index
        await call.event(answer)
    await call.write(b"data: [DONE]\n\n", more=False)
