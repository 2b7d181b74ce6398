"""tidegate's plugin for vLLM in the embedded engine: the plugin's own routes and books, over the simulated pool.

In SGLang's dialect it stands for --enable-session-radix-cache, whose sessions end with /close_session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias, cast

from starlette.applications import Starlette

from tidegate import __version__
from tidegate.engine.http import Receive, Scope, Send
from tidegate.integrations.vllm_plugin.calls import Running, carry_out
from tidegate.integrations.vllm_plugin.endpoint import Endpoint
from tidegate.integrations.vllm_plugin.retention import Retention
from tidegate.sim.blocks import BlockHash, BlockId, BlockPool
from tidegate.sim.replica import Replica, Request

AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

PREFIX = "/tidegate/"


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


class PluginEngine:
    """Stands for vLLM's engine core, and for the client that its API server has of it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._blocks: dict[BlockId, PoolBlock] = {}
        self._retention = Retention(PoolOrder(replica.pool, self._block))
        replica.give_back = self._give_back

    async def call_utility_all_async(self, method: str, name: str, sessions: list[str] | None) -> list[dict[str, Any]]:
        if name == "info":
            return [self._info()]
        return [carry_out(self._retention, name, sessions, self._running())]

    def release(self, session: str) -> None:
        self._retention.release([session], [one.request for one in self._running() if one.session == session])

    def reset(self) -> None:
        """The prefix cache is empty."""
        self._retention.reset()

    def _info(self) -> dict[str, Any]:
        retention = self._retention
        caching = self._replica.config.enable_prefix_caching
        return {
            "off": None if caching else "prefix caching is off",
            "kv_cache_groups": 1,
            "blocks": self._replica.pool.num_blocks,
            "sessions": len(retention.sessions),
            "claims": retention.claims,
            "moved_blocks": dict(retention.counts),
        }

    def _give_back(self, request: Request) -> None:
        free = self._replica.pool.free
        if request.session is None:
            free(reversed(request.blocks))
            return
        table = [self._block(id) for id in request.blocks]
        over = request.state == "finished"
        dropped = self._retention.leaving(request.id, request.session, [table], over=over)
        free(reversed(request.blocks))
        if dropped:
            self._retention.drop(dropped)

    def _running(self) -> Iterator[Running]:
        for request in self._replica.requests.values():
            if request.session is not None:
                yield Running(request.id, request.session, len(request.blocks))

    def _block(self, id: BlockId) -> PoolBlock:
        block = self._blocks.get(id)
        if block is None:
            block = self._blocks[id] = PoolBlock(self._replica.pool, id)
        return block


def plugin_app(engine: PluginEngine) -> AsgiApp:
    endpoint, app = Endpoint(), Starlette()
    endpoint.attach_router(app)
    endpoint.start(engine, f"{__version__}+tidegate")
    return cast("AsgiApp", app)  # Starlette's own types are wider
