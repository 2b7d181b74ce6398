"""Which sessions claim which blocks of the fast cache, so that an ended session's can be evicted first.

The plugin's books (`integrations.vllm_plugin.retention`) told in runs: a session claims a branch up to a block, once a
request of it has let go of its blocks; what it alone claims is what lies beyond the claims of all others.
"""

from __future__ import annotations

from typing import TypeAlias

BranchId: TypeAlias = int


class Claims:
    def __init__(self) -> None:
        self._by_session: dict[str, dict[BranchId, int]] = {}  # the block where the claim ends; oldest branch first
        self._by_branch: dict[BranchId, dict[str, int]] = {}

    def note(self, session: str, branch: BranchId, end: int) -> None:
        mine = self._by_session.setdefault(session, {})
        if end > mine.get(branch, 0):
            mine[branch] = end
            self._by_branch.setdefault(branch, {})[session] = end

    def release(self, session: str) -> list[tuple[BranchId, int]]:
        """Branches of which it alone claims the blocks from this one on."""
        alone: list[tuple[BranchId, int]] = []
        for branch, end in self._by_session.pop(session, {}).items():
            others = self._by_branch[branch]
            del others[session]
            low = max(others.values(), default=0)
            if not others:
                del self._by_branch[branch]
            if low < end:
                alone.append((branch, low))
        return alone

    def clear(self) -> None:
        self._by_session.clear()
        self._by_branch.clear()
