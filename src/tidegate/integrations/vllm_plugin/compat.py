"""Whether this vLLM is one that the plugin knows: by its version, and by the parts of it that are relied on.

The plugin reaches into vLLM's engine core, which has no promise of stability. An unknown version is refused even if all
parts are there, since their meaning may have changed; `TIDEGATE_VLLM_PLUGIN=force` tries it all the same, and then only
the parts decide.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

# major, minor. 0.32: the suite in tests/vllm. 0.33: its tests of scheduler and block pool; it has no build for the CPU.
TESTED = ((0, 32), (0, 33))
FORCE = "TIDEGATE_VLLM_PLUGIN"


def version() -> str:
    import vllm

    return str(vllm.__version__)


def refusal() -> str | None:
    """Why the plugin stays off; None if it may work."""
    try:
        return _version_refusal(version()) or _parts_refusal()
    except Exception as error:  # whatever a future vLLM raises at import
        return f"this vLLM cannot be looked into: {type(error).__name__}: {error}"


def _version_refusal(found: str) -> str | None:
    if os.environ.get(FORCE) == "force":
        return None
    parts = found.split("+")[0].split(".")
    known = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
    try:
        minor = (int(parts[0]), int(parts[1]))
    except (ValueError, IndexError):
        minor = None
    if minor in TESTED:
        return None
    return f"vLLM {found} is not a version that this plugin was tested with ({known}); {FORCE}=force tries it"


def _parts_refusal() -> str | None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    wanted: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (KVCacheManager, ("free", "pop_blocks_for_free", "reset_prefix_cache")),
        (KVCacheCoordinator, ("get_blocks",)),
        (SingleTypeKVCacheManager, ("get_num_skipped_tokens", "remove_skipped_blocks")),
        (BlockPool, ("cache_full_blocks",)),
        (FreeKVCacheBlockQueue, ("remove", "append_n", "prepend_n")),
        (KVCacheBlock, ("block_hash",)),
        (Request, ("is_finished",)),
        (EngineCore, ("reset_prefix_cache",)),
    )
    missing = [f"{owner.__name__}.{name}" for owner, names in wanted for name in names if not hasattr(owner, name)]
    fields = {"block_id", "ref_cnt", "is_null", "prev_free_block", "next_free_block"}
    missing += [f"KVCacheBlock.{name}" for name in sorted(fields - _parameters(KVCacheBlock))]
    if "session_id" not in _parameters(Request):
        missing.append("Request.session_id")
    for name in ("free", "pop_blocks_for_free"):
        if not {"request"} <= _parameters(getattr(KVCacheManager, name, None)):
            missing.append(f"KVCacheManager.{name}(request)")
    taken = {"request", "blocks", "num_cached_blocks", "num_full_blocks", "kv_cache_group_id"}
    if not taken <= _parameters(getattr(BlockPool, "cache_full_blocks", None)):
        missing.append("BlockPool.cache_full_blocks(..)")
    return f"this vLLM lacks {', '.join(dict.fromkeys(missing))}" if missing else None


def _parameters(function: Any) -> set[str]:
    return set() if function is None else set(inspect.signature(function).parameters)
