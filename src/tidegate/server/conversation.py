"""What a request continues and what its reply adds, as sequences that can be compared (`lineage`).

    ids    /inference/v1/generate token_ids, /v1/completions with a prompt of ids, /generate input_ids; replies:
           token_ids, output_ids
    text   /v1/completions with a prompt of text, /generate text; replies: their text
    chat   /v1/chat/completions and /v1/messages messages, /v1/responses input; replies: the messages that they add

A batch of prompts is nobody's next turn. A message counts by who says what: its text, its calls, and, but for the
model's own, whatever else it has; so one is the same as a reply and as the client sends it back, with or without the
keys that it leaves out, and in one piece or in parts of text. What the model thought is no part of it.
"""

from __future__ import annotations

import contextlib
from array import array
from hashlib import blake2b
from typing import Any

import msgspec

from tidegate.server.lineage import Sequence

CHUNK_BYTES = 1024  # 256 ids: a long prompt costs few hashes, and a rest of a chunk few looks
_DIGEST_BYTES = 16
_THOUGHT = frozenset({"reasoning", "thinking", "redacted_thinking"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_CALLS = frozenset({"function_call", "tool_use"})


class _Body(msgspec.Struct):
    """Of any path; everything else is skipped."""

    token_ids: list[int] | None = None
    input_ids: Any = None
    prompt: Any = None
    text: Any = None
    messages: list[Any] | None = None
    input: Any = None
    system: Any = None
    instructions: Any = None


_decoder = msgspec.json.Decoder(_Body)
_encode = msgspec.json.Encoder(order="deterministic").encode


def prompt_of(path: str, body: bytes) -> Sequence | None:
    """None: nothing that could be gone on with."""
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if path == "/inference/v1/generate":
        return _ids(fields.token_ids)
    if path == "/v1/completions":
        return _ids(fields.prompt) or _text(fields.prompt)
    if path == "/generate":
        return _ids(fields.input_ids) or _text(fields.text)
    if path == "/v1/responses":
        said = [{"role": "user", "content": fields.input}] if isinstance(fields.input, str) else fields.input
        return _chat(said, fields.instructions)
    return _chat(fields.messages, fields.system)


def _ids(ids: Any) -> Sequence | None:
    data = pack_ids(ids)
    return None if data is None else Sequence(b"ids", data, 4, CHUNK_BYTES)


def _text(text: Any) -> Sequence | None:
    return Sequence(b"text", text.encode(), 1, CHUNK_BYTES) if isinstance(text, str) and text else None


def _chat(messages: Any, system: Any) -> Sequence | None:
    if not isinstance(messages, list) or not messages:
        return None
    kind = b"chat" + _encode(system)
    return Sequence(kind, digests(messages), _DIGEST_BYTES, _DIGEST_BYTES, edited=True)


def pack_ids(ids: Any) -> bytes | None:
    """None for what is no list of token ids."""
    if not isinstance(ids, list) or not ids:
        return None
    try:
        return array("I", ids).tobytes()
    except (TypeError, OverflowError):
        return None


# --- messages --------------------------------------------------------------------------------------------------------
def digests(messages: list[Any]) -> bytes:
    """Of each message in turn; one that is only a thought has none."""
    said = (_said(message) for message in messages)
    return b"".join(blake2b(_encode(m), digest_size=_DIGEST_BYTES).digest() for m in said if m is not None)


def _said(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    kind = _kind(message)
    if kind in _THOUGHT:
        return None
    if kind in _CALLS:  # an item of a response's own
        return ["assistant", "", [_call(message)]]
    content = _content(message.get("content"))
    if message.get("role") == "assistant":
        text, calls = content if isinstance(content, tuple) else ("", [content])
        named = message.get("tool_calls")
        return ["assistant", text, [*calls, *map(_call, named if isinstance(named, list) else ())]]
    if isinstance(content, tuple) and not content[1]:
        content = content[0]
    rest = {key: value for key, value in message.items() if key not in ("content", "type") and value is not None}
    return [rest, content]


def _content(content: Any) -> Any:
    """Text and calls; as it is, if there is more in it (images, results of tools)."""
    if content is None or isinstance(content, str):
        return content or "", []
    if not isinstance(content, list):
        return content
    text, calls = "", []
    for part in content:
        kind = _kind(part)
        if kind in _TEXT_PARTS:
            text += str(part.get("text") or "")
        elif kind in _CALLS:
            calls.append(_call(part))
        elif kind not in _THOUGHT:
            return content
    return text, calls


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else None
    return kind if isinstance(kind, str) else ""


def _call(call: Any) -> Any:
    """Name and arguments: ids of calls are made up by whoever needs one."""
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    named = function if isinstance(function, dict) else call
    arguments = named.get("arguments", named.get("input"))
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments)  # clients decode them, and write them down in their own way
    return [named.get("name"), arguments]
