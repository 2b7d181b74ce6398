"""A second tier of KV in host memory: what was computed is copied out, and read back instead of being computed again.

Copying out is free (it overlaps with computing); reading back takes `restore_token_s` a token, in the step that admits
the request. The tier keeps, by branch (see `sim.contexts`), a prefix: the longest ever stored, cut from its end when
room is needed, the branches used longest ago first.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from tidegate.sim.fast_cache import Path


class CpuTierSpec(msgspec.Struct, frozen=True, kw_only=True):
    tokens: int
    restore_token_s: float  # KV bytes a token / bandwidth of the host link


class CpuTier:
    def __init__(self, spec: CpuTierSpec, block_size: int) -> None:
        self.blocks = spec.tokens // block_size
        self.restore_block_s = spec.restore_token_s * block_size
        self.used = 0
        self.restored_blocks = 0
        self._ends: OrderedDict[int, tuple[int, int]] = OrderedDict()  # branch -> (first, end), oldest use first

    def store_path(self, path: Path, full: int) -> None:
        for branch, first, end in path.spans:
            if min(end, full) > first:
                self.store(branch, first, min(end, full))

    def hit(self, path: Path, blocks: int, max_blocks: int) -> int:
        """How far the prefix goes on here after the first `blocks` blocks, which are on the GPU."""
        for branch, first, end in path.spans:
            end = min(end, max_blocks)
            if end <= max(first, blocks):
                continue
            if self.end_of(branch) <= blocks:
                break
            blocks = min(self.end_of(branch), end)
            self._ends.move_to_end(branch)
            if blocks < end:
                break
        return blocks

    def store(self, branch: int, first: int, end: int) -> None:
        known = self._ends.get(branch)
        before = known[1] if known is not None else first
        if end > before:
            self._ends[branch] = (first, end)
            self.used += end - before
        if branch in self._ends:
            self._ends.move_to_end(branch)
        while self.used > self.blocks:
            self._cut()

    def _cut(self) -> None:
        branch, (first, end) = next(iter(self._ends.items()))
        kept = max(first, end - (self.used - self.blocks))
        self.used -= end - kept
        if kept > first:
            self._ends[branch] = (first, kept)  # keeps its place
        else:
            del self._ends[branch]

    def end_of(self, branch: int) -> int:
        """The block up to which the tier has this branch; 0: not at all."""
        known = self._ends.get(branch)
        return 0 if known is None else known[1]

    def clear(self) -> None:
        self._ends.clear()
        self.used = 0
