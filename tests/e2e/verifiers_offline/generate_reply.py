"""Lets the train client read vLLM 0.32's replies.

In the logprobs of /inference/v1/generate a sampled token is `"token_id": 7` there, where renderers 0.1.12, which the
client uses, expects `"token": "token_id:7"`. Imported, this reads both; requests and all else stay stock.
"""

from __future__ import annotations

from typing import Any

from renderers import client

_parse = client.parse_generate_response


def parse_generate_response(raw: bytes) -> dict[str, Any]:
    reply = _parse(raw)
    for choice in reply.get("choices") or []:
        for sampled in (choice.get("logprobs") or {}).get("content") or []:
            if "token_id" in sampled:
                sampled.setdefault("token", f"token_id:{sampled['token_id']}")
    return reply


client.parse_generate_response = parse_generate_response
