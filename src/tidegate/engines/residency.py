"""Which session's KV is resident, from one engine's stream of KV events. Pure: no sockets, no clock.

A block is known by its hash, which chains over all tokens before it, so blocks form a tree. An event says which session
stored the blocks, but a hit stores nothing: a session that finds its first 1,000 tokens in the cache is named only in
the events of what comes after them. So a session owns

    the blocks that it stored, and the blocks that a store event of it names, and
    their ancestors: from the event's parent upwards, to the first block that it owns already or that is not resident.

Each block that a session comes to own costs one step, so a batch costs what it changes. A block may have many owners
and counts in full for each. A session is forgotten when the last block that it stored is gone; what it merely shared
with others is then no reason to list it.

Only the GPU's blocks count. Other media (host, disk, remote) are told apart by name. A model with several kinds of
layers stores its tokens once for each group of layers: one group, of full attention if there is one, is counted.
Storing a resident block again changes nothing but its owners. Caches evict leaves first, so children go before parents.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.engines.kv_wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent
from tidegate.types import SessionId

GPU = "GPU"


class _Session:
    __slots__ = ("alone", "session", "stored", "tokens")

    def __init__(self, session: SessionId) -> None:
        self.session = session
        self.tokens = 0
        self.stored = 0  # resident blocks that it stored; 0: forgotten, though it may still stand in sets of owners
        self.alone = frozenset((self,))


_Owners = frozenset[_Session]
_NOBODY: _Owners = frozenset()


class _Block:
    __slots__ = ("owners", "parent", "storer", "tokens")

    def __init__(self, parent: BlockHash | None, tokens: int, storer: _Session | None) -> None:
        self.parent = parent
        self.tokens = tokens
        self.storer = storer
        self.owners: _Owners = storer.alone if storer else _NOBODY


class Residency:
    def __init__(self, block_limit: int) -> None:
        """`block_limit` bounds the memory; beyond it everything is dropped and `overflowed` is set."""
        self.overflowed = False
        self.resident_tokens = 0
        self.stored_tokens = 0  # since the start
        self.evicted_tokens = 0  # since the start; a cleared cache is not evicted
        self.cleared = 0  # times
        self._block_limit = block_limit
        self._blocks: dict[BlockHash, _Block] = {}
        self._sessions: dict[SessionId, _Session] = {}
        self._elsewhere: dict[str, dict[BlockHash, int]] = {}
        self._group: int | None = None
        self._group_is_full = False

    def __len__(self) -> int:
        return len(self._blocks)

    def session_tokens(self) -> dict[SessionId, int]:
        return {name: session.tokens for name, session in self._sessions.items()}

    def offloaded_tokens(self) -> dict[str, int]:
        """By medium other than the GPU."""
        return {medium: sum(blocks.values()) for medium, blocks in self._elsewhere.items()}

    def apply(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self.clear()
                    self.cleared += 1

    def clear(self) -> None:
        self.overflowed = False
        self.resident_tokens = 0
        self._blocks.clear()
        self._sessions.clear()
        self._elsewhere.clear()

    # --- stores -----------------------------------------------------------------------------------------------------
    def _store(self, event: BlockStored) -> None:
        if event.locality == "REMOTE" or not event.block_hashes:
            return
        if event.medium not in (None, GPU):
            self._store_elsewhere(event)
        elif self._counts(event):
            self._store_on_gpu(event)
        if len(self._blocks) + sum(map(len, self._elsewhere.values())) > self._block_limit:
            self.clear()
            self.overflowed = True

    def _store_elsewhere(self, event: BlockStored) -> None:
        blocks = self._elsewhere.setdefault(event.medium or "", {})
        for block_hash in event.block_hashes:
            blocks[block_hash] = event.block_size

    def _counts(self, event: BlockStored) -> bool:
        """Whether the event is of the group of layers that is counted."""
        if self._group is None:
            self._group, self._group_is_full = event.group_idx, event.full_attention
        elif event.full_attention and not self._group_is_full and event.group_idx != self._group:
            self.clear()  # the group counted so far forgets old tokens (a sliding window, say)
            self._group, self._group_is_full = event.group_idx, True
        return event.group_idx == self._group

    def _store_on_gpu(self, event: BlockStored) -> None:
        blocks = self._blocks
        session = self._storing_session(event)
        widened: dict[_Owners, _Owners] = {}
        parent = event.parent_block_hash
        for block_hash in event.block_hashes:
            known = blocks.get(block_hash)
            if known is None:
                blocks[block_hash] = _Block(parent, event.block_size, session)
                self.resident_tokens += event.block_size
                self.stored_tokens += event.block_size
                if session is not None:
                    session.tokens += event.block_size
                    session.stored += 1
            elif session is not None:
                _own(known, session, widened)
            parent = block_hash
        if session is None:
            return
        ancestor = event.parent_block_hash
        while ancestor is not None:
            block = blocks.get(ancestor)
            if block is None or not _own(block, session, widened):
                break
            ancestor = block.parent

    def _storing_session(self, event: BlockStored) -> _Session | None:
        """The event's session; None too for one that neither holds nor stores a block of its own."""
        if event.session_id is None:
            return None
        session = self._sessions.get(event.session_id)
        if session is None and any(block_hash not in self._blocks for block_hash in event.block_hashes):
            session = self._sessions[event.session_id] = _Session(event.session_id)
        return session

    # --- removals ---------------------------------------------------------------------------------------------------
    def _remove(self, event: BlockRemoved) -> None:
        if event.locality == "REMOTE":
            return
        copies = event.remaining_copy_counts
        for index, block_hash in enumerate(event.block_hashes):
            if copies is not None and index < len(copies) and copies[index] > 0:
                continue
            if event.medium not in (None, GPU):
                self._elsewhere.get(event.medium or "", {}).pop(block_hash, None)
            elif event.group_idx == self._group:
                self._evict(block_hash)

    def _evict(self, block_hash: BlockHash) -> None:
        block = self._blocks.pop(block_hash, None)
        if block is None:
            return
        self.resident_tokens -= block.tokens
        self.evicted_tokens += block.tokens
        for owner in block.owners:
            owner.tokens -= block.tokens
        storer = block.storer
        if storer is not None:
            storer.stored -= 1
            if not storer.stored:
                del self._sessions[storer.session]


def _own(block: _Block, session: _Session, widened: dict[_Owners, _Owners]) -> bool:
    """False if it owned it already. Neighbours in a chain mostly have the same owners, and then share one set; sessions
    that were forgotten leave a set when it is widened."""
    owners = block.owners
    if session in owners:
        return False
    wider = widened.get(owners)
    if wider is None:
        wider = widened[owners] = frozenset(o for o in owners if o.stored) | session.alone
    block.owners = wider
    session.tokens += block.tokens
    return True
