"""KV events over ZMQ, as vLLM publishes them.

PUB socket: frames (topic, 8-byte big-endian sequence number, payload). ROUTER socket for replay: a DEALER sends
("", 8-byte start sequence) and gets ("", topic, sequence, payload) for each kept batch from there on, and at the end
("", "", -1, ""). A payload is msgpack [unix time, [event maps], data parallel rank]; a map's `type` names the event.

Everything happens on the event loop's thread: PUB never blocks, and the ROUTER is served when its descriptor wakes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from tidegate.engine.generation import Generation
from tidegate.sim.blocks import BlockEvent, BlockHash, BlockRemoved, BlocksStored

BUFFER_STEPS = 10_000  # batches kept for replay: vLLM's default
_HWM = 100_000  # messages queued for a slow subscriber: vLLM's default
_END = (-1).to_bytes(8, "big", signed=True)


class KvEventPublisher:
    def __init__(self, *, host: str, port: int, replay_port: int | None, block_size: int, topic: str = "") -> None:
        self._block_size = block_size
        self._topic = topic.encode()
        self._encode = msgspec.msgpack.Encoder().encode
        self._seq = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_STEPS)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(_HWM)
        self.endpoint = _bind(self._pub, host, port)
        self._router: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        if replay_port is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.set_hwm(0)  # a replay is as long as it is
            self.replay_endpoint = _bind(self._router, host, replay_port)
            self._loop = asyncio.get_running_loop()
            self._descriptor = int(self._router.getsockopt(zmq.FD))
            self._loop.add_reader(self._descriptor, self._serve_replay)

    def describe(self) -> dict[str, Any]:
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": BUFFER_STEPS,
            "hwm": _HWM,
            "max_queue_size": 100_000,
            "topic": self._topic.decode(),
        }

    def close(self) -> None:
        if self._router is not None:
            self._loop.remove_reader(self._descriptor)
            self._router.close(linger=0)
        self._pub.close(linger=0)
        self._context.term()

    # --- publishing -------------------------------------------------------------------------------------------
    def publish(self, events: list[BlockEvent], generations: dict[str, Generation]) -> None:
        payload = self._encode([time.time(), [self._map(event, generations) for event in events], 0])
        seq, self._seq = self._seq, self._seq + 1
        self._kept.append((seq, payload))
        self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))
        if self._router is not None:
            self._serve_replay()  # its descriptor is edge-triggered: look once more while we are here

    def _map(self, event: BlockEvent, generations: dict[str, Generation]) -> dict[str, Any]:
        if isinstance(event, BlocksStored):
            return self._stored(event, generations[event.request])
        if isinstance(event, BlockRemoved):
            return {"type": "BlockRemoved", "block_hashes": [_number(event.hash)], "medium": "GPU", "group_idx": 0}
        return {"type": "AllBlocksCleared"}

    def _stored(self, event: BlocksStored, generation: Generation) -> dict[str, Any]:
        blocks = len(event.hashes)
        extra: list[list[str] | None] = [None] * blocks
        if event.first == 0 and generation.salt is not None:
            extra[0] = [generation.salt]
        shape: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [_number(block_hash) for block_hash in event.hashes],
            "parent_block_hash": None if event.parent is None else _number(event.parent),
            "token_ids": generation.block_tokens(event.first, blocks),
            "block_size": self._block_size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": extra,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        if event.session is not None:
            shape["session_id"] = event.session
        return shape

    # --- replay -----------------------------------------------------------------------------------------------
    def _serve_replay(self) -> None:
        router = self._router
        assert router is not None
        while int(router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frames = router.recv_multipart()
            if len(frames) != 3:
                continue  # vLLM ignores it too
            client, _, start = frames
            first = int.from_bytes(start, "big")
            for seq, payload in self._kept:
                if seq >= first:
                    router.send_multipart((client, b"", self._topic, seq.to_bytes(8, "big"), payload))
            router.send_multipart((client, b"", b"", _END, b""))


def _bind(socket: zmq.Socket[bytes], host: str, port: int) -> str:
    """The endpoint that others can connect to."""
    if port == 0:
        port = socket.bind_to_random_port(f"tcp://{host}")
    else:
        socket.bind(f"tcp://{host}:{port}")
    return f"tcp://{host}:{port}"


def _number(block_hash: BlockHash) -> int:
    assert isinstance(block_hash, bytes)
    return int.from_bytes(block_hash, "big")
