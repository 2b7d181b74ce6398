"""The table of tips against a naive twin that keeps whole sequences and compares them all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tidegate.server.lineage import Lineage, Sequence, Turn
from tidegate.server.prefix import MAX_CHUNKS

UNIT, CHUNK = 2, 6  # small, so that a few units make several chunks


def sequence(units: list[int], kind: bytes = b"ids") -> Sequence:
    return Sequence(
        kind, bytes(itertools.chain.from_iterable((unit, 0) for unit in units)), UNIT, CHUNK, kind == b"chat"
    )


def ids() -> Callable[[], str]:
    count = itertools.count()
    return lambda: f"session {next(count)}"


@dataclass
class Naive:
    """Tips as whole sequences, in the order in which they were put."""

    max_sessions: int
    new_id: Callable[[], str]
    tips: dict[str, list[tuple[bytes, bytes, bool]]] = field(default_factory=dict)  # kind, data, weak

    def arrived(self, prompt: Sequence) -> tuple[str, list[tuple[bytes, bytes, bool]]]:
        found: dict[bytes, list[tuple[str, bool]]] = {}
        for session, tips in self.tips.items():
            for kind, data, weak in tips:
                if kind == prompt.kind and prompt.data.startswith(data) and len(data) < len(prompt.data):
                    found.setdefault(data, []).append((session, weak))
        for data in sorted(found, key=len, reverse=True):
            strong = [session for session, weak in found[data] if not weak]
            if strong or len(found[data]) == 1:
                session = strong[0] if strong else found[data][0][0]
                return session, self.tips.pop(session)
        return self.new_id(), []

    def ended(self, session: str, tips: list[tuple[bytes, bytes, bool]]) -> None:
        if tips:
            self.tips[session] = list(dict.fromkeys(tips))
            while len(self.tips) > self.max_sessions:
                del self.tips[next(iter(self.tips))]


class LineageMachine(RuleBasedStateMachine):
    turns = Bundle("turns")

    @initialize(max_sessions=st.integers(1, 6))
    def start(self, max_sessions: int) -> None:
        self.table = Lineage(max_sessions, ids())
        self.naive = Naive(max_sessions, ids())
        self.seen: list[list[int]] = [[]]  # what prompts may go on from

    units = st.lists(st.integers(0, 1), max_size=5)

    @rule(target=turns, base=st.integers(0, 50), more=units, kind=st.sampled_from([b"ids", b"chat"]))
    def arrive(self, base: int, more: list[int], kind: bytes) -> tuple[Turn, list[tuple[bytes, bytes, bool]]]:
        units = [*self.seen[base % len(self.seen)], *more][:40]
        prompt = sequence(units, kind)
        self.seen.append(units)
        turn = self.table.arrived(prompt)
        session, taken = self.naive.arrived(prompt)
        assert turn.session == session
        assert turn.continued == bool(taken)
        return turn, taken

    @rule(turn=consumes(turns), replies=st.lists(units, max_size=3))
    def answered(self, turn: tuple[Turn, list[tuple[bytes, bytes, bool]]], replies: list[list[int]]) -> None:
        made, _ = turn
        prompt = made.prompt
        data = [sequence(reply).data for reply in replies]
        self.table.ended(made, data)
        tips = [(prompt.kind, prompt.data + reply, False) for reply in data]
        if not data or prompt.kind == b"chat":
            tips.append((prompt.kind, prompt.data, True))
        self.naive.ended(made.session, tips)
        self.seen += [[unit for unit in (prompt.data + reply)[::UNIT]] for reply in data]

    @rule(turn=consumes(turns))
    def came_to_nothing(self, turn: tuple[Turn, list[tuple[bytes, bytes, bool]]]) -> None:
        made, taken = turn
        self.table.ended(made, None)
        self.naive.ended(made.session, taken)

    @invariant()
    def no_tip_is_lost_or_left(self) -> None:
        if not hasattr(self, "table"):
            return
        table = self.table
        assert set(table._sessions) == set(self.naive.tips)
        listed = sorted(tip for tips in table._sessions.values() for tip in tips)
        found = sorted(tip for rests in table._tips.values() for tips in rests.values() for tip in tips)
        assert listed == found
        assert all(rests and all(rests.values()) for rests in table._tips.values())


TestLineage = LineageMachine.TestCase
TestLineage.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("length", [MAX_CHUNKS * CHUNK // UNIT, MAX_CHUNKS * CHUNK // UNIT + 100])
def test_what_is_too_long_for_the_hashes_is_never_mistaken(length: int) -> None:
    table = Lineage(4, ids())
    long = [1] * length
    first = table.arrived(sequence(long))
    table.ended(first, [sequence([0]).data])
    assert not table.arrived(sequence([*long, 0, 1])).continued
    assert len(table) == 0
