"""KV events as engines send them: ZMQ frames [topic, sequence number (8 bytes, big-endian), payload], the payload
msgpack [timestamp, events, data-parallel rank].

Events are tagged maps ({"type": "BlockStored", ...}: vLLM 0.32 and later, SGLang 0.5.23) or tagged arrays
(["BlockStored", ...], fields by position: older releases of both). Token ids and hash keys are skipped, not decoded:
they are nine tenths of the bytes. Events of unknown types are passed over; engines add some.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

BlockHash: TypeAlias = int | bytes

_FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """Blocks that now are in a medium's cache, each the child of the one before it. Also sent, by choice of the
    request, for blocks that were found in the cache."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None = None
    block_size: int = 0  # tokens
    medium: str | None = None  # None: GPU
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None
    locality: str | None = None

    @property
    def full_attention(self) -> bool:
        return self.kv_cache_spec_kind is None or self.kv_cache_spec_kind in _FULL_ATTENTION


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    remaining_copy_counts: list[int] | None = None  # of each hash; absent: none remains


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, gc=False):
    ts_s: float  # the engine's wall clock
    events: list[KvEvent]


class _MapBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[KvEvent]


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: Any = None
    medium: Any = None
    extra: Any = None  # vLLM: lora_name; SGLang: cache_salt
    extra_keys: Any = None  # SGLang: session_id
    group_idx: Any = None  # SGLang: lora_name
    kv_cache_spec_kind: Any = None
    sliding_window: Any = None
    locality: Any = None
    ownership: Any = None
    session_id: Any = None

    def event(self) -> BlockStored:
        session = self.session_id if isinstance(self.session_id, str) else self.extra_keys
        return BlockStored(
            block_hashes=self.block_hashes,
            parent_block_hash=self.parent_block_hash,
            block_size=self.block_size,
            medium=_text(self.medium),
            group_idx=_number(self.group_idx),
            kv_cache_spec_kind=_text(self.kv_cache_spec_kind),
            session_id=_text(session),
            locality=_text(self.locality),
        )


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: list[BlockHash]
    medium: Any = None
    group_idx: Any = None
    locality: Any = None

    def event(self) -> BlockRemoved:
        return BlockRemoved(
            block_hashes=self.block_hashes,
            medium=_text(self.medium),
            group_idx=_number(self.group_idx),
            locality=_text(self.locality),
        )


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    def event(self) -> AllBlocksCleared:
        return AllBlocksCleared()


_map_batch = msgspec.msgpack.Decoder(_MapBatch)
_raw_batch = msgspec.msgpack.Decoder(_RawBatch)
_map_event = msgspec.msgpack.Decoder(KvEvent)
_array_event = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_any_event = msgspec.msgpack.Decoder()


def decode(payload: bytes) -> Batch:
    """msgspec.DecodeError when it is no batch, or a known event lacks what it must have."""
    try:
        batch = _map_batch.decode(payload)
        return Batch(batch.ts, batch.events)
    except msgspec.ValidationError:
        raw = _raw_batch.decode(payload)
    events = []
    for part in raw.events:
        event = _decode_event(bytes(part))
        if event is not None:
            events.append(event)
    return Batch(raw.ts, events)


def _decode_event(part: bytes) -> KvEvent | None:
    is_map = part[0] >> 4 == 0x8 or part[0] in (0xDE, 0xDF)
    try:
        return _map_event.decode(part) if is_map else _array_event.decode(part).event()
    except msgspec.ValidationError:
        decoded = _any_event.decode(part)
        name = decoded.get("type") if isinstance(decoded, dict) else decoded[0] if decoded else None
        if name in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
            raise
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None
