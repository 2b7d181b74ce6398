"""/v1/responses: text in, text out; streamed as OpenAI's typed events."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import field

from tidegate.engine import tokenizer
from tidegate.engine.core import EngineCore
from tidegate.engine.http import Call, decode_body
from tidegate.engine.jobs import Job, SharedFields, attended, check_model, new_id, session_of, start


class ResponsesBody(SharedFields, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, str] | None = None
    top_p: float | None = None
    user: str | None = None


_BODY = msgspec.json.Decoder(ResponsesBody)


async def create(core: EngineCore, call: Call) -> None:
    body: ResponsesBody = decode_body(await call.body(), _BODY)
    check_model(core, body.model)
    job = start(
        core,
        [tokenizer.encode_chat(_messages(body), body.tools)],
        body.sampling(max_tokens=body.max_output_tokens, logprobs=None),
        id=new_id("resp", body.request_id).replace("-", "_", 1),
        session=session_of(call, body),
        salt=body.cache_salt,
        priority=body.priority,
        chat=True,
        streaming=bool(body.stream),
    )
    with attended(core, call, job):
        if body.stream:
            await _stream(core, call, body, job)
        else:
            await job.finished()
            await call.json(_response(core, body, job))


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Items without a role (tool calls and their outputs) become messages of their type."""
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        if "role" in item:
            messages.append({"role": item["role"], "content": _content(item.get("content"))})
        else:
            rest = {key: value for key, value in item.items() if key not in ("id", "status")}
            messages.append({"role": str(item.get("type", "item")), "content": rest})  # type: ignore[dict-item]
    return messages


def _content(content: Any) -> Any:
    """Output parts of an earlier response carry annotations: only their text is the conversation."""
    if not isinstance(content, list):
        return content
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))


def _response(core: EngineCore, body: ResponsesBody, job: Job, *, status: str | None = None) -> dict[str, Any]:
    generation = job.generations[0]
    usage = job.usage()
    if status is None:
        status = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}[generation.finish_reason]
    done = generation.done
    return {
        "id": job.id,
        "created_at": job.created,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.instructions,
        "metadata": body.metadata,
        "model": core.config.served_model_name,
        "object": "response",
        "output": [_item(job, generation.text_out(0, generation.delivered))] if done else [],
        "parallel_tool_calls": True,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "tool_choice": "auto",
        "tools": body.tools,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "background": False,
        "max_output_tokens": body.max_output_tokens,
        "previous_response_id": None,
        "service_tier": "auto",
        "status": status,
        "truncation": "disabled",
        "user": body.user,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": generation.cached_tokens or 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        if done
        else None,
    }


def _item(job: Job, text: str, *, status: str = "completed") -> dict[str, Any]:
    return {
        "id": f"msg_{job.id[5:]}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_part(text)] if status == "completed" else [],
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


async def _stream(core: EngineCore, call: Call, body: ResponsesBody, job: Job) -> None:
    sequence = 0
    item_id = f"msg_{job.id[5:]}"
    place = {"item_id": item_id, "output_index": 0, "content_index": 0}

    async def event(kind: str, **fields: Any) -> None:
        nonlocal sequence
        await call.event({"type": kind, "sequence_number": sequence, **fields}, name=kind)
        sequence += 1

    await call.start_events()
    await event("response.created", response=_response(core, body, job, status="in_progress"))
    await event("response.in_progress", response=_response(core, body, job, status="in_progress"))
    await event("response.output_item.added", output_index=0, item=_item(job, "", status="in_progress"))
    await event("response.content_part.added", **place, part=_part(""))
    async for _, generation, first, end in job.deltas():
        if end > first:
            await event("response.output_text.delta", **place, delta=generation.text_out(first, end), logprobs=[])
    text = job.generations[0].text_out(0, job.generations[0].delivered)
    await event("response.output_text.done", **place, text=text, logprobs=[])
    await event("response.content_part.done", **place, part=_part(text))
    await event("response.output_item.done", output_index=0, item=_item(job, text))
    await event("response.completed", response=_response(core, body, job))  # vLLM says so of incomplete ones too
    await call.write(b"", more=False)
