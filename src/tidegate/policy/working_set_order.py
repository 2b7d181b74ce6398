"""Sessions of one replica in order of admission, with sums over the older ones in O(log n).

Each session has a row of numbers (`COLUMNS`); `older(session)` sums the rows of the sessions admitted no later than
it. A Fenwick tree over places: a new session takes the next place, a leaving one empties its place, and when the places
are used up the sessions left are laid out afresh, which costs O(1) per place used. A session that comes with an older
rank (it moved here) is put into its rank by a fresh layout, O(n): moves are rare.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from tidegate.policy.entities import Session

COLUMNS: Final = 3
Row: TypeAlias = tuple[int, int, int]  # integers, so that sums come back to exactly what they were
ZERO: Final[Row] = (0, 0, 0)
_SMALLEST: Final = 16  # places


class AdmissionOrder:
    __slots__ = ("_last_rank", "_places", "_ranks", "_rows", "_tree", "total")

    def __init__(self) -> None:
        self._places: dict[Session, int] = {}  # from 1, in order of rank
        self._ranks: dict[Session, int] = {}
        self._lay_out([], {})

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, session: Session) -> bool:
        return session in self._places

    def _lay_out(self, sessions: list[Session], rows: dict[Session, Row]) -> None:
        places = max(_SMALLEST, 2 * len(sessions))
        self._rows: list[Row] = [ZERO]  # by place used; places count from 1
        self._tree = [[0] * (places + 1) for _ in range(COLUMNS)]
        self._last_rank = 0  # of the last place used
        self._places = {}
        self.total = ZERO
        for session in sessions:
            self._take_place(session, rows[session])

    def _take_place(self, session: Session, row: Row) -> None:
        self._places[session] = len(self._rows)
        self._last_rank = self._ranks[session]
        self._rows.append(ZERO)
        self.set(session, row)

    def add(self, session: Session, rank: int, row: Row) -> None:
        """Ranks are unique and positive; the newest session has the largest."""
        self._ranks[session] = rank
        if rank > self._last_rank and len(self._rows) < len(self._tree[0]):
            self._take_place(session, row)
            return
        rows = {other: self._rows[place] for other, place in self._places.items()}
        rows[session] = row
        self._lay_out(sorted(rows, key=self._ranks.__getitem__), rows)

    def remove(self, session: Session) -> None:
        self.set(session, ZERO)
        del self._places[session], self._ranks[session]

    def set(self, session: Session, row: Row) -> None:
        place = self._places[session]
        old = self._rows[place]
        if row == old:
            return
        self._rows[place] = row
        self.total = (
            self.total[0] + row[0] - old[0],
            self.total[1] + row[1] - old[1],
            self.total[2] + row[2] - old[2],
        )
        for tree, new, was in zip(self._tree, row, old, strict=True):
            delta = new - was
            if delta:
                at = place
                while at < len(tree):
                    tree[at] += delta
                    at += at & -at

    def row(self, session: Session) -> Row:
        return self._rows[self._places[session]]

    def rank(self, session: Session) -> int:
        return self._ranks[session]

    def older(self, session: Session) -> Row:
        """The sum of the rows of the sessions admitted no later, its own included."""
        at = self._places[session]
        first, second, third = self._tree
        a = b = c = 0
        while at:
            a += first[at]
            b += second[at]
            c += third[at]
            at &= at - 1
        return a, b, c
