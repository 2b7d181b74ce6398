"""The block pool against a naive twin: one list for the free queue, a scan for every look-up."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidegate.sim.blocks import BlockPool

HASHES = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(
    lambda path: [tuple(path[: i + 1]) for i in range(len(path))]
)


class NaivePool:
    """vLLM's queue, told as simply as possible."""

    def __init__(self, num_blocks: int) -> None:
        self.queue = list(range(1, num_blocks))
        self.refs = [0] * num_blocks
        self.hash: dict[int, object] = {}  # in the order of caching

    def longest_hit(self, hashes: list[object], max_blocks: int) -> list[int]:
        hit: list[int] = []
        for wanted in hashes[:max_blocks]:
            blocks = [block for block, known in self.hash.items() if known == wanted]
            if not blocks:
                break
            hit.append(blocks[0])
        return hit

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.refs[block] == 0:
                self.queue.remove(block)
            self.refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        for block in taken:
            self.hash.pop(block, None)
            self.refs[block] = 1
        return taken

    def store(self, blocks: list[int], hashes: list[object], first: int) -> None:
        for block, block_hash in list(zip(blocks, hashes, strict=False))[first:]:
            self.hash[block] = block_hash

    def free(self, blocks: list[int]) -> None:
        gone = []
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                gone.append(block)
        self.queue = [b for b in gone if b not in self.hash] + self.queue + [b for b in gone if b in self.hash]

    def reset(self) -> bool:
        if any(self.refs):
            return False
        self.hash.clear()
        return True


class PoolMachine(RuleBasedStateMachine):
    SIZE = 12

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE)
        self.naive = NaivePool(self.SIZE)
        self.held: list[tuple[list[int], list[object]]] = []

    @rule(hashes=HASHES, extra=st.integers(0, 3))
    def admit(self, hashes: list[object], extra: int) -> None:
        """A request comes: its hit is touched, the rest is allocated, full blocks are cached."""
        hit = self.pool.longest_hit(hashes, len(hashes))
        assert hit == self.naive.longest_hit(hashes, len(hashes))
        new = len(hashes) - len(hit) + extra
        if new + self.pool.free_among(hit) > self.pool.num_free:
            return
        self.pool.touch(hit)
        self.naive.touch(hit)
        blocks = self.pool.allocate(new)
        assert blocks == self.naive.allocate(new)
        blocks = hit + blocks
        self.pool.store("r", None, blocks, hashes, len(hit), len(hashes))
        self.naive.store(blocks, hashes, len(hit))
        self.held.append((blocks, hashes))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        blocks, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free(reversed(blocks))
        self.naive.free(blocks[::-1])

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == self.naive.reset()

    @invariant()
    def same(self) -> None:
        assert self.pool.free_order() == self.naive.queue
        assert self.pool.num_free == len(self.naive.queue)
        for block in range(1, self.SIZE):
            assert self.pool.refs(block) == self.naive.refs[block]
            assert self.pool.hash_of(block) == self.naive.hash.get(block)

    @invariant()
    def every_block_is_held_or_free(self) -> None:
        held = {block for blocks, _ in self.held for block in blocks}
        assert held.isdisjoint(self.pool.free_order())
        assert len(held) + self.pool.num_free == self.SIZE - 1


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
