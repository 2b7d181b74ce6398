"""vLLM's KV blocks and its queue of free ones, as far as the plugin touches them.

The queue's head is allocated first. Blocks in it may still be cached: they are found by a request with the same prefix
until they are allocated to another. Blocks that a request holds (`ref_cnt` > 0) are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeAlias

BlockHash: TypeAlias = Hashable  # of the whole prefix up to the block's end, and of its KV cache group


class Block(Protocol):
    ref_cnt: int
    is_null: bool
    prev_free_block: Block | None
    next_free_block: Block | None

    @property
    def block_id(self) -> int: ...

    @property
    def block_hash(self) -> BlockHash | None:
        """None: what it holds is not to be found in the prefix cache."""
        ...


class FreeQueue(Protocol):
    """Doubly linked, between two blocks that are never handed out."""

    num_free_blocks: int

    @property
    def fake_free_list_head(self) -> Block: ...

    @property
    def fake_free_list_tail(self) -> Block: ...

    def remove(self, block: Block) -> None: ...

    def append_n(self, blocks: list[Block]) -> None: ...

    def prepend_n(self, blocks: list[Block]) -> None: ...


class Pool(Protocol):
    @property
    def free_block_queue(self) -> FreeQueue: ...


PoolOf: TypeAlias = Callable[[Block], Pool]


def by_queue(blocks: Sequence[Block], pool_of: PoolOf) -> list[tuple[FreeQueue, list[Block]]]:
    """Blocks by the queue that they wait in; nearly always one."""
    queues: dict[int, tuple[FreeQueue, list[Block]]] = {}
    for block in blocks:
        queue = pool_of(block).free_block_queue
        queues.setdefault(id(queue), (queue, []))[1].append(block)
    return list(queues.values())


def to_front(blocks: Sequence[Block], pool_of: PoolOf) -> None:
    """Free blocks become the first to be allocated, in this order."""
    for queue, mine in by_queue(blocks, pool_of):
        _take_out(queue, mine)
        queue.prepend_n(mine)


def to_back(blocks: Sequence[Block], pool_of: PoolOf) -> None:
    """Free blocks become the last to be allocated, in this order."""
    for queue, mine in by_queue(blocks, pool_of):
        _take_out(queue, mine)
        queue.append_n(mine)


def behind(blocks: Sequence[Block], pool_of: PoolOf, worthless: Callable[[Block], bool], limit: int) -> None:
    """Free blocks go behind the run of worthless ones at the queue's head, or behind its first `limit`."""
    for queue, mine in by_queue(blocks, pool_of):
        _take_out(queue, mine)
        before = queue.fake_free_list_head
        for _ in range(limit):
            after = before.next_free_block
            if after is None or after is queue.fake_free_list_tail or not worthless(after):
                break
            before = after
        _insert(queue, before, mine)


def _take_out(queue: FreeQueue, blocks: list[Block]) -> None:
    for block in blocks:
        queue.remove(block)


def _insert(queue: FreeQueue, before: Block, blocks: list[Block]) -> None:
    after = before.next_free_block
    assert after is not None, "the queue ends with a block of its own"
    for block in blocks:
        before.next_free_block = block
        block.prev_free_block = before
        before = block
    before.next_free_block = after
    after.prev_free_block = before
    queue.num_free_blocks += len(blocks)
