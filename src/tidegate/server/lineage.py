"""Which session is this prompt a turn of? For clients that name none: by what the prompt begins with.

A turn that was answered leaves a tip: its prompt and the reply to it. A prompt that goes on from a tip is the next turn
of the tip's session, and takes the tip away: of two prompts that go on from the same one, the second is a branch, and
so a session of its own. Where the reply could not be read, or is of a kind that clients edit before they send it back
(chats: they cut what the model thought), the prompt alone is a tip too, a weak one: it counts if it is one session's
only, since the samples of a group all begin with the same prompt.

A turn that came to nothing gives its tips back, so that it can be asked again. A prompt that is no longer than a tip
does not go on from it. Longest tip first; of equal ones the oldest.

Sequences are bytes: ids of four bytes, text, or a digest for each message of a chat. A tip is found by the chained hash
of its whole chunks (`prefix`) and then by the bytes behind them. So a prompt costs one hash over its length, and, at
each chunk that some tip ends in, one look for each length that the rest of a chunk can have, at most.

Bounded by sessions, the longest unused first. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tidegate.server.prefix import MAX_CHUNKS, chunk_hashes


class Sequence(NamedTuple):
    """A prompt, or a prompt with its reply."""

    kind: bytes  # sequences of other kinds have nothing in common with it
    data: bytes
    unit_bytes: int  # of an id, a byte of text, a message: rests of chunks are whole units
    chunk_bytes: int  # a multiple of `unit_bytes`; the same for all of a kind
    edited: bool = False  # clients may change a reply before they send it back

    @property
    def too_long(self) -> bool:
        return len(self.data) >= MAX_CHUNKS * self.chunk_bytes


class _Tip(NamedTuple):
    session: str
    key: int
    rest: bytes
    weak: bool


class Turn:
    """One request, from its arrival to its end."""

    __slots__ = ("continued", "prompt", "session", "table", "taken")

    def __init__(self, table: Lineage, session: str, prompt: Sequence, taken: list[_Tip], *, continued: bool) -> None:
        self.table = table  # that is owed its end
        self.session = session
        self.prompt = prompt
        self.taken = taken  # tips, to be given back if it comes to nothing
        self.continued = continued


class Lineage:
    def __init__(self, max_sessions: int, new_id: Callable[[], str]) -> None:
        self.opened = 0  # turns that began a session
        self.continued = 0  # turns that went on with one
        self._max_sessions = max_sessions
        self._new_id = new_id
        self._tips: dict[int, dict[bytes, list[_Tip]]] = {}  # by the hash of their whole chunks, then by the rest
        self._sessions: OrderedDict[str, list[_Tip]] = OrderedDict()  # tips of those that have no turn under way

    def __len__(self) -> int:
        """Sessions that can be gone on with."""
        return len(self._sessions)

    def arrived(self, prompt: Sequence) -> Turn:
        found = None if prompt.too_long else self._longest(prompt)
        if found is None:
            self.opened += 1
            return Turn(self, self._new_id(), prompt, [], continued=False)
        self.continued += 1
        return Turn(self, found, prompt, self._take(found), continued=True)

    def ended(self, turn: Turn, replies: Iterable[bytes] | None) -> None:
        """`replies`: what was generated, as the next prompt will have it, one for each choice; empty if that could not
        be read. None: the turn came to nothing. Once for each turn."""
        if replies is None:
            self._put(turn.session, turn.taken)
            return
        tips = [self._tip(turn, reply, weak=False) for reply in replies]
        if turn.prompt.edited or not tips:
            tips.append(self._tip(turn, b"", weak=True))
        self._put(turn.session, [tip for tip in tips if tip is not None])

    # --- inside ------------------------------------------------------------------------------------------------------
    def _longest(self, prompt: Sequence) -> str | None:
        keys = _keys(prompt)
        for chunks in range(len(keys) - 1, -1, -1):
            rests = self._tips.get(keys[chunks])
            if rests is None:
                continue
            at = chunks * prompt.chunk_bytes
            for rest in _rests(rests, prompt, at):
                if at + len(rest) == len(prompt.data):
                    continue  # the same prompt once more
                tips = rests[rest]
                strong = next((tip for tip in tips if not tip.weak), None)
                if strong is not None or len(tips) == 1:
                    return (strong or tips[0]).session
        return None

    def _tip(self, turn: Turn, reply: bytes, *, weak: bool) -> _Tip | None:
        whole = turn.prompt._replace(data=turn.prompt.data + reply)
        if whole.too_long:
            return None
        keys = _keys(whole)
        return _Tip(turn.session, keys[-1], whole.data[(len(keys) - 1) * whole.chunk_bytes :], weak)

    def _put(self, session: str, tips: list[_Tip]) -> None:
        if not tips:
            return
        tips = list(dict.fromkeys(tips))  # choices may be alike
        self._sessions[session] = tips
        for tip in tips:
            self._tips.setdefault(tip.key, {}).setdefault(tip.rest, []).append(tip)
        while len(self._sessions) > self._max_sessions:
            self._take(next(iter(self._sessions)))

    def _take(self, session: str) -> list[_Tip]:
        tips = self._sessions.pop(session)
        for tip in tips:
            rests = self._tips[tip.key]
            rests[tip.rest].remove(tip)
            if not rests[tip.rest]:
                del rests[tip.rest]
            if not rests:
                del self._tips[tip.key]
        return tips


def _keys(sequence: Sequence) -> tuple[int, ...]:
    """Hashes of its first 0, 1, 2, ... whole chunks."""
    return chunk_hashes(sequence.data, sequence.chunk_bytes, sequence.kind)


def _rests(known: dict[bytes, list[_Tip]], prompt: Sequence, at: int) -> list[bytes]:
    """Those of the known rests that the prompt goes on with at `at`, the longest first."""
    data = prompt.data
    if len(known) * prompt.unit_bytes <= prompt.chunk_bytes:
        return sorted((rest for rest in known if data.startswith(rest, at)), key=len, reverse=True)
    end = min(len(data), at + prompt.chunk_bytes - 1)
    lengths = range((end - at) // prompt.unit_bytes * prompt.unit_bytes, -1, -prompt.unit_bytes)
    return [rest for length in lengths if (rest := data[at : at + length]) in known]
