"""Eviction by session in the exact replica: the books of tidegate's plugin for vLLM over the simulated pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from tidegate.integrations.vllm_plugin.calls import Running
from tidegate.integrations.vllm_plugin.retention import Retention
from tidegate.sim.blocks import BlockHash, BlockId, BlockPool
from tidegate.sim.replica import Replica, Request


class PoolBlock:
    """A block of the pool as the retention sees one: an object for as long as the pool lives."""

    __slots__ = ("_pool", "id")

    is_null = False

    def __init__(self, pool: BlockPool, id: BlockId) -> None:
        self._pool = pool
        self.id = id

    @property
    def ref_cnt(self) -> int:
        return self._pool.refs(self.id)

    @property
    def block_hash(self) -> BlockHash | None:
        return self._pool.hash_of(self.id)


class PoolOrder:
    def __init__(self, pool: BlockPool, block: Callable[[BlockId], PoolBlock]) -> None:
        self._pool = pool
        self._block = block

    def first(self, blocks: Sequence[PoolBlock]) -> None:
        self._pool.put_first([block.id for block in blocks])

    def last(self, blocks: Sequence[PoolBlock]) -> None:
        self._pool.put_last(block.id for block in blocks)

    def behind(self, blocks: Sequence[PoolBlock], worthless: Callable[[PoolBlock], bool], limit: int) -> None:
        mine = {block.id for block in blocks}
        run: list[BlockId] = []
        for id in islice((id for id in self._pool.evictable() if id not in mine), limit):
            if not worthless(self._block(id)):
                break
            run.append(id)
        self._pool.put_first([*run, *(block.id for block in blocks)])


class SessionBlocks:
    """Takes part in every request's end of this replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._blocks: dict[BlockId, PoolBlock] = {}
        self.retention = Retention(PoolOrder(replica.pool, self._block))
        replica.give_back = self._give_back

    def release(self, session: str) -> None:
        self.retention.release([session], [one.request for one in self.running() if one.session == session])

    def reset(self) -> None:
        """The prefix cache is empty."""
        self.retention.reset()

    def running(self) -> Iterator[Running]:
        """Requests of sessions, waiting ones too."""
        for request in self._replica.requests.values():
            if request.session is not None:
                yield Running(request.id, request.session, len(request.blocks))

    def _give_back(self, request: Request) -> None:
        free = self._replica.pool.free
        if request.session is None:
            free(reversed(request.blocks))
            return
        table = [self._block(id) for id in request.blocks]
        over = request.state == "finished"
        dropped = self.retention.leaving(request.id, request.session, [table], over=over)
        free(reversed(request.blocks))
        if dropped:
            self.retention.drop(dropped)

    def _block(self, id: BlockId) -> PoolBlock:
        block = self._blocks.get(id)
        if block is None:
            block = self._blocks[id] = PoolBlock(self._replica.pool, id)
        return block
