"""What a reply adds to its prompt, from the bytes that passed: of whole replies and of event streams, for each choice.

Streams come in pieces of text, of ids or of calls, which are put together again by choice; of a response or a message
of the newer APIs by their own events. A reply that cannot be read adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tidegate.server.conversation import digests, pack_ids

_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def replies_of(path: str, kind: bytes, body: bytes) -> list[bytes]:
    """In the terms of a prompt of this kind. Empty: nothing could be read."""
    try:
        whole = msgspec.json.decode(body) if body[:1] == b"{" else _whole(path, list(_events(body)))
        return [reply for reply in _replies(path, kind, whole) if reply]
    except (*_DECODE_ERRORS, AttributeError, TypeError, LookupError, ValueError):  # shapes that nobody foresaw
        return []


def _replies(path: str, kind: bytes, whole: dict[str, Any]) -> Iterator[bytes]:
    if path == "/v1/responses":
        yield digests(whole["output"])
    elif path == "/v1/messages":
        yield digests([{"role": "assistant", "content": whole["content"]}])
    elif path == "/generate":
        yield (pack_ids(whole.get("output_ids")) or b"") if kind == b"ids" else str(whole["text"]).encode()
    else:
        for choice in whole["choices"]:
            if kind == b"ids":
                yield pack_ids(choice.get("token_ids")) or b""
            elif kind == b"text":
                yield str(choice["text"]).encode()
            else:
                yield digests([{**choice["message"], "role": "assistant"}])


# --- streams ---------------------------------------------------------------------------------------------------------
def _events(body: bytes) -> Iterator[dict[str, Any]]:
    for line in body.splitlines():
        if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
            try:
                event = msgspec.json.decode(line[5:])
            except _DECODE_ERRORS:
                return  # cut short: what came before it counts
            if isinstance(event, dict):
                yield event


def _whole(path: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """The reply as it would have come without a stream, as far as it matters here."""
    if path == "/v1/responses":
        done = [event["response"] for event in events if event.get("type") == "response.completed"]
        return done[-1] if done else {}
    if path == "/v1/messages":
        return {"content": _blocks(events)}
    if path == "/generate":
        return events[-1]  # each has all that was generated so far
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event.get("choices") or ():
            _add(choices.setdefault(part.get("index", 0), {"text": "", "token_ids": [], "message": {}}), part)
    return {"choices": [choices[index] for index in sorted(choices)]}


def _add(choice: dict[str, Any], part: dict[str, Any]) -> None:
    choice["text"] += part.get("text") or ""
    choice["token_ids"] += part.get("token_ids") or []
    delta = part.get("delta") or {}
    message = choice["message"]
    message["content"] = message.get("content", "") + (delta.get("content") or "")
    calls = message.setdefault("tool_calls", [])
    for call in delta.get("tool_calls") or ():
        while len(calls) <= call["index"]:
            calls.append({"name": "", "arguments": ""})
        function = call.get("function") or {}
        for key in ("name", "arguments"):
            calls[call["index"]][key] += function.get(key) or ""


def _blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.get("type") == "content_block_start":
            blocks[event["index"]] = {**event["content_block"]}
        elif event.get("type") == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            if delta["type"] == "text_delta":
                block["text"] = block.get("text", "") + delta["text"]
            elif delta["type"] == "input_json_delta":
                before = block.get("input")
                block["input"] = (before if isinstance(before, str) else "") + delta["partial_json"]
    return [blocks[index] for index in sorted(blocks)]
