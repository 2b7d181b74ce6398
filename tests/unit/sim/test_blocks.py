"""The order in which blocks are given out and cached prefixes are lost."""

from __future__ import annotations

import pytest

from tidegate.sim.blocks import BlockPool, BlockRemoved, BlocksCleared, BlocksStored


def cached(pool: BlockPool, name: str, blocks: int) -> list[int]:
    """A finished request that leaves this many cached blocks."""
    ids = pool.allocate(blocks)
    pool.store(name, name, ids, [f"{name}{i}" for i in range(blocks)], 0, blocks)
    pool.free(reversed(ids))
    return ids


def test_block_zero_is_never_given_out() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.num_free == 0
    with pytest.raises(ValueError, match="0 are free"):
        pool.allocate(1)


def test_usage_counts_held_blocks_not_cached_ones() -> None:
    pool = BlockPool(11)
    cached(pool, "a", 4)
    assert pool.usage == 0.0
    pool.allocate(5)
    assert pool.usage == 0.5


def test_a_finished_requests_tail_is_evicted_before_its_head() -> None:
    pool = BlockPool(5)
    cached(pool, "a", 4)
    pool.allocate(1)
    assert len(pool.longest_hit(["a0", "a1", "a2", "a3"], 4)) == 3


def test_the_longest_idle_is_evicted_first_dead_or_alive() -> None:
    pool = BlockPool(5)
    cached(pool, "old", 2)
    cached(pool, "new", 2)
    pool.allocate(2)
    assert pool.longest_hit(["old0", "old1"], 2) == []
    assert len(pool.longest_hit(["new0", "new1"], 2)) == 2


def test_blocks_without_a_hash_are_reused_before_any_cached_one() -> None:
    pool = BlockPool(7)
    cached(pool, "a", 2)
    loose = pool.allocate(4)
    pool.free(loose)
    assert pool.free_order() == [*loose, 2, 1]
    assert pool.allocate(4) == loose
    assert len(pool.longest_hit(["a0", "a1"], 2)) == 2


def test_a_hit_leaves_the_free_queue_and_returns_to_its_tail() -> None:
    pool = BlockPool(5)
    cached(pool, "a", 2)
    cached(pool, "b", 2)
    hit = pool.longest_hit(["a0", "a1"], 2)
    assert pool.free_among(hit) == 2
    pool.touch(hit)
    assert pool.num_free == 2
    pool.free(reversed(hit))
    pool.allocate(2)
    assert pool.longest_hit(["b0"], 1) == []
    assert len(pool.longest_hit(["a0", "a1"], 2)) == 2


def test_a_shared_block_is_free_when_its_last_user_is_gone() -> None:
    pool = BlockPool(3)
    cached(pool, "a", 1)
    hit = pool.longest_hit(["a0"], 1)
    pool.touch(hit)
    pool.touch(hit)
    pool.free(hit)
    assert pool.num_free == 1
    pool.free(hit)
    assert pool.num_free == 2


def test_two_blocks_of_one_prefix_outlive_the_loss_of_the_first() -> None:
    pool = BlockPool(4, record_events=True)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.store("r1", None, first, ["x"], 0, 1)
    pool.store("r2", None, second, ["x"], 0, 1)
    pool.free(first)
    pool.take_events()
    pool.allocate(2)  # the unused block, then r1's
    assert pool.take_events() == [BlockRemoved("x")]
    assert pool.longest_hit(["x"], 1) == second


def test_reset_is_refused_while_blocks_are_held() -> None:
    pool = BlockPool(4, record_events=True)
    cached(pool, "a", 2)
    held = pool.allocate(1)
    assert not pool.reset()
    assert len(pool.longest_hit(["a0", "a1"], 2)) == 2
    pool.free(held)
    pool.take_events()
    assert pool.reset()
    assert pool.longest_hit(["a0"], 1) == []
    assert pool.take_events() == [BlocksCleared()]


def test_events_say_whose_blocks_were_stored_and_what_is_lost() -> None:
    pool = BlockPool(4, record_events=True)
    ids = pool.allocate(3)
    pool.store("r", "s", ids, ["x", "y"], 0, 1)
    pool.store("r", "s", ids, ["x", "y"], 1, 2)
    pool.free(reversed(ids))
    pool.allocate(2)
    assert pool.take_events() == [
        BlocksStored("r", "s", 0, ["x"], None),
        BlocksStored("r", "s", 1, ["y"], "x"),
        BlockRemoved("y"),
    ]


def test_a_huge_pool_costs_nothing_until_it_is_used() -> None:
    pool = BlockPool(10**12)
    pool.allocate(3)
    assert pool.num_free == 10**12 - 4
