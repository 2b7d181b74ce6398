"""An engine's KV events, asked for from its replay socket: nothing is missed, however late one asks.

Request: ["", first sequence number]; answers: ["", topic, sequence number, batch]*, closed by sequence number -1. A
batch is msgpack [time, [events], data-parallel rank]; an event is a map (or, in older engines, an array) with its type.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import zmq
import zmq.asyncio

END = (-1).to_bytes(8, "big", signed=True)
TIMEOUT_MS = 20_000


async def events(replay_endpoint: str) -> list[dict[str, Any]]:
    """Every event since the engine started."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(replay_endpoint)
        await socket.send_multipart([b"", (0).to_bytes(8, "big")])
        found: list[dict[str, Any]] = []
        while True:
            assert await socket.poll(TIMEOUT_MS), f"{replay_endpoint} stopped in the middle of a replay"
            *_, sequence, batch = await socket.recv_multipart()
            if sequence == END:
                return found
            found += msgspec.msgpack.decode(batch)[1]


async def stored_blocks(replay_endpoint: str) -> Counter[str]:
    """Blocks stored so far, by session."""
    stored: Counter[str] = Counter()
    for event in await events(replay_endpoint):
        if event["type"] == "BlockStored" and event.get("session_id"):
            stored[event["session_id"]] += len(event["block_hashes"])
    return stored
