"""Residency against a naive twin: the same rules over plain dicts, everything looked up anew each time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.engines.kv_wire import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from tidegate.engines.residency import Residency

Life = tuple[str, int]  # a session, and which of its lives: it is forgotten and may come back


@dataclass
class NaiveBlock:
    parent: int | None
    tokens: int
    storer: Life | None
    owners: set[Life] = field(default_factory=set)


class NaiveResidency:
    def __init__(self) -> None:
        self.blocks: dict[int, NaiveBlock] = {}
        self.lives: dict[str, int] = {}

    def apply(self, event: KvEvent) -> None:
        match event:
            case BlockStored():
                self.store(event)
            case BlockRemoved():
                for block_hash in event.block_hashes:
                    if event.medium != "CPU":
                        self.blocks.pop(block_hash, None)
            case AllBlocksCleared():
                self.blocks.clear()

    def store(self, event: BlockStored) -> None:
        if event.medium == "CPU":
            return
        life = self.storing_life(event)
        parent = event.parent_block_hash
        for block_hash in event.block_hashes:
            if block_hash not in self.blocks:
                self.blocks[block_hash] = NaiveBlock(parent, event.block_size, life)
            if life:
                self.blocks[block_hash].owners.add(life)
            parent = block_hash
        above = event.parent_block_hash
        while life and above in self.blocks and life not in self.blocks[above].owners:
            self.blocks[above].owners.add(life)
            above = self.blocks[above].parent

    def storing_life(self, event: BlockStored) -> Life | None:
        session = event.session_id
        if session is None:
            return None
        life = (session, self.lives.get(session, 0))
        if self.alive(life):
            return life
        if all(block_hash in self.blocks for block_hash in event.block_hashes):
            return None
        self.lives[session] = life[1] + 1
        return (session, self.lives[session])

    def alive(self, life: Life) -> bool:
        return any(block.storer == life for block in self.blocks.values())

    def session_tokens(self) -> dict[str, int]:
        tokens = {}
        for session, number in self.lives.items():
            life = (session, number)
            if self.alive(life):
                tokens[session] = sum(block.tokens for block in self.blocks.values() if life in block.owners)
        return tokens


hashes = st.integers(0, 11)
sessions = st.sampled_from([None, "a", "b", "c", "d"])
stores = st.builds(
    BlockStored,
    block_hashes=st.lists(hashes, min_size=1, max_size=5, unique=True),
    parent_block_hash=st.none() | hashes,
    block_size=st.sampled_from([16, 32]),
    medium=st.sampled_from([None, "GPU", "GPU", "CPU"]),
    session_id=sessions,
)
removals = st.builds(
    BlockRemoved,
    block_hashes=st.lists(hashes, min_size=1, max_size=3),
    medium=st.sampled_from([None, "GPU", "GPU", "CPU"]),
)
clears = st.builds(AllBlocksCleared)
events = st.lists(st.one_of(stores, stores, stores, removals, removals, clears), max_size=40)


@settings(max_examples=150, deadline=None)
@given(events)
def test_residency_equals_its_naive_twin(events: list[KvEvent]) -> None:
    residency, naive = Residency(10**6), NaiveResidency()
    for event in events:
        residency.apply([event])
        naive.apply(event)
        assert residency.session_tokens() == naive.session_tokens()
        assert residency.resident_tokens == sum(block.tokens for block in naive.blocks.values())
        assert len(residency) == len(naive.blocks)


turns = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 4)), max_size=25)


@settings(max_examples=80, deadline=None)
@given(turns, st.integers(0, 3), st.data())
def test_a_session_holds_its_whole_chain_after_its_turn(
    turns: list[tuple[str, int]], shared: int, data: st.DataObject
) -> None:
    """As a real cache behaves: sessions share a first part, grow turn by turn, and the cache evicts from the leaves.
    What a session lost and another stored again is the other's, until the session's next turn."""
    residency = Residency(10**6)
    chains = {session: [("system", i) for i in range(shared)] for session in "abcd"}
    resident: set[tuple[str, int]] = set()

    def number(block: tuple[str, int]) -> int:
        return ["system", *"abcd"].index(block[0]) * 1000 + block[1]

    for session, length in turns:
        chain = chains[session]
        chain.extend([(session, len(chain) + i) for i in range(length)])
        first_missing = next(i for i, block in enumerate(chain) if block not in resident)
        new = chain[first_missing:]
        parent = number(chain[first_missing - 1]) if first_missing else None
        residency.apply(
            [
                BlockStored(
                    block_hashes=[number(b) for b in new], parent_block_hash=parent, block_size=1, session_id=session
                )
            ]
        )
        resident.update(new)
        assert residency.session_tokens()[session] == len(chain)
        for _ in range(data.draw(st.integers(0, 2))):
            leaves = [
                block
                for block in resident
                if not any(
                    block in chain[:-1] and chain[chain.index(block) + 1] in resident for chain in chains.values()
                )
            ]
            if leaves:
                leaf = data.draw(st.sampled_from(sorted(leaves)))
                resident.discard(leaf)
                residency.apply([BlockRemoved(block_hashes=[number(leaf)], medium="GPU")])
        for name, tokens in residency.session_tokens().items():
            assert 0 < tokens <= sum(block in resident for block in chains[name])


@given(st.lists(stores, max_size=60))
def test_memory_stays_within_the_limit(events: list[BlockStored]) -> None:
    residency = Residency(8)
    for event in events:
        residency.apply([event])
        assert len(residency) <= 8
