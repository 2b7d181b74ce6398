"""A gate on embedded engines, all in this process, and how to ask it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from tidegate.config.engines import EnginesConfig
from tidegate.config.server import ServerConfig
from tidegate.config.tree import Config
from tidegate.policy.params import CoreParams
from tidegate.server.gate import Gate

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing answers
QUICK = EnginesConfig(scrape_period_s=0.05, health_period_s=0.1, health_timeout_s=2.0, kv_events="off")


def config(*urls: str, policy: str = "sticky_least_loaded", **sections: Any) -> Config:
    server = msgspec.structs.replace(sections.pop("server", ServerConfig()), worker_urls=urls, port=0)
    return Config(
        policy=policy,
        server=server,
        engines=sections.pop("engines", QUICK),
        core=sections.pop("core", CoreParams(tick_s=0.05)),
        **sections,
    )


async def call(client: aiohttp.ClientSession, gate: Gate, method: str, path: str, **arguments: Any) -> tuple[int, Any]:
    async with client.request(method, gate.url + path, **arguments) as reply:
        text = await reply.text()
        return reply.status, json.loads(text) if "json" in reply.content_type else text


async def complete(client: aiohttp.ClientSession, gate: Gate, session: str | None, **headers: str) -> int:
    named = {"X-Session-ID": session} if session else {}
    body = {"model": "tidegate", "prompt": "hello", "max_tokens": 2}
    status, _ = await call(client, gate, "POST", "/v1/completions", json=body, headers={**named, **headers})
    return status


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            if true():
                return
            await asyncio.sleep(0.01)


def state(gate: Gate) -> Any:
    return json.loads(msgspec.json.encode(gate.state()))
