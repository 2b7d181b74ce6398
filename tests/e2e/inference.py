"""Requests for every inference path of an engine, and how to compare what comes back."""

from __future__ import annotations

import json
import random
import re
from typing import Any

MODEL = "m"
TEXT = "kalo mine tavi"
SAMPLING: dict[str, Any] = {"temperature": 0, "seed": 7}
MESSAGES = [{"role": "user", "content": TEXT}]


def token_ids(count: int, seed: int | str) -> list[int]:
    """A prompt of exactly that many tokens; another seed, another prompt from its first token on."""
    rng = random.Random(f"prompt {seed}")
    return [rng.randrange(5, 2000) for _ in range(count)]


def completion(prompt: str | list[int], max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **SAMPLING, **more}


def chat(content: str = TEXT, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, **SAMPLING, **more}


LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", chat(**LOGPROBS)),
    "completions-text": ("/v1/completions", completion(TEXT, 8, logprobs=2, return_token_ids=True)),
    "completions-ids": ("/v1/completions", completion(token_ids(20, 1), 8, logprobs=2, return_token_ids=True)),
    "responses": ("/v1/responses", {"model": MODEL, "input": TEXT, "max_output_tokens": 8, "temperature": 0}),
    "messages": ("/v1/messages", {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}),
    "inference-generate": (
        "/inference/v1/generate",
        {"token_ids": token_ids(20, 2), "sampling_params": {"max_tokens": 8, "logprobs": 2, **SAMPLING}},
    ),
}
STREAMED = ("chat", "completions-text", "completions-ids", "responses", "messages")


def encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


_VARYING = re.compile(
    rb'("(?:created|created_at|completed_at)"\s*:\s*)[0-9.]+'  # when
    rb'|("(?:id|item_id|request_id)"\s*:\s*")[^"]*(?=")'  # which request: the engine draws a new id for each
)


def masked(body: bytes) -> bytes:
    """The body without its timestamps and generated ids: all else must be equal byte for byte."""
    return _VARYING.sub(lambda match: match[1] + b"0" if match[1] else match[2] + b"*", body)


END_TO_END_HEADERS = ("content-type", "content-length", "transfer-encoding", "vary", "cache-control")


def kept(headers: Any) -> dict[str, list[str]]:
    """The headers of a reply that do not depend on when and by whom it was sent."""
    return {name: headers.getall(name, []) for name in END_TO_END_HEADERS}
