"""What the engine says about itself: models, health, tokenization."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec import Struct

from tidegate import __version__
from tidegate.engine import tokenizer
from tidegate.engine.core import EngineCore
from tidegate.engine.http import Call, Refusal, decode_body
from tidegate.engine.jobs import check_model

_STARTED = int(time.time())


async def models(core: EngineCore, call: Call) -> None:
    name = core.config.served_model_name
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": _STARTED,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "tidegate",
        "root": name,
        "parent": None,
        "max_model_len": core.config.model_len,
        "permission": [permission],
    }
    await call.json({"object": "list", "data": [card]})


async def health(core: EngineCore, call: Call) -> None:
    """200 as long as the engine lives, also while it drains."""
    await call.raw(200 if core.alive else 503, b"")


async def version(core: EngineCore, call: Call) -> None:
    await call.json({"version": f"{__version__}+tidegate"})


class _TokenizeBody(Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class _DetokenizeBody(Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


_TOKENIZE = msgspec.json.Decoder(_TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(_DetokenizeBody)


async def tokenize(core: EngineCore, call: Call) -> None:
    body: _TokenizeBody = decode_body(await call.body(), _TOKENIZE)
    check_model(core, body.model)
    if body.messages is not None:
        packed = tokenizer.encode_chat(body.messages, body.tools, generate=body.add_generation_prompt)
    elif body.prompt is not None:
        packed = tokenizer.encode(body.prompt)
    else:
        raise Refusal("either prompt or messages is required", param="prompt")
    ids = tokenizer.unpack(packed)
    strings = [tokenizer.decode([id], special=True) for id in ids] if body.return_token_strs else None
    await call.json({"count": len(ids), "max_model_len": core.config.model_len, "tokens": ids, "token_strs": strings})


async def detokenize(core: EngineCore, call: Call) -> None:
    body: _DetokenizeBody = decode_body(await call.body(), _DETOKENIZE)
    check_model(core, body.model)
    if any(id < 0 for id in body.tokens):
        raise Refusal("token ids must not be negative", param="tokens")
    await call.json({"prompt": tokenizer.decode(body.tokens)})


ROUTES = {
    ("GET", "/v1/models"): models,
    ("GET", "/health"): health,
    ("GET", "/ping"): health,
    ("POST", "/ping"): health,
    ("GET", "/version"): version,
    ("POST", "/tokenize"): tokenize,
    ("POST", "/detokenize"): detokenize,
}
