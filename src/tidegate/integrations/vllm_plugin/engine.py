"""The engine's side: what is added to vLLM's engine core, in its process.

`install` wraps one constructor, `KVCacheManager.__init__`. Each manager that is made then gets a `Retention`, and
three of its methods are wrapped for this one object; nothing runs per step, but at each request's end, and, for groups
that let go of blocks while a request runs (sliding windows, Mamba), each time that blocks of it become full.
`EngineCore.tidegate_call` is what the API server calls, between two steps.

An exception in here never reaches the engine: the plugin takes its wrappers off that manager and says why it is off.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tidegate.integrations.vllm_plugin import calls, compat
from tidegate.integrations.vllm_plugin.blocks import BlockHash, VllmBlock, VllmOrder
from tidegate.integrations.vllm_plugin.retention import Retention

log = logging.getLogger("vllm.tidegate")

ATTRIBUTE = "tidegate"  # of a KVCacheManager: its Attached
METHOD = "tidegate_call"  # of EngineCore
_WRAPPED = ("free", "pop_blocks_for_free", "reset_prefix_cache")


def install() -> None:
    """In each process that loads general plugins; without effect where there is no engine core."""
    refusal = compat.refusal()
    if refusal is not None:
        log.warning("tidegate plugin is off, and the engine is as it would be without it: %s", refusal)
        return
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, METHOD):
        return
    make = KVCacheManager.__init__

    @functools.wraps(make)
    def make_and_attach(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        attach(self)

    KVCacheManager.__init__ = make_and_attach
    setattr(EngineCore, METHOD, call)


def attach(manager: Any) -> None:
    try:
        setattr(manager, ATTRIBUTE, Attached(manager))
    except Exception:
        log.exception("tidegate plugin is off: it could not be attached")


class Attached:
    """A KVCacheManager's retention, and the wrappers that feed it."""

    def __init__(self, manager: Any) -> None:
        self.off: str | None = None
        self._manager = manager
        self._main_pool = manager.block_pool
        self._windowed = windowed_groups(manager)
        self.retention = Retention(VllmOrder(self._queue_of), self._find if self._windowed else None)
        self._pools = list({id(m.block_pool): m.block_pool for m in manager.coordinator.single_type_managers}.values())
        if not manager.enable_caching:
            self.off = "prefix caching is off"
            return
        manager.free = self._around(manager.free)
        manager.pop_blocks_for_free = self._around(manager.pop_blocks_for_free)
        manager.reset_prefix_cache = self._around_reset(manager.reset_prefix_cache)
        if self._windowed:
            for pool in self._pools:
                pool.cache_full_blocks = self._around_caching(pool.cache_full_blocks)

    # --- wrappers -----------------------------------------------------------------------------------------------
    def _around(self, give_back: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(give_back)
        def wrapped(request: Any) -> Any:
            if request.session_id is None:
                return give_back(request)
            over: list[tuple[BlockHash, VllmBlock]] = []
            with self._unharmed():
                tables = self._manager.coordinator.get_blocks(request.request_id)
                over = self.retention.leaving(
                    request.request_id, request.session_id, tables, over=request.is_finished()
                )
            result = give_back(request)
            if over:
                with self._unharmed():
                    self.retention.drop(over)
            return result

        return wrapped

    def _around_reset(self, reset: Callable[[], bool]) -> Callable[[], bool]:
        @functools.wraps(reset)
        def wrapped() -> bool:
            done = reset()
            if done:
                self.retention.reset()
            return done

        return wrapped

    def _around_caching(self, cache: Callable[..., Any]) -> Callable[..., Any]:
        named = inspect.signature(cache)

        @functools.wraps(cache)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = cache(*args, **kwargs)
            with self._unharmed():
                given = kwargs if not args else named.bind(*args, **kwargs).arguments
                request = given["request"]
                if request.session_id is not None and given["kv_cache_group_id"] in self._windowed:
                    full = given["blocks"][given["num_cached_blocks"] : given["num_full_blocks"]]
                    self.retention.cached(request.request_id, request.session_id, full)
            return result

        return wrapped

    @contextmanager
    def _unharmed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            log.exception("tidegate plugin is off from now on; the engine goes on without it")
            self._detach(f"a fault of its own: {type(error).__name__}: {error}")

    def _detach(self, reason: str) -> None:
        self.off = reason
        for name in _WRAPPED:
            self._manager.__dict__.pop(name, None)
        for pool in self._pools:
            pool.__dict__.pop("cache_full_blocks", None)
        self.retention.reset()

    # --- what the retention asks --------------------------------------------------------------------------------
    def _queue_of(self, block: VllmBlock) -> Any:
        return (getattr(block, "pool", None) or self._main_pool).free_block_queue

    def _find(self, block_hash: BlockHash) -> VllmBlock | None:
        for pool in self._pools:
            block: VllmBlock | None = pool.cached_block_hash_to_block.get_one_block(block_hash)
            if block is not None:
                return block
        return None

    # --- what is asked about it ---------------------------------------------------------------------------------
    def running(self, scheduler: Any) -> Iterator[calls.Running]:
        """Requests of sessions, waiting ones too."""
        for request in scheduler.requests.values():
            if request.session_id is not None:
                tables = self._manager.coordinator.get_blocks(request.request_id)
                held = sum(1 for table in tables for block in table if not block.is_null)
                yield calls.Running(request.request_id, request.session_id, held)

    def info(self) -> dict[str, Any]:
        retention = self.retention
        return {
            "off": self.off,
            "kv_cache_groups": len(self._manager.coordinator.single_type_managers),
            "blocks": sum(pool.num_gpu_blocks for pool in self._pools),
            "sessions": len(retention.sessions),
            "claims": retention.claims,
            "moved_blocks": dict(retention.counts),
        }


def windowed_groups(manager: Any) -> frozenset[int]:
    """Groups whose requests let go of blocks before they end: what is in the table at the end is not all."""
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager as Base

    def lets_go(kind: Any) -> bool:
        return (
            kind.get_num_skipped_tokens is not Base.get_num_skipped_tokens
            or kind.remove_skipped_blocks is not Base.remove_skipped_blocks
        )

    managers = manager.coordinator.single_type_managers
    return frozenset(group for group, one in enumerate(managers) if lets_go(type(one)))


def call(core: Any, name: str, sessions: list[str] | None) -> dict[str, Any]:
    """`EngineCore.tidegate_call`: runs on the engine's own thread. What it returns is plain data."""
    manager = getattr(core.scheduler, "kv_cache_manager", None)
    attached: Attached | None = getattr(manager, ATTRIBUTE, None)
    if attached is None:
        return {"off": "the engine's scheduler has no KV cache manager that the plugin knows"}
    if name == "info" or attached.off is not None:
        return attached.info()
    with attached._unharmed():
        return calls.carry_out(attached.retention, name, sessions, list(attached.running(core.scheduler)))
    return attached.info()
