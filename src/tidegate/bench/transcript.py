"""One session's conversation as the client holds it: prompts made of token ids, or of messages.

Each prompt is the previous prompt, the previous output as the engine returned it, and the turn's new tokens, so that
what can be found in the engine's cache is exactly what a real rollout would find there.
"""

from __future__ import annotations

import msgspec

from tidegate.bench.dialects import Reply
from tidegate.sim.prompts import TokenStreams
from tidegate.sim.workload import SessionPlan, carried_tokens


class TokenTranscript:
    """Ids are kept as the JSON text that requests carry too: a request then costs a copy, not an encoding."""

    def __init__(self, plan: SessionPlan, streams: TokenStreams) -> None:
        self._plan = plan
        self._streams = streams
        self._ids: list[int] = []
        self._json = bytearray()
        self.output_guessed = False  # the engine did not return some output's ids

    @property
    def json(self) -> bytes:
        """The ids, comma-separated, without brackets."""
        return bytes(self._json)

    def begin_turn(self, turn: int) -> int:
        """Append the turn's new tokens; gives how many tokens of the prompt the session had before."""
        kept = carried_tokens(self._plan.turns[turn], len(self._ids))
        if kept < len(self._ids):
            ids, self._ids, self._json = self._ids[:kept], [], bytearray()
            self._append(ids)
        self._append(self._streams.turn_ids(self._plan, turn))
        return kept

    def end_turn(self, turn: int, reply: Reply) -> None:
        ids = reply.output_ids
        if ids is None:
            self.output_guessed = True
            stream = f"{self._plan.workload}/{self._plan.index}/{turn}/output"
            ids = self._streams.ids(stream, reply.output_tokens)
        self._append(ids)

    def _append(self, ids: list[int]) -> None:
        if not ids:
            return
        if self._json:
            self._json += b","
        self._json += msgspec.json.encode(ids)[1:-1]
        self._ids += ids


class ChatTranscript:
    """The same for chat: words instead of ids, so lengths in tokens are only near the plan's."""

    def __init__(self, plan: SessionPlan, streams: TokenStreams) -> None:
        self._plan = plan
        self._streams = streams
        self._messages: list[dict[str, str]] = []
        self._tokens = 0
        self.output_guessed = False

    @property
    def json(self) -> bytes:
        return msgspec.json.encode(self._messages)[1:-1]

    def begin_turn(self, turn: int) -> int:
        kept = carried_tokens(self._plan.turns[turn], self._tokens)
        if kept < self._tokens:  # a rewritten context: the task stays, the rest goes
            self._messages = self._messages[:1]
        words = " ".join(f"w{i}" for i in self._streams.turn_ids(self._plan, turn))
        self._messages.append({"role": "user", "content": words})
        return kept

    def end_turn(self, turn: int, reply: Reply) -> None:
        self.output_guessed |= reply.text is None
        self._messages.append({"role": "assistant", "content": reply.text or ""})
        self._tokens = reply.prompt_tokens + reply.output_tokens
