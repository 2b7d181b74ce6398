"""What prompts have in common, without a token: contexts as paths in a tree of branches.

A branch is a run of tokens that is the same for everyone who names it: a shared system prompt, the prompt of a GRPO
group, a session's own turns. It begins at a token of its parent branch, so a branch stands for a whole prefix, as a
chained block hash does. A context is the path to one leaf; a session that appends only goes further on its own branch,
one that rewrites its context starts a new branch where it cut.

Block i of a context belongs to the branch of its last token. (branch, i) is its hash: equal exactly if all tokens up to
the end of the block are.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from tidegate.sim.blocks import BlockHash
from tidegate.sim.workload import SessionPlan, carried_tokens

ROOT: Final = 0
BLOCK_BITS: Final = 24  # blocks in one context: 16M, far above any
OPEN_END: Final = 1 << 60  # of a context's last branch
Span: TypeAlias = tuple[int, int, int]  # (branch, the first block that is its own, the block where the next one begins)


class Branches:
    """Numbers for branches: (parent, first token, name) -> id."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int, str], int] = {}
        self._next = ROOT + 1

    def shared(self, parent: int, at_token: int, name: str) -> int:
        key = (parent, at_token, name)
        known = self._ids.get(key)
        if known is None:
            known = self._ids[key] = self.own()
        return known

    def own(self) -> int:
        """A branch that nobody else will name."""
        self._next += 1
        return self._next


class Extent:
    """Tokens [start, end) of a context lie on this branch; the last extent of a context is open-ended."""

    __slots__ = ("branch", "start")

    def __init__(self, branch: int, start: int) -> None:
        self.branch = branch
        self.start = start


class Context:
    """The path of one session, turn by turn."""

    def __init__(self, plan: SessionPlan, branches: Branches) -> None:
        self._plan = plan
        self._branches = branches
        self._extents: list[Extent] = []
        self._tokens = 0
        self.reach_tokens = 0  # at the end of the turn that began last
        self._hashes: dict[int, list[BlockHash]] = {}  # by block size
        self._spans: tuple[int, list[Span]] | None = None  # (block size, spans) as last asked for
        at = parent = 0
        for segment in plan.shared:
            if segment.tokens:
                parent = branches.shared(parent, at, segment.stream)
                self._extents.append(Extent(parent, at))
                at += segment.tokens
        self._extents.append(Extent(branches.own(), at))

    def spans(self, block_tokens: int) -> list[Span]:
        """The path in blocks; do not change it."""
        known = self._spans
        if known is None or known[0] != block_tokens:
            firsts = [extent.start // block_tokens for extent in self._extents]
            ends = [*firsts[1:], OPEN_END]
            branches = [extent.branch for extent in self._extents]
            known = self._spans = (block_tokens, list(zip(branches, firsts, ends, strict=True)))
        return known[1]

    @property
    def tokens(self) -> int:
        return self._tokens

    def begin_turn(self, turn: int) -> tuple[int, int]:
        """(prompt tokens, how many of them the session had computed or generated before)."""
        plan = self._plan.turns[turn]
        kept = carried_tokens(plan, self._tokens)
        if kept < self._tokens:
            self._cut(kept)
        self._tokens = kept + plan.new_tokens
        self.reach_tokens = self._tokens + plan.output_tokens
        return self._tokens, kept

    def end_turn(self, output_tokens: int) -> None:
        self._tokens += output_tokens

    def _cut(self, at_token: int) -> None:
        while len(self._extents) > 1 and self._extents[-1].start >= at_token:
            self._extents.pop()
        self._extents.append(Extent(self._branches.own(), at_token))
        if self._extents[0].start >= at_token:
            self._extents = [self._extents[-1]]
        self._hashes.clear()
        self._spans = None

    def hashes(self, block_tokens: int, tokens: int) -> list[BlockHash]:
        """Of the full blocks of the first `tokens` tokens, and maybe of some more; do not change it."""
        known = self._hashes.setdefault(block_tokens, [])
        blocks = tokens // block_tokens
        if len(known) < blocks:
            ends = [e.start // block_tokens for e in self._extents[1:]] + [blocks]
            for extent, end in zip(self._extents, ends, strict=True):
                base = extent.branch << BLOCK_BITS
                known.extend(base | i for i in range(len(known), min(end, blocks)))
        return known

    def prefix(self, chunk_tokens: int, tokens: int) -> tuple[int, ...]:
        """Chained hashes of the chunks of a prompt of this many tokens."""
        hashes = self.hashes(chunk_tokens, tokens)[: tokens // chunk_tokens]
        return tuple(h for h in hashes if isinstance(h, int))
