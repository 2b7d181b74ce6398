"""Both wire formats of KV events, and what engines put into them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidegate.engines.kv_wire import AllBlocksCleared, BlockRemoved, BlockStored, decode

DATA = Path(__file__).parents[2] / "data" / "engines"


def wire(*events: Any, rank: int = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def test_a_recorded_stream_decodes_whole() -> None:
    counts = {BlockStored: 0, BlockRemoved: 0, AllBlocksCleared: 0}
    sessions = set()
    for line in (DATA / "kv_events_vllm.jsonl").read_text().splitlines():
        for event in decode(msgspec.msgpack.encode(json.loads(line)["payload"])).events:
            counts[type(event)] += 1
            if isinstance(event, BlockStored):
                assert event.block_size == 32
                assert event.full_attention
                sessions.add(event.session_id)
    assert counts == {BlockStored: 50, BlockRemoved: 386, AllBlocksCleared: 3}
    assert {"s0", "s1", "s2", "s3", "s100", "s205"} <= sessions


def test_maps_and_arrays_say_the_same() -> None:
    stored = {
        "type": "BlockStored",
        "block_hashes": [7, 8],
        "parent_block_hash": 6,
        "token_ids": [1, 2],
        "block_size": 16,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "extra_keys": None,
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 128,
        "locality": "LOCAL",
        "ownership": None,
        "session_id": "s",
    }
    as_array = [stored["type"], *[value for name, value in stored.items() if name != "type"]]
    removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0}
    maps = decode(wire(stored, removed, {"type": "AllBlocksCleared"}))
    arrays = decode(wire(as_array, ["BlockRemoved", [7], "GPU", 0], ["AllBlocksCleared"]))
    assert maps == arrays
    event = maps.events[0]
    assert isinstance(event, BlockStored)
    assert (event.session_id, event.group_idx, event.medium, event.full_attention) == ("s", 1, "CPU", False)


def test_the_shortest_arrays_of_old_releases_are_read() -> None:
    stored, removed = decode(wire(["BlockStored", [1], None, [5, 6], 2, None], ["BlockRemoved", [1]])).events
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash, stored.block_size, stored.medium) == ([1], None, 2, None)
    assert isinstance(removed, BlockRemoved)
    assert removed.medium is None


def test_sglang_arrays_carry_the_session_after_the_salt() -> None:
    (stored,) = decode(wire(["BlockStored", [1], None, [5], 1, None, "GPU", "salt", "s1", None])).events
    assert isinstance(stored, BlockStored)
    assert stored.session_id == "s1"
    assert stored.group_idx is None


def test_a_batch_without_a_rank_is_read() -> None:
    assert decode(msgspec.msgpack.encode([1.0, []])).events == []


def test_hashes_may_be_bytes() -> None:
    (stored,) = decode(wire({"type": "BlockStored", "block_hashes": [b"\x01" * 32], "block_size": 16})).events
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [b"\x01" * 32]


@pytest.mark.parametrize("unknown", [{"type": "BlockMoved", "x": 1}, ["BlockMoved", 1], [], {}])
def test_events_of_unknown_types_are_passed_over(unknown: Any) -> None:
    events = decode(wire(unknown, {"type": "BlockRemoved", "block_hashes": [1]}, ["AllBlocksCleared"])).events
    assert [type(event) for event in events] == [BlockRemoved, AllBlocksCleared]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"events": []}),
        msgspec.msgpack.encode([1.0]),
        wire({"type": "BlockStored"}),
        wire(["BlockStored", "no hashes"]),
    ],
)
def test_what_is_no_batch_is_an_error(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(payload)
