"""Sessions as a trainer drives them: turns whose prompts grow, through a gate."""

from __future__ import annotations

from typing import Any

import aiohttp
from tests.e2e.inference import completion, encode, token_ids

JSON = {"Content-Type": "application/json"}


async def turn(
    client: aiohttp.ClientSession,
    base: str,
    session: str | None,
    prompt: list[int] | None = None,
    max_tokens: int = 4,
    workload: str | None = None,
    **body: Any,
) -> Any:
    """One request of a session, which must succeed."""
    status, _, reply = await attempt(client, base, session, prompt, max_tokens, workload, **body)
    assert status == 200, reply
    return reply


async def attempt(
    client: aiohttp.ClientSession,
    base: str,
    session: str | None,
    prompt: list[int] | None = None,
    max_tokens: int = 4,
    workload: str | None = None,
    **body: Any,
) -> tuple[int, Any, Any]:
    headers = dict(JSON)
    if session is not None:
        headers["X-Session-ID"] = session
    if workload is not None:
        headers["X-Workload-Class"] = workload
    data = encode(completion(prompt or token_ids(64, session or "none"), max_tokens, **body))
    async with client.post(f"{base}/v1/completions", data=data, headers=headers) as reply:
        return reply.status, reply.headers, await reply.json()


async def rollout(
    client: aiohttp.ClientSession, base: str, session: str, turns: int, workload: str | None = None
) -> list[dict[str, Any]]:
    """Each turn's prompt is the one before, its reply, and what the environment said."""
    prompt = token_ids(64, session)
    replies = []
    for number in range(turns):
        reply = await turn(client, base, session, prompt, 8, workload, return_token_ids=True)
        replies.append(reply)
        prompt = [*prompt, *reply["choices"][0]["token_ids"], *token_ids(32, f"{session} {number}")]
    return replies


async def finish(client: aiohttp.ClientSession, base: str, session: str) -> None:
    async with client.post(f"{base}/finish_session", params={"session_id": session}) as reply:
        assert reply.status == 200
