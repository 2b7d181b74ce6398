"""Paged KV blocks with a block-hash prefix cache, in vLLM v1's order of eviction.

The KV cache is `num_blocks` blocks of a fixed number of tokens; block 0 is vLLM's null block and is never handed
out. A full block can be *cached* under its hash, which chains its parent's hash with its own tokens, so that a
cached block stands for a whole prefix. A cached block stays findable while requests use it and after they have
freed it, until it is allocated again.

Free blocks wait in one queue, and `allocate` takes its head. What decides who is evicted first:
- never used blocks come in order of their number;
- freed blocks without a hash go to the head: nothing is lost with them;
- freed blocks with a hash go to the tail. A request frees its blocks last to first, so its tail goes before its head.
  Nothing else orders the queue: a dead session's blocks and those of a session idle in a tool call are alike;
- a hit (`touch`) takes a free block out of the queue;
- `put_first` and `put_last` move free blocks with a hash, as tidegate's plugin for vLLM does by session.

Two requests that compute the same prefix at the same time hold two blocks under one hash: both stay, the older one is
found first, and the loss of either is reported.

The queue is kept in three parts, in this order: `_loose` (a stack of freed blocks without hash), the never used
blocks `_fresh..num_blocks`, and `_lru` (freed blocks with a hash, oldest first). Nothing is ever put between them, so
the three are equal to one list; a pool that is never filled costs no memory for the part that it does not use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeAlias

import msgspec

BlockHash: TypeAlias = Hashable
BlockId: TypeAlias = int


class BlocksStored(msgspec.Struct, frozen=True):
    """`hashes` are now found in the cache: blocks `first..first + len(hashes)` of the request's sequence."""

    request: str
    session: str | None
    first: int
    hashes: list[BlockHash]
    parent: BlockHash | None


class BlockRemoved(msgspec.Struct, frozen=True):
    hash: BlockHash


class BlocksCleared(msgspec.Struct, frozen=True):
    pass


BlockEvent: TypeAlias = BlocksStored | BlockRemoved | BlocksCleared


class BlockPool:
    def __init__(self, num_blocks: int, *, enable_caching: bool = True, record_events: bool = False) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs a null block and at least one more, not {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.evictions = 0  # cached blocks that were given to somebody else
        self._record_events = record_events
        self._events: list[BlockEvent] = []
        self._fresh = 1
        self._loose: list[BlockId] = []
        self._lru: OrderedDict[BlockId, None] = OrderedDict()
        # By block number, as long as blocks have ever been used. Block 0 is the null block.
        self._refs: list[int] = [1]
        self._hash_of: list[BlockHash | None] = [None]
        self._found: dict[BlockHash, BlockId | dict[BlockId, None]] = {}

    # --- sizes ------------------------------------------------------------------------------------------------
    @property
    def num_free(self) -> int:
        return len(self._loose) + self.num_blocks - self._fresh + len(self._lru)

    @property
    def num_cached(self) -> int:
        """Cached blocks that no request uses: what eviction can take."""
        return sum(1 for block in self._lru if self._hash_of[block] is not None)

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold; free blocks with cached contents do not count, as in vLLM."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def free_order(self) -> list[BlockId]:
        """The free queue, head first."""
        return [*reversed(self._loose), *range(self._fresh, self.num_blocks), *self._lru]

    def refs(self, block: BlockId) -> int:
        return self._refs[block] if block < self._fresh else 0

    def hash_of(self, block: BlockId) -> BlockHash | None:
        return self._hash_of[block] if block < self._fresh else None

    # --- the prefix cache -------------------------------------------------------------------------------------
    def longest_hit(self, hashes: Sequence[BlockHash], max_blocks: int) -> list[BlockId]:
        """The blocks of the longest cached prefix of `hashes`, at most `max_blocks`."""
        hit: list[BlockId] = []
        found = self._found.get
        for block_hash in hashes[:max_blocks] if len(hashes) > max_blocks else hashes:
            block = found(block_hash)
            if block is None:
                break
            hit.append(block if type(block) is int else next(iter(block)))  # type: ignore[arg-type]
        return hit

    def free_among(self, blocks: Iterable[BlockId]) -> int:
        """How many of these the free queue would lose if they were touched."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    def touch(self, blocks: Iterable[BlockId]) -> None:
        refs = self._refs
        for block in blocks:
            if refs[block] == 0:
                del self._lru[block]
            refs[block] += 1

    def store(
        self,
        request: str,
        session: str | None,
        blocks: Sequence[BlockId],
        hashes: Sequence[BlockHash],
        first: int,
        end: int,
    ) -> None:
        """Cache the now full blocks `first..end` (exclusive) of a request under their hashes."""
        if not self.enable_caching or first >= end:
            return
        for index in range(first, end):
            block, block_hash = blocks[index], hashes[index]
            self._hash_of[block] = block_hash
            known = self._found.get(block_hash)
            if known is None:
                self._found[block_hash] = block
            elif isinstance(known, dict):
                known[block] = None
            else:
                self._found[block_hash] = {known: None, block: None}
        if self._record_events:
            parent = hashes[first - 1] if first else None
            self._events.append(BlocksStored(request, session, first, list(hashes[first:end]), parent))

    def _forget(self, block: BlockId) -> None:
        block_hash = self._hash_of[block]
        if block_hash is None:
            return
        self._hash_of[block] = None
        self.evictions += 1
        known = self._found[block_hash]
        if isinstance(known, dict):
            del known[block]
            if len(known) == 1:
                self._found[block_hash] = next(iter(known))
        else:
            del self._found[block_hash]
        if self._record_events:
            self._events.append(BlockRemoved(block_hash))

    # --- allocation -------------------------------------------------------------------------------------------
    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks from the head of the free queue; cached contents of theirs are evicted."""
        if count > self.num_free:
            raise ValueError(f"cannot allocate {count} blocks: {self.num_free} are free")
        taken: list[BlockId] = []
        refs = self._refs
        while len(taken) < count and self._loose:
            block = self._loose.pop()
            refs[block] = 1
            taken.append(block)
        fresh = min(count - len(taken), self.num_blocks - self._fresh)
        if fresh:
            taken.extend(range(self._fresh, self._fresh + fresh))
            refs.extend([1] * fresh)
            self._hash_of.extend([None] * fresh)
            self._fresh += fresh
        while len(taken) < count:
            block, _ = self._lru.popitem(last=False)
            self._forget(block)
            refs[block] = 1
            taken.append(block)
        return taken

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Give blocks back in the order in which they should be evicted: a request's last block first."""
        refs, hash_of = self._refs, self._hash_of
        loose: list[BlockId] = []
        for block in blocks:
            refs[block] -= 1
            if refs[block] == 0:
                if hash_of[block] is None:
                    loose.append(block)
                else:
                    self._lru[block] = None
        loose.reverse()
        self._loose.extend(loose)

    def put_first(self, blocks: Sequence[BlockId]) -> None:
        """Of the free blocks with a hash these are evicted first, in this order."""
        for block in reversed(blocks):
            self._lru.move_to_end(block, last=False)

    def put_last(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self._lru.move_to_end(block)

    def evictable(self) -> Iterator[BlockId]:
        """Free blocks with a hash, or that had one, first to be evicted first."""
        return iter(self._lru)

    def reset(self) -> bool:
        """Drop every cached prefix. Refused while any block is in use."""
        if self.num_free != self.num_blocks - 1:
            return False
        self._found.clear()
        self._hash_of = [None] * self._fresh
        if self._record_events:
            self._events.append(BlocksCleared())
        return True

    def take_events(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return events
