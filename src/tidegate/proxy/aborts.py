"""A reply that says "aborted" before it says anything: what vLLM answers, with status 200, to a NEW request while it
drains (SIGTERM with a shutdown timeout). Taken for a result, it would be an empty sample in the training data.

    chat, completions   finish_reason "abort", no text, no ids, no tool calls
    any event stream    `[DONE]` before anything generated; the usage may come before it
    generate            finish_reason "abort", no token_ids
    responses           status "cancelled", no output
    messages            stop_reason null in a finished message, no content

A prompt that has yet to be tokenized, chat among them, gets status 500 instead, and so does every request that vLLM's
HTTP server still has when its engine has ended, or died: `turned_away` knows both.

SGLang's abort object ({"type": "abort"}) answers only a client's own abort call, so it is never a reason to retry.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

Sight: TypeAlias = Literal["empty", "content", "abort"]
"""What a part of a reply shows: nothing yet, something generated (or anything unknown), or an abort without any."""

# Substrings that every empty abort has: most replies are cleared by their absence, without being decoded.
_SIGNS: dict[str, tuple[bytes, ...]] = {
    "/v1/responses": (b'"cancelled"',),
    "/v1/messages": (b'"stop_reason":null', b'"stop_reason": null'),
}
_DEFAULT_SIGNS = (b'"abort"',)


_GONE = (
    "cannot schedule new futures after shutdown",  # the tokenizer's threads have ended before the HTTP server
    "EngineCore encountered an issue. See stack trace (above) for the root cause.",  # the engine's process has
)
_GONE_SIGNS = tuple(message.encode() for message in _GONE)


def turned_away(error_body: bytes) -> bool:
    """Of a reply with status 500: whether vLLM says that it has ended, or is about to."""
    if not any(sign in error_body for sign in _GONE_SIGNS):
        return False
    try:
        reply = msgspec.json.decode(error_body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    error = reply.get("error") if isinstance(reply, dict) else None
    return isinstance(error, dict) and error.get("message") in _GONE


def whole_reply(path: str, body: bytes) -> Sight:
    if not any(sign in body for sign in _SIGNS.get(path, _DEFAULT_SIGNS)):
        return "content"
    try:
        reply = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "content"
    if not isinstance(reply, dict):
        return "content"
    if path == "/v1/responses":
        return "abort" if reply.get("status") == "cancelled" and not _texts(reply.get("output")) else "content"
    if path == "/v1/messages":
        ended = reply.get("type") == "message" and reply.get("stop_reason") is None
        return "abort" if ended and not _texts(reply.get("content")) else "content"
    return _choices(reply)


def stream_start(path: str, data: bytes) -> Sight:
    """Of an event stream's first bytes: `abort` once it is certain, `empty` while only preambles have come."""
    for block in data.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:  # the last one is not whole
        sight = _event(path, block)
        if sight != "empty":
            return sight
    return "empty"


def _event(path: str, block: bytes) -> Sight:
    lines = [line for line in block.split(b"\n") if not line.startswith(b"event:")]
    if len(lines) != 1 or not lines[0].startswith(b"data:"):
        return "content"  # comments and pings keep a connection alive: they must not be kept back
    if lines[0][5:].strip() == b"[DONE]":
        return "abort"
    try:
        event = msgspec.json.decode(lines[0][5:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "content"
    if not isinstance(event, dict):
        return "content"
    if path == "/v1/messages":
        return _message_event(event)
    if path == "/v1/responses":
        return _response_event(event)
    if event.get("choices") == []:
        return "empty"  # usage alone
    return _choices(event)


def _message_event(event: dict[str, Any]) -> Sight:
    kind = event.get("type")
    if kind == "message_delta":
        delta = event.get("delta")
        return "abort" if isinstance(delta, dict) and delta.get("stop_reason") is None else "content"
    if kind in ("message_start", "content_block_stop"):
        return "empty"
    if kind == "content_block_start":
        return "content" if _texts(event.get("content_block")) else "empty"
    return "content"


def _response_event(event: dict[str, Any]) -> Sight:
    if event.get("type") in ("response.created", "response.in_progress"):
        return "empty"
    response = event.get("response")
    if isinstance(response, dict) and response.get("status") == "cancelled" and not _texts(response.get("output")):
        return "abort"
    return "content"


def _choices(reply: dict[str, Any]) -> Sight:
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices:
        return "content"
    reasons = set()
    for choice in choices:
        if not isinstance(choice, dict) or any(_texts(choice.get(key)) for key in _GENERATED):
            return "content"
        reasons.add(choice.get("finish_reason"))
    if reasons == {"abort"}:
        return "abort"
    return "empty" if reasons == {None} else "content"


_GENERATED = ("text", "message", "delta", "token_ids", "logprobs")
_NOT_GENERATED = frozenset({"role", "type", "id", "index", "status"})


def _texts(value: Any) -> bool:
    """Whether there is any generated thing in it: a non-empty string, an id, a call."""
    if isinstance(value, dict):
        return any(_texts(inner) for key, inner in value.items() if key not in _NOT_GENERATED)
    if isinstance(value, list):
        return any(_texts(inner) for inner in value)
    return value not in (None, "", False)
