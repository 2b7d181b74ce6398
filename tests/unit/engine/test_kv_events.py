"""KV events as a subscriber sees them: whose blocks are stored, which are lost, and what a gap replays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from tests.unit.engine.conftest import Http, StartEngine

from tidegate.engine.server import EngineServer

RECEIVE_S = 10.0


class Subscriber:
    def __init__(self, context: zmq.asyncio.Context, engine: EngineServer) -> None:
        assert engine.events is not None
        self._engine = engine
        self._context = context
        self._socket = context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(engine.events.endpoint)
        self.topics: set[bytes] = set()
        self.seqs: list[int] = []

    async def joined(self, http: Http) -> None:
        """A subscription takes effect when it has arrived: make events until the first one does."""
        async with asyncio.timeout(RECEIVE_S):
            token = 1_000_000
            while not await self._socket.poll(20):
                token += 1
                await http.post(f"{self._engine.url}/v1/completions", {"prompt": [token] * 16, "max_tokens": 1})
        await asyncio.sleep(0.05)
        while await self._socket.poll(20):
            await self.batch()

    async def batch(self) -> list[dict[str, Any]]:
        async with asyncio.timeout(RECEIVE_S):
            topic, seq, payload = await self._socket.recv_multipart()
        self.topics.add(topic)
        self.seqs.append(int.from_bytes(seq, "big"))
        at, events, rank = msgspec.msgpack.decode(payload)
        assert at > 1e9
        assert rank == 0
        return events

    async def replay(self, first: int) -> list[int]:
        assert self._engine.events is not None
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(self._engine.events.replay_endpoint)
        await dealer.send_multipart([b"", first.to_bytes(8, "big")])
        seqs = []
        async with asyncio.timeout(RECEIVE_S):
            while True:
                _, _, seq, payload = await dealer.recv_multipart()
                number = int.from_bytes(seq, "big", signed=True)
                if number == -1:
                    dealer.close(linger=0)
                    return seqs
                assert msgspec.msgpack.decode(payload)[1]
                seqs.append(number)

    def close(self) -> None:
        self._socket.close(linger=0)


@asynccontextmanager
async def subscribed(engine: EngineServer, http: Http) -> AsyncIterator[Subscriber]:
    context = zmq.asyncio.Context()
    subscriber = Subscriber(context, engine)
    try:
        await subscriber.joined(http)
        yield subscriber
    finally:
        subscriber.close()
        context.term()


async def complete(http: Http, engine: EngineServer, ids: list[int], session: str | None = None, **more: Any) -> Any:
    body = {"prompt": ids, "max_tokens": 1, "ignore_eos": True, **more}
    headers = {} if session is None else {"X-Session-ID": session}
    return (await http.post(f"{engine.url}/v1/completions", body, headers=headers))[1]


async def test_stored_blocks_carry_tokens_parent_and_session(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(kv_events_port=0)
    async with subscribed(engine, http) as subscriber:
        await complete(http, engine, list(range(40)), "s1")
        (first,) = await subscriber.batch()
        await complete(http, engine, list(range(60)), "s1", cache_salt=None)
        (second,) = await subscriber.batch()
    assert first["type"] == second["type"] == "BlockStored"
    assert first["token_ids"] == list(range(32))
    assert second["token_ids"] == list(range(32, 48))
    assert first["parent_block_hash"] is None
    assert second["parent_block_hash"] == first["block_hashes"][1]
    assert first["session_id"] == second["session_id"] == "s1"
    assert (first["block_size"], first["medium"], first["group_idx"]) == (16, "GPU", 0)
    assert subscriber.topics == {f"kv@{engine.url.removeprefix('http://')}@m".encode()}


async def test_generated_blocks_are_stored_too(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(kv_events_port=0)
    async with subscribed(engine, http) as subscriber:
        reply = await complete(http, engine, [7] * 10, "s1", max_tokens=40, return_token_ids=True)
        tokens: list[int] = []
        while len(tokens) < 48:
            for event in await subscriber.batch():
                tokens += event["token_ids"]
    assert tokens == ([7] * 10 + reply["choices"][0]["token_ids"])[:48]


async def test_the_session_is_the_bodys_then_the_headers_then_vllm_xargs(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(kv_events_port=0)
    async with subscribed(engine, http) as subscriber:
        extra = {"vllm_xargs": {"session_id": "xargs"}}
        await complete(http, engine, [1] * 17, "header", session_id="body", **extra)
        await complete(http, engine, [2] * 17, "header", **extra)
        await complete(http, engine, [3] * 17, None, **extra)
        await complete(http, engine, [4] * 17, None)
        events = [(await subscriber.batch())[0] for _ in range(4)]
    assert [event.get("session_id") for event in events] == ["body", "header", "xargs", None]


async def test_a_cache_salt_is_told_and_keeps_prefixes_apart(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(kv_events_port=0)
    async with subscribed(engine, http) as subscriber:
        await complete(http, engine, [1] * 40, cache_salt="v1")
        other = await complete(http, engine, [1] * 40, cache_salt="v2")
        one, two = [(await subscriber.batch())[0] for _ in range(2)]
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert one["extra_keys"] == [["v1"], None]
    assert set(one["block_hashes"]).isdisjoint(two["block_hashes"])


async def test_what_is_stored_and_not_removed_is_what_the_cache_finds(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(kv_events_port=0, kv_tokens=1024, max_model_len=512)
    resident: dict[int, int] = {}
    async with subscribed(engine, http) as subscriber:
        # What was published before we listened belongs to the cache as well.
        for turn in range(12):
            await complete(http, engine, [turn] * 300, f"s{turn}", max_tokens=20)
        assert engine.events is not None
        while subscriber.seqs[-1] < engine.events._seq - 1:
            for event in await subscriber.batch():
                change = 1 if event["type"] == "BlockStored" else -1
                for block_hash in event["block_hashes"]:
                    resident[block_hash] = resident.get(block_hash, 0) + change
    held = {block_hash for block_hash, count in resident.items() if count > 0}
    pool = engine.core.replica.pool
    assert held == {int.from_bytes(block_hash, "big") for block_hash in pool._found}  # type: ignore[arg-type]
    assert pool.evictions > 0


async def test_a_reset_is_published_with_the_next_request(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(kv_events_port=0)
    async with subscribed(engine, http) as subscriber:
        await http.post(f"{engine.url}/reset_prefix_cache")
        await complete(http, engine, [1] * 17)
        events = await subscriber.batch()
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]


async def test_replay_gives_all_kept_batches_from_a_sequence_number(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(kv_events_port=0, kv_events_replay_port=0)
    async with subscribed(engine, http) as subscriber:
        for number in range(5):
            await complete(http, engine, [number] * 17)
        while len(subscriber.seqs) < 5 or subscriber.seqs[-1] < engine.events._seq - 1:  # type: ignore[union-attr]
            await subscriber.batch()
        last = subscriber.seqs[-1]
        assert await subscriber.replay(last - 2) == [last - 2, last - 1, last]
        assert await subscriber.replay(0) == list(range(last + 1))
        assert await subscriber.replay(last + 1) == []
        first = subscriber.seqs[0]
        assert subscriber.seqs == list(range(first, last + 1))


async def test_sources_are_described(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(kv_events_port=0, kv_events_replay_port=0)
    _, sources = await http.get(f"{engine.url}/kv_event_sources")
    assert sources["0"]["endpoint"] == engine.events.endpoint  # type: ignore[union-attr]
    assert sources["0"]["replay_endpoint"] == engine.events.replay_endpoint  # type: ignore[union-attr]
    quiet = await start_engine()
    assert await http.get(f"{quiet.url}/kv_event_sources") == (200, {})
