"""vLLM's block pool, as far as the plugin sees it, and requests that use it: allocate, cache, hit, give back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tidegate.integrations.vllm_plugin.blocks import VllmOrder
from tidegate.integrations.vllm_plugin.retention import Retention


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: Any = None
    is_null: bool = False
    prev_free_block: Block | None = field(default=None, repr=False)
    next_free_block: Block | None = field(default=None, repr=False)


class Queue:
    def __init__(self) -> None:
        self.fake_free_list_head, self.fake_free_list_tail = Block(-1), Block(-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.num_free_blocks = 0

    def __iter__(self) -> Any:
        block = self.fake_free_list_head.next_free_block
        while block is not self.fake_free_list_tail:
            assert block is not None
            yield block
            block = block.next_free_block

    def remove(self, block: Block) -> None:
        assert block.prev_free_block is not None
        assert block.next_free_block is not None
        block.prev_free_block.next_free_block = block.next_free_block
        block.next_free_block.prev_free_block = block.prev_free_block
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append_n(self, blocks: list[Block]) -> None:
        before = self.fake_free_list_tail.prev_free_block
        assert before is not None
        self._insert(before, blocks)

    def prepend_n(self, blocks: list[Block]) -> None:
        self._insert(self.fake_free_list_head, blocks)

    def _insert(self, before: Block, blocks: list[Block]) -> None:
        after = before.next_free_block
        assert after is not None
        for block in blocks:
            assert block.next_free_block is None
            before.next_free_block, block.prev_free_block = block, before
            before = block
        before.next_free_block, after.prev_free_block = after, before
        self.num_free_blocks += len(blocks)


class Pool:
    """Contents of a block are the hash of its whole prefix: a tuple of the prompt's letters."""

    def __init__(self, size: int) -> None:
        self.free_block_queue = Queue()
        self.blocks = [Block(number) for number in range(size)]
        self.free_block_queue.append_n(self.blocks)
        self.cache: dict[Any, Block] = {}
        self.retention = Retention(VllmOrder(lambda block: self.free_block_queue))  # type: ignore[arg-type]
        self.serial = 0

    @property
    def order(self) -> list[Any]:
        """Contents of the free queue, head first."""
        return [block.block_hash for block in self.free_block_queue]

    def begin(self, prompt: str) -> list[Block] | None:
        """The request's table, a block for each letter; None if there is no room."""
        table: list[Block] = []
        for end in range(1, len(prompt) + 1):
            block = self.cache.get(prompt[:end]) if len(table) == end - 1 else None
            if block is None:
                break
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1
            table.append(block)
        if len(prompt) - len(table) > self.free_block_queue.num_free_blocks:
            self.give_back(table)
            return None
        for end in range(len(table) + 1, len(prompt) + 1):
            block = next(iter(self.free_block_queue))
            self.free_block_queue.remove(block)
            self.cache.pop(block.block_hash, None)
            block.ref_cnt, block.block_hash = 1, prompt[:end]
            self.cache[block.block_hash] = block
            table.append(block)
        return table

    def end(self, session: str, table: list[Block], request: str = "", over: bool = True) -> None:
        dropped = self.retention.leaving(request, session, [table], over=over)
        self.give_back(table)
        if dropped:
            self.retention.drop(dropped)

    def give_back(self, table: list[Block]) -> None:
        free = []
        for block in reversed(table):
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                free.append(block)
        self.free_block_queue.append_n(free)

    def turn(self, session: str, prompt: str) -> int:
        """How many blocks were found."""
        found = len([end for end in range(1, len(prompt) + 1) if prompt[:end] in self.cache])
        table = self.begin(prompt)
        assert table is not None
        self.end(session, table)
        return found

    def reset(self) -> None:
        for block in self.blocks:
            block.block_hash = None
        self.cache.clear()
        self.retention.reset()
