"""Symbolic token streams made real: the same name and seed give the same token ids, a longer read extends a shorter.

Ids are uniform over [FIRST_ID, vocab): two streams share a block of 16 tokens by chance with probability vocab^-16,
so every prefix hit is a true one.
"""

from __future__ import annotations

import random
from array import array

from tidegate.sim.workload import SessionPlan

# Tokenizers keep their control tokens at the bottom; a prompt must not contain an end-of-sequence id.
FIRST_ID = 16


class TokenStreams:
    def __init__(self, seed: int, vocab_size: int) -> None:
        if vocab_size <= FIRST_ID:
            raise ValueError(f"a vocabulary of {vocab_size} ids has no room above the {FIRST_ID} control tokens")
        self._seed = seed
        self._span = vocab_size - FIRST_ID
        self._shared: dict[str, list[int]] = {}

    def ids(self, stream: str, tokens: int) -> list[int]:
        """The first ids of a stream."""
        words = array("I", random.Random(f"{self._seed}/{stream}").randbytes(4 * tokens))
        return [FIRST_ID + word % self._span for word in words]

    def shared_ids(self, stream: str, tokens: int) -> list[int]:
        """The same, remembered: many sessions start with it."""
        known = self._shared.get(stream, [])
        if len(known) < tokens:
            known = self._shared[stream] = self.ids(stream, tokens)
        return known[:tokens]

    def turn_ids(self, plan: SessionPlan, turn: int) -> list[int]:
        """The new prompt tokens of one turn: on the first, the shared segments come before the session's own."""
        ids: list[int] = []
        if turn == 0:
            for segment in plan.shared:
                ids += self.shared_ids(segment.stream, segment.tokens)
        own = plan.turns[turn].new_tokens - len(ids)
        return ids + self.ids(f"{plan.workload}/{plan.index}/{turn}", max(0, own))
