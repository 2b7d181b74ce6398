"""The paged prefix cache told in runs of blocks: the same evictions as `sim.blocks`, without a block.

What makes it possible: a request frees its blocks last to first, and a hit takes a prefix. So what is resident of a
branch (see `sim.contexts`) is always its blocks [first, resident): those that requests hold come first, [first, held);
the rest is free and lies in the eviction queue as a few runs, the outer ones older, each evicted from its end. An
allocation takes blocks without contents first, and then shortens runs from the oldest.

One thing is simplified: a block that is computed although it is resident (the last block of a fully cached prompt) has
two copies in the real pool; here the second is held without a name and goes to the queue as such.
"""

from __future__ import annotations

from collections import OrderedDict

from tidegate.sim.contexts import Context
from tidegate.sim.fast_claims import Claims


class Branch:
    __slots__ = ("first", "held", "id", "resident", "runs", "users")

    def __init__(self, id: int, first: int) -> None:
        self.id = id
        self.first = first  # the block in which it begins
        self.resident = first
        self.held = first
        self.users: dict[int, int] = {}  # requests by where their hold ends
        self.runs: list[Run] = []  # free ones; the last is the innermost


class Run:
    """Free blocks [low, high) of a branch, or of none."""

    __slots__ = ("branch", "high", "low")

    def __init__(self, branch: Branch | None, low: int, high: int) -> None:
        self.branch = branch
        self.low = low
        self.high = high


class Path:
    """A request's prefix: the branches that it goes through, and what it holds of them."""

    __slots__ = ("held", "session", "spans", "spare", "stored", "total")

    def __init__(self, context: Context, block_size: int, session: str | None = None) -> None:
        self.session = session  # whose blocks they are, where that matters
        self.spans = context.spans(block_size)
        self.held: list[tuple[Branch, int]] = []  # (branch, end of the hold), along the path
        self.stored = 0  # full blocks that it holds under their hashes
        self.spare = 0  # second copies
        self.total = 0  # blocks in all


class FastCache:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1  # the null block is never given out
        self.evictions = 0
        self.claims: Claims | None = None  # of sessions, if they are released
        self._empty = num_blocks - 1  # free, without contents
        self._branches: dict[int, Branch] = {}
        self._queue: OrderedDict[Run, None] = OrderedDict()

    @property
    def used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    @property
    def resident(self) -> int:
        """Held or cached blocks."""
        return self.num_blocks - 1 - self._empty

    # --- look-ups ----------------------------------------------------------------------------------------------
    def hit(self, path: Path, max_blocks: int) -> tuple[int, int]:
        """(blocks of the longest cached prefix, how many of them are free)."""
        blocks = free = 0
        branches = self._branches
        for id, first, end in path.spans:
            if end > max_blocks:
                end = max_blocks
                if end <= first:
                    continue
            elif end == first:
                continue
            branch = branches.get(id)
            if branch is None:
                break
            blocks = branch.resident if branch.resident < end else end
            if blocks > branch.held:
                free += blocks - branch.held
            if blocks < end:
                break
        return blocks, free

    # --- a request's blocks ------------------------------------------------------------------------------------
    def touch(self, path: Path, blocks: int) -> None:
        """Hold the first blocks of its path: a hit."""
        if blocks:
            for id, first, end in path.spans:
                if end > blocks:
                    end = blocks
                if end > first:
                    branch = self._branches[id]
                    self._take(branch, end)
                    self._use(branch, end)
                    path.held.append((branch, end))
        path.stored = path.total = blocks

    def allocate(self, path: Path, blocks: int) -> None:
        path.total += blocks
        self.claim(blocks)

    def claim(self, blocks: int) -> None:
        """Take free blocks, the least worth keeping first; whose they are is told by the path later."""
        if blocks > self.num_free:
            raise ValueError(f"cannot allocate {blocks} blocks: {self.num_free} are free")
        self.num_free -= blocks
        if blocks <= self._empty:
            self._empty -= blocks
            return
        blocks -= self._empty
        self._empty = 0
        queue = self._queue
        while blocks:
            run = next(iter(queue))
            taken = min(blocks, run.high - run.low)
            blocks -= taken
            run.high -= taken
            self.evictions += taken
            branch = run.branch
            if branch is not None:
                branch.resident = run.high
            if run.high == run.low:
                del queue[run]
                if branch is not None:
                    branch.runs.remove(run)
                    self._drop_if_gone(branch)

    def store(self, path: Path, full: int) -> None:
        """Its blocks up to this one are full: they can be found from now on."""
        stored = path.stored
        if full <= stored:
            return
        for id, first, end in path.spans:
            if end > full:
                end = full
            if end > first and end > stored:
                self._extend(path, id, first, end)
        path.stored = full

    def free(self, path: Path) -> None:
        """All its blocks, the last one first."""
        claims, session = self.claims, path.session
        if claims is not None and session is not None:
            for id, first, end in path.spans:
                if first < path.stored:
                    claims.note(session, id, min(end, path.stored))
        nameless = path.total - path.stored
        freed = nameless + path.spare
        self._empty += nameless
        if path.spare:
            self._queue[Run(None, 0, path.spare)] = None
        for branch, end in reversed(path.held):
            freed += self._release(branch, end)
        self.num_free += freed
        path.held.clear()
        path.stored = path.total = path.spare = 0

    def reset(self) -> None:
        """Nothing can be found any more. No request may hold blocks."""
        self._empty = self.num_free
        self._branches.clear()
        self._queue.clear()
        if self.claims is not None:
            self.claims.clear()

    def release(self, session: str) -> None:
        """It is over: what it alone claims is evicted first, the deepest before the rest."""
        if self.claims is not None:
            for id, low in self.claims.release(session):
                branch = self._branches.get(id)
                if branch is not None:
                    self._put_first(branch, low)

    def _put_first(self, branch: Branch, low: int) -> None:
        """Its free blocks from this one on."""
        queue, runs = self._queue, branch.runs
        for index in range(len(runs) - 1, -1, -1):
            run = runs[index]
            if run.high <= low:
                continue
            if run.low < low:  # what others claim of it stays where it is
                outer = Run(branch, low, run.high)
                run.high = low
                runs.insert(index, outer)
                queue[outer] = None
                run = outer
            queue.move_to_end(run, last=False)

    # --- branches ----------------------------------------------------------------------------------------------
    def _extend(self, path: Path, id: int, first: int, end: int) -> None:
        branch = self._branches.get(id)
        if branch is None:
            branch = self._branches[id] = Branch(id, first)
        before = first
        if path.held and path.held[-1][0] is branch:
            before = path.held.pop()[1]
            self._unuse(branch, before)
        start = path.stored if path.stored > before else before
        if branch.resident > start:
            self._double(branch, path, start, end)
        if end > branch.resident:
            branch.resident = end
        self._use(branch, end)
        path.held.append((branch, end))

    def _double(self, branch: Branch, path: Path, start: int, end: int) -> None:
        """It computed blocks that are resident. Free ones lose their name, where they lie; others' stay theirs."""
        path.spare += max(0, min(branch.held, end) - start)
        while branch.runs and branch.runs[-1].low < end:
            run = branch.runs[-1]
            if run.high <= end:
                run.branch = None
                branch.runs.pop()
            else:
                self._queue[Run(None, 0, end - run.low)] = None
                run.low = end

    def _use(self, branch: Branch, end: int) -> None:
        branch.users[end] = branch.users.get(end, 0) + 1
        if end > branch.held:
            branch.held = end

    def _unuse(self, branch: Branch, end: int) -> None:
        left = branch.users[end] - 1
        if left:
            branch.users[end] = left
            return
        del branch.users[end]
        if end == branch.held:
            branch.held = max(branch.users, default=branch.first)

    def _take(self, branch: Branch, end: int) -> None:
        """Out of the queue, up to this block."""
        while branch.runs and branch.runs[-1].low < end:
            run = branch.runs[-1]
            upto = min(run.high, end)
            self.num_free -= upto - run.low
            run.low = upto
            if run.low == run.high:
                del self._queue[run]
                branch.runs.pop()

    def _release(self, branch: Branch, end: int) -> int:
        """A request lets go of [first, end); how many blocks nobody holds any more."""
        held = branch.held
        self._unuse(branch, end)
        if branch.held == held:
            return 0
        run = Run(branch, branch.held, held)
        branch.runs.append(run)
        self._queue[run] = None
        return held - branch.held

    def _drop_if_gone(self, branch: Branch) -> None:
        if branch.resident == branch.first and not branch.users:
            self._branches.pop(branch.id, None)
