"""Rules of residency that the naive twin does not cover: media, groups, recorded streams, memory."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from tidegate.engines.kv_wire import AllBlocksCleared, BlockRemoved, BlockStored, decode
from tidegate.engines.residency import Residency

DATA = Path(__file__).parents[2] / "data" / "engines"


def stored(
    hashes: list[int],
    parent: int | None = None,
    session: str | None = None,
    *,
    medium: str | None = "GPU",
    group: int | None = None,
    kind: str | None = None,
    locality: str | None = None,
) -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=parent,
        block_size=16,
        medium=medium,
        group_idx=group,
        kv_cache_spec_kind=kind,
        session_id=session,
        locality=locality,
    )


def removed(hashes: list[int], **fields: object) -> BlockRemoved:
    return msgspec.convert({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", **fields}, BlockRemoved)


def residency_of(*events: BlockStored | BlockRemoved | AllBlocksCleared) -> Residency:
    residency = Residency(10**6)
    residency.apply(events)
    return residency


def test_a_hit_is_counted_by_the_parents_of_what_comes_after_it() -> None:
    residency = residency_of(stored([1, 2, 3], session="a"), stored([4], parent=3, session="b"))
    assert residency.session_tokens() == {"a": 48, "b": 64}
    assert residency.resident_tokens == 64


def test_a_hit_of_part_of_another_session_counts_that_part() -> None:
    residency = residency_of(stored([1, 2, 3], session="a"), stored([4], parent=2, session="b"))
    assert residency.session_tokens() == {"a": 48, "b": 48}


def test_an_event_for_blocks_that_are_there_changes_only_their_owners() -> None:
    residency = residency_of(stored([1, 2], session="a"), stored([3], session="b"), stored([1, 2], session="b"))
    assert residency.resident_tokens == 48
    assert residency.session_tokens() == {"a": 32, "b": 48}


def test_a_session_is_forgotten_with_the_last_block_that_it_stored() -> None:
    residency = residency_of(stored([1], session="a"), stored([2], parent=1, session="b"), removed([2]))
    assert residency.session_tokens() == {"a": 16}
    residency.apply([stored([2], parent=1, session="b")])
    assert residency.session_tokens() == {"a": 16, "b": 32}


def test_forgotten_sessions_do_not_pile_up_in_a_shared_prefix() -> None:
    residency = residency_of(stored([1, 2], session="root"))
    for number in range(500):
        residency.apply([stored([100 + number], parent=2, session=f"s{number}"), removed([100 + number])])
    assert len(residency._blocks[1].owners) <= 2
    assert residency.session_tokens() == {"root": 32}


def test_evicted_tokens_are_counted_and_cleared_ones_are_not() -> None:
    residency = residency_of(stored([1, 2, 3], session="a"), removed([3]), removed([99]), AllBlocksCleared())
    assert residency.evicted_tokens == 16
    assert residency.resident_tokens == 0
    assert residency.session_tokens() == {}
    assert residency.stored_tokens == 48


def test_only_the_gpus_blocks_are_resident() -> None:
    residency = residency_of(
        stored([1, 2], session="a"),
        stored([1, 2], session="a", medium="CPU"),
        stored([1], session="a", medium="STORAGE"),
        removed([1, 2]),
        removed([2], medium="CPU"),
    )
    assert residency.session_tokens() == {}
    assert residency.resident_tokens == 0
    assert residency.offloaded_tokens() == {"CPU": 16, "STORAGE": 16}


def test_a_medium_that_is_not_named_is_the_gpu() -> None:
    residency = residency_of(stored([1, 2], session="a", medium=None), removed([1], medium=None))
    assert residency.session_tokens() == {"a": 16}


def test_remote_blocks_are_not_resident_here() -> None:
    residency = residency_of(stored([1], session="a", locality="REMOTE"))
    assert residency.resident_tokens == 0


def test_tokens_of_several_groups_of_layers_count_once() -> None:
    residency = residency_of(
        stored([1, 2], session="a", group=0, kind="full_attention"),
        stored([1, 2], session="a", group=1, kind="sliding_window"),
        removed([1], group_idx=1),
    )
    assert residency.session_tokens() == {"a": 32}
    residency.apply([removed([1], group_idx=0)])
    assert residency.session_tokens() == {"a": 16}


def test_full_attention_takes_over_from_another_group() -> None:
    residency = residency_of(
        stored([1, 2, 3], session="a", group=0, kind="sliding_window"),
        stored([1, 2, 3], session="a", group=1, kind="full_attention"),
        removed([1, 2], group_idx=0),
    )
    assert residency.session_tokens() == {"a": 48}


def test_a_block_of_which_copies_remain_stays() -> None:
    residency = residency_of(stored([1, 2], session="a"), removed([1, 2], remaining_copy_counts=[1, 0]))
    assert residency.session_tokens() == {"a": 16}


def test_beyond_the_limit_everything_is_dropped_and_said() -> None:
    residency = Residency(3)
    residency.apply([stored([1, 2, 3], session="a")])
    assert not residency.overflowed
    residency.apply([stored([4], parent=3, session="a")])
    assert residency.overflowed
    assert len(residency) == 0


def test_a_parent_that_is_its_own_child_ends_the_walk() -> None:
    residency = residency_of(stored([1], parent=1, session="a"), stored([2], parent=1, session="b"))
    assert residency.session_tokens() == {"a": 16, "b": 32}


def test_a_recorded_stream_up_to_its_gap_gives_what_each_session_held() -> None:
    residency = Residency(10**6)
    for line in (DATA / "kv_events_vllm.jsonl").read_text().splitlines():
        batch = json.loads(line)
        if batch["seq"] > 42:
            break
        residency.apply(decode(msgspec.msgpack.encode(batch["payload"])).events)
    tokens = residency.session_tokens()
    # Five turns of s0 stored 6+1, 6+1, 7+1 and 6+1 blocks of 32 tokens, each turn the child of the one before.
    assert tokens["s0"] == (7 + 7 + 8 + 7) * 32
    assert tokens["s200"] == 46 * 32
    assert residency.resident_tokens == sum(tokens.values())
