"""Which session holds which cached blocks, and what that means for the order in which free blocks are taken.

A session *claims* the hash of each block that its requests held when they ended. Claims are by hash and not by block:
two sessions that claim one hash share that prefix. A claim says nothing once its block holds something else, which
shows in the block's own hash; so nothing needs to be done when the engine evicts, and claims of evicted blocks are
swept up a few at a time. Each request's end costs time in proportion to the blocks that are new in it.

    release   the session is forgotten; blocks that nobody else claims come first in the queue, the deepest first
    demote    blocks that only demoted sessions claim come next, behind those that nobody claims; the first demoted are
              the first evicted. The session's next request, or protect, ends it
    protect   all of its free blocks come last, the deepest before the others

A release overtakes requests: while one of the session still runs (its client has left, and the engine has not noticed
yet), what it holds follows at its end. Blocks that are not free for a moment, since a transfer still reads them, are
looked at again at the next few calls.

Not thread-safe, and need not be: the engine's loop runs utility calls between its steps.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Generic

from tidegate.integrations.vllm_plugin.blocks import B, BlockHash, FreeOrder

MAX_SESSIONS = 4096  # remembered; many times what an engine runs at once. The longest unused are forgotten
WORTHLESS_RUN = 8192  # blocks looked at to find where demoted ones go: under a millisecond
SETTLE_TRIES = 8  # calls after which a block that is still in use is left to the engine
CHUNK = 256  # blocks compared at once
SWEEP_PER_NEW = 2  # claims checked for each new one: at most half of all claims are outdated
SWEEP_PER_END = 16  # and for each request, so that sessions without new blocks go as well


class Session(Generic[B]):
    __slots__ = ("blocks", "demoted", "tables")

    def __init__(self) -> None:
        self.blocks: dict[BlockHash, B] = {}  # what it claims, oldest first
        self.tables: list[list[B]] = []  # by KV cache group, of the last request that ended
        self.demoted = False


class Moved:
    """What a call did, in blocks."""

    __slots__ = ("kept", "known", "moved")

    def __init__(self) -> None:
        self.known = 0  # sessions that had claims
        self.moved = 0
        self.kept = 0  # resident, and left where they were: in use, or claimed by others


class Retention(Generic[B]):
    def __init__(self, order: FreeOrder[B], find: Callable[[BlockHash], B | None] | None = None) -> None:
        """`find` is asked for blocks whose contents may move to other blocks (Mamba states do)."""
        self.sessions: OrderedDict[str, Session[B]] = OrderedDict()  # the longest unused first
        self.counts: Counter[str] = Counter()  # blocks moved, by call
        self._order = order
        self._find = find
        self._claims: dict[BlockHash, int] = {}
        self._demoted: dict[BlockHash, int] = {}  # how many of the claims are of demoted sessions
        self._ending: dict[str, None] = {}  # requests that run although their session was released
        self._late: list[tuple[int, list[tuple[BlockHash, B]]]] = []
        self._to_sweep: OrderedDict[str, None] = OrderedDict()
        self._credit = 0  # claims that may be checked now

    # --- what the engine tells ----------------------------------------------------------------------------------
    def leaving(
        self, request: str, session: str, tables: Sequence[Sequence[B]], *, over: bool
    ) -> list[tuple[BlockHash, B]]:
        """A request is about to give its blocks back, for good or because it is preempted. What is returned is to be
        given to `drop` when they are back."""
        self._settle()
        if request not in self._ending:
            self._record(session, tables)
            return []
        if over:
            del self._ending[request]
        return [(block.block_hash, block) for table in tables for block in table if block.block_hash is not None]

    def cached(self, request: str, session: str, blocks: Iterable[B]) -> None:
        """Blocks of a running request, of a group that lets go of them before the request ends."""
        if request not in self._ending:
            known = self._known(session)
            self._credit += SWEEP_PER_NEW * self._claim(known, blocks)

    def drop(self, claims: list[tuple[BlockHash, B]]) -> None:
        """Blocks of a session that is over, as far as nobody claims them."""
        self._first(claims[::-1], 0)

    def reset(self) -> None:
        """The prefix cache is empty."""
        self.sessions.clear()
        self._claims.clear()
        self._demoted.clear()
        self._late.clear()
        self._to_sweep.clear()
        self._credit = 0

    # --- the calls ----------------------------------------------------------------------------------------------
    def release(self, names: Iterable[str], running: Collection[str] = ()) -> Moved:
        """`running` are requests of these sessions that have not ended."""
        self._settle()
        self._ending.update(dict.fromkeys(running))
        done = Moved()
        for name, session in self._those(names):
            done.known += 1
            mine = list(session.blocks.items())
            self._forget(name, session)
            moved = self._first(mine[::-1], 0)
            done.moved += moved
            done.kept += sum(1 for claim in mine if _resident(claim)) - moved
        self.counts["release"] += done.moved
        return done

    def demote(self, names: Iterable[str]) -> Moved:
        self._settle()
        done = Moved()
        for _, session in self._those(names):
            done.known += 1
            if not session.demoted:
                session.demoted = True
                for block_hash in session.blocks:
                    self._demoted[block_hash] = self._demoted.get(block_hash, 0) + 1
            mine = [claim for claim in session.blocks.items() if _resident(claim)]
            free = [block for block_hash, block in reversed(mine) if _free(block) and self._unused(block_hash)]
            self._order.behind(free, self._worthless, WORTHLESS_RUN)
            done.moved += len(free)
            done.kept += len(mine) - len(free)
        self.counts["demote"] += done.moved
        return done

    def protect(self, names: Iterable[str]) -> Moved:
        self._settle()
        done = Moved()
        for name, session in self._those(names):
            done.known += 1
            self._wake(session)
            self.sessions.move_to_end(name)
            mine = [claim for claim in session.blocks.items() if _resident(claim)]
            free = [block for _, block in reversed(mine) if _free(block)]
            self._order.last(free)
            done.moved += len(free)
            done.kept += len(mine) - len(free)
        self.counts["protect"] += done.moved
        return done

    def resident(self, names: Iterable[str] | None = None) -> dict[str, tuple[int, int, bool]]:
        """By session: blocks in the cache, those of them that others claim too, and whether it is demoted. Sessions
        without any are left out."""
        found: dict[str, tuple[int, int, bool]] = {}
        for name, session in self._those(self.sessions if names is None else names):
            blocks = [block_hash for block_hash, block in session.blocks.items() if block.block_hash == block_hash]
            if blocks:
                shared = sum(1 for block_hash in blocks if self._claims[block_hash] > 1)
                found[name] = (len(blocks), shared, session.demoted)
        return found

    @property
    def claims(self) -> int:
        """Of all sessions, outdated ones too."""
        return sum(len(session.blocks) for session in self.sessions.values())

    # --- claims -------------------------------------------------------------------------------------------------
    def _those(self, names: Iterable[str]) -> Iterator[tuple[str, Session[B]]]:
        """Of these sessions, the ones that are known."""
        for name in names:
            session = self.sessions.get(name)
            if session is not None:
                yield name, session

    def _record(self, name: str, tables: Sequence[Sequence[B]]) -> None:
        session = self._known(name)
        before, session.tables = session.tables, [_hashed(table) for table in tables]
        added = 0
        for group, table in enumerate(session.tables):
            same = self._same(session, before[group], table) if group < len(before) else 0
            added += self._claim(session, table[same:] if same else table)
        self._credit += SWEEP_PER_NEW * added + SWEEP_PER_END
        self._sweep()

    def _known(self, name: str) -> Session[B]:
        """It is in use: not demoted, and the last to be forgotten."""
        session = self.sessions.get(name)
        if session is None:
            if len(self.sessions) >= MAX_SESSIONS:
                longest_unused = next(iter(self.sessions))
                self._forget(longest_unused, self.sessions[longest_unused])
            session = self.sessions[name] = Session()
            self._to_sweep[name] = None
        elif session.demoted:
            self._wake(session)
        self.sessions.move_to_end(name)
        return session

    def _same(self, session: Session[B], before: list[B], now: list[B]) -> int:
        """How many blocks at the table's head are claimed already. A hash stands for the whole prefix: if the last of
        the blocks in common still has the hash that was claimed with it, so have those before it."""
        same = _common(before, now)
        for index in range(same - 1, -1, -1):
            block_hash = now[index].block_hash
            if block_hash is not None:
                return same if session.blocks.get(block_hash) is now[index] else 0
        return 0

    def _claim(self, session: Session[B], blocks: Iterable[B]) -> int:
        """How many of the claims are new."""
        mine, claims, before = session.blocks, self._claims, len(session.blocks)
        for block in blocks:
            block_hash = block.block_hash
            if block_hash is None:
                continue
            if block_hash not in mine:
                claims[block_hash] = claims.get(block_hash, 0) + 1
            mine[block_hash] = block
        return len(mine) - before

    def _forget(self, name: str, session: Session[B]) -> None:
        self._wake(session)
        del self.sessions[name]
        self._to_sweep.pop(name, None)
        for block_hash in session.blocks:
            _less(self._claims, block_hash)

    def _wake(self, session: Session[B]) -> None:
        if session.demoted:
            session.demoted = False
            for block_hash in session.blocks:
                _less(self._demoted, block_hash)

    def _unused(self, block_hash: BlockHash) -> bool:
        """Whether no session claims it but demoted ones."""
        return self._claims.get(block_hash, 0) == self._demoted.get(block_hash, 0)

    def _worthless(self, block: B) -> bool:
        block_hash = block.block_hash
        return block_hash is None or self._unused(block_hash)

    # --- moving -------------------------------------------------------------------------------------------------
    def _first(self, claims: Iterable[tuple[BlockHash, B]], tries: int) -> int:
        """Those that nobody claims, to the head of the queue; those of them that are still held, later."""
        free: list[B] = []
        late: list[tuple[BlockHash, B]] = []
        for claim in claims:
            block_hash, block = claim
            if block.block_hash != block_hash:
                moved = self._find(block_hash) if self._find is not None else None
                if moved is None:
                    continue
                block = moved
            if block_hash in self._claims or block.is_null:
                continue
            if block.ref_cnt == 0:
                free.append(block)
            else:
                late.append((block_hash, block))
        if late and tries < SETTLE_TRIES:
            self._late.append((tries + 1, late))
        self._order.first(free)
        return len(free)

    def _settle(self) -> None:
        if self._late:
            late, self._late = self._late, []
            for tries, claims in late:
                self.counts["release"] += self._first(claims, tries)

    # --- forgetting ---------------------------------------------------------------------------------------------
    def _sweep(self) -> None:
        """Check as many claims as there is credit for, a session at a time; one that overdraws it is paid for later."""
        for _ in range(len(self._to_sweep)):
            if self._credit <= 0:
                return
            name, _ = self._to_sweep.popitem(last=False)
            session = self.sessions[name]
            self._credit -= len(session.blocks) + 1
            gone = [claim for claim in session.blocks.items() if not _resident(claim)]
            for block_hash, _ in gone:
                moved = self._find(block_hash) if self._find is not None else None
                if moved is not None:
                    session.blocks[block_hash] = moved
                    continue
                del session.blocks[block_hash]
                _less(self._claims, block_hash)
                if session.demoted:
                    _less(self._demoted, block_hash)
            if gone:
                session.tables = []
            if session.blocks:
                self._to_sweep[name] = None
            else:
                del self.sessions[name]
        self._credit = min(self._credit, 0)


def _resident(claim: tuple[BlockHash, B]) -> bool:
    block_hash, block = claim
    return block.block_hash == block_hash


def _free(block: B) -> bool:
    return block.ref_cnt == 0 and not block.is_null


def _hashed(table: Sequence[B]) -> list[B]:
    """Without the blocks at its end that are not full, since the next request has others there, and without those at
    its head that have left a sliding window."""
    first, end = 0, len(table)
    while end and table[end - 1].block_hash is None:
        end -= 1
    if end and table[0].block_hash is None:
        first = next(index for index in range(end) if table[index].block_hash is not None)
    return list(table[first:end])


def _common(before: list[B], now: list[B]) -> int:
    """Length of the common head. Equality of blocks begins with their numbers, and lists compare identity first."""
    length = min(len(before), len(now))
    same = 0
    while same < length and before[same : same + CHUNK] == now[same : same + CHUNK]:
        same += CHUNK
    while same < length and before[same] is now[same]:
        same += 1
    return min(same, length)


def _less(counts: dict[BlockHash, int], key: BlockHash) -> None:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
