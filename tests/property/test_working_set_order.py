"""AdmissionOrder against a list that is sorted and summed anew each time."""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidegate.policy.entities import ClassLedger, Session
from tidegate.policy.params import CoreParams
from tidegate.policy.working_set_order import ZERO, AdmissionOrder, Row

ROWS = st.tuples(st.integers(0, 9000), st.integers(-5000, 9000), st.integers(0, 3))
KLASS = ClassLedger("agentic", 0, CoreParams())


class OrderMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.order = AdmissionOrder()
        self.naive: dict[Session, tuple[int, Row]] = {}
        self.ranks = 0

    def sorted(self) -> list[Session]:
        return sorted(self.naive, key=lambda session: self.naive[session][0])

    def _enter(self, rank: int, row: Row) -> None:
        session = Session(f"s{self.ranks}-{rank}", KLASS, None, 0, 0.0)
        self.order.add(session, rank, row)
        self.naive[session] = rank, row

    @rule(row=ROWS, skipped=st.integers(1, 4))
    def enter(self, row: Row, skipped: int) -> None:
        self.ranks += skipped
        self._enter(self.ranks, row)

    @rule(row=ROWS, back=st.integers(0, 60))
    def enter_with_an_older_rank(self, row: Row, back: int) -> None:
        rank = self.ranks - back
        if rank > 0 and rank not in {taken for taken, _ in self.naive.values()}:
            self._enter(rank, row)

    @precondition(lambda self: self.naive)
    @rule(index=st.integers(0, 99), row=ROWS)
    def change(self, index: int, row: Row) -> None:
        session = self.sorted()[index % len(self.naive)]
        self.order.set(session, row)
        self.naive[session] = self.naive[session][0], row

    @precondition(lambda self: self.naive)
    @rule(index=st.integers(0, 99))
    def leave(self, index: int) -> None:
        session = self.sorted()[index % len(self.naive)]
        self.order.remove(session)
        del self.naive[session]

    @invariant()
    def sums_are_those_of_the_list(self) -> None:
        sums: Row = ZERO
        for session in self.sorted():
            row = self.naive[session][1]
            assert self.order.row(session) == row
            sums = sums[0] + row[0], sums[1] + row[1], sums[2] + row[2]
            assert self.order.older(session) == sums
        assert self.order.total == sums
        assert len(self.order) == len(self.naive)


OrderMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=60,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
test_sums_over_the_older_sessions_match_a_sorted_list = OrderMachine.TestCase
