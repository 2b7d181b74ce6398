"""/v1/messages: Anthropic's Messages API, as vLLM serves it."""

from __future__ import annotations

from typing import Any

import msgspec

from tidegate.engine import tokenizer
from tidegate.engine.core import EngineCore
from tidegate.engine.generation import Generation
from tidegate.engine.http import Call, decode_body
from tidegate.engine.jobs import Job, SharedFields, attended, check_model, new_id, session_of, start


class MessagesBody(SharedFields, kw_only=True):
    messages: list[dict[str, Any]]
    model: str  # required by this API, as is max_tokens
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None


_BODY = msgspec.json.Decoder(MessagesBody)
_STOP_REASON = {"stop": "end_turn", "length": "max_tokens", "abort": None}


async def create(core: EngineCore, call: Call) -> None:
    body: MessagesBody = decode_body(await call.body(), _BODY)
    check_model(core, body.model)
    system = [{"role": "system", "content": body.system}] if body.system else []
    if body.stop_sequences:
        body.stop = body.stop_sequences
    job = start(
        core,
        [tokenizer.encode_chat([*system, *body.messages], body.tools)],
        body.sampling(max_tokens=body.max_tokens, logprobs=None),
        id=new_id("chatcmpl", call.header(b"x-request-id") or body.request_id),
        session=session_of(call, body),
        salt=body.cache_salt,
        priority=body.priority,
        chat=True,
        streaming=bool(body.stream),
    )
    with attended(core, call, job):
        if body.stream:
            await _stream(core, call, job)
        else:
            await job.finished()
            generation = job.generations[0]
            message = _message(core, job)
            message["content"] = [{"type": "text", "text": generation.text_out(0, generation.delivered)}]
            message.update(_ending(generation))
            message["usage"] = _usage(generation)
            await call.json(message)


def _message(core: EngineCore, job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": core.config.served_model_name,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": job.generations[0].prompt_tokens, "output_tokens": 0},
    }


def _ending(generation: Generation) -> dict[str, Any]:
    if generation.finish_reason == "stop" and isinstance(generation.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": generation.stop_reason}
    return {"stop_reason": _STOP_REASON[generation.finish_reason], "stop_sequence": None}


def _usage(generation: Generation) -> dict[str, Any]:
    return {
        "input_tokens": generation.prompt_tokens,
        "output_tokens": generation.delivered,
        "cache_creation_input_tokens": None,
        "cache_read_input_tokens": generation.cached_tokens or 0,
    }


async def _stream(core: EngineCore, call: Call, job: Job) -> None:
    async def event(kind: str, **fields: Any) -> None:
        await call.event({"type": kind, **fields}, name=kind)

    await call.start_events()
    started = False
    async for _, generation, first, end in job.deltas():
        if not started:
            started = True
            await event("message_start", message=_message(core, job))
            await event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        if end > first:
            text = generation.text_out(first, end)
            await event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
    generation = job.generations[0]
    await event("content_block_stop", index=0)
    await event("message_delta", delta=_ending(generation), usage=_usage(generation))
    await event("message_stop")
    await call.write(b"", more=False)
