"""KV blocks and the order in which free ones are taken, as far as retention touches them; and vLLM's.

The first block in the order is allocated first. Blocks in it may still be cached: they are found by a request with the
same prefix until they are allocated to another. Blocks that a request holds (`ref_cnt` > 0) are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeAlias, TypeVar

BlockHash: TypeAlias = Hashable  # of the whole prefix up to the block's end, and of its KV cache group


class Block(Protocol):
    @property
    def ref_cnt(self) -> int: ...

    @property
    def is_null(self) -> bool: ...

    @property
    def block_hash(self) -> BlockHash | None:
        """None: what it holds is not to be found in the prefix cache."""
        ...


B = TypeVar("B", bound=Block)


class FreeOrder(Protocol[B]):
    """All blocks given are free ones."""

    def first(self, blocks: Sequence[B]) -> None:
        """They become the first to be allocated, in this order."""
        ...

    def last(self, blocks: Sequence[B]) -> None:
        """They become the last to be allocated, in this order."""
        ...

    def behind(self, blocks: Sequence[B], worthless: Callable[[B], bool], limit: int) -> None:
        """They go behind the run of worthless blocks at the head, or behind its first `limit`."""
        ...


class VllmBlock(Protocol):
    ref_cnt: int
    is_null: bool
    prev_free_block: VllmBlock | None
    next_free_block: VllmBlock | None

    @property
    def block_hash(self) -> BlockHash | None: ...


class VllmQueue(Protocol):
    """Doubly linked, between two blocks that are never handed out."""

    num_free_blocks: int
    fake_free_list_head: VllmBlock
    fake_free_list_tail: VllmBlock

    def remove(self, block: VllmBlock) -> None: ...

    def append_n(self, blocks: list[VllmBlock]) -> None: ...

    def prepend_n(self, blocks: list[VllmBlock]) -> None: ...


class VllmOrder:
    """The free queues of vLLM's block pools; there is nearly always one."""

    def __init__(self, queue_of: Callable[[VllmBlock], VllmQueue]) -> None:
        self._queue_of = queue_of

    def first(self, blocks: Sequence[VllmBlock]) -> None:
        for queue, mine in self._taken_out(blocks):
            queue.prepend_n(mine)

    def last(self, blocks: Sequence[VllmBlock]) -> None:
        for queue, mine in self._taken_out(blocks):
            queue.append_n(mine)

    def behind(self, blocks: Sequence[VllmBlock], worthless: Callable[[VllmBlock], bool], limit: int) -> None:
        for queue, mine in self._taken_out(blocks):
            before = queue.fake_free_list_head
            for _ in range(limit):
                after = before.next_free_block
                if after is None or after is queue.fake_free_list_tail or not worthless(after):
                    break
                before = after
            _insert(queue, before, mine)

    def _taken_out(self, blocks: Sequence[VllmBlock]) -> list[tuple[VllmQueue, list[VllmBlock]]]:
        queues: dict[int, tuple[VllmQueue, list[VllmBlock]]] = {}
        for block in blocks:
            queue = self._queue_of(block)
            queue.remove(block)
            queues.setdefault(id(queue), (queue, []))[1].append(block)
        return list(queues.values())


def _insert(queue: VllmQueue, before: VllmBlock, blocks: list[VllmBlock]) -> None:
    after = before.next_free_block
    assert after is not None, "the queue ends with a block of its own"
    for block in blocks:
        before.next_free_block = block
        block.prev_free_block = before
        before = block
    before.next_free_block = after
    after.prev_free_block = before
    queue.num_free_blocks += len(blocks)
