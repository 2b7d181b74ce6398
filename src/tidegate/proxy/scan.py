"""Finds the few numbers that matter in a body that passes, without holding or decoding it.

All usage shapes name their counts `"..._tokens": N`, wherever they stand: OpenAI chat and completions
(prompt_tokens, completion_tokens, prompt_tokens_details.cached_tokens), Responses (input_tokens, output_tokens,
input_tokens_details.cached_tokens), Anthropic (input_tokens, output_tokens, cache_read_input_tokens,
cache_creation_input_tokens), SGLang (meta_info.prompt_tokens, completion_tokens, cached_tokens). One substring search
finds them. Generated text cannot be mistaken for them: inside a JSON string a quote is escaped, so `"prompt_tokens":`
followed by digits is a key. The last occurrence wins, because streams repeat growing counts.
"""

from __future__ import annotations

import re
from typing import Final

_NEEDLE: Final = b'_tokens"'
_ABORT: Final = b'"abort"'
_ABORT_KEY: Final = re.compile(rb'"(?:finish_reason|type)"\s*:\s*$')
# The end of the digits must be seen: the chunk may cut them.
_VALUE: Final = re.compile(rb"\s*:\s*(\d{1,12})(?=[^\d.eE])")

_KEYS: Final = {
    b"prompt": "prompt",
    b"input": "prompt",
    b"completion": "completion",
    b"output": "completion",
    b"cached": "cached",
    b"cache_read_input": "cache_read",
    b"cache_creation_input": "cache_creation",
}
_LONGEST_KEY_BYTES: Final = max(map(len, _KEYS)) + 1
_SMALL_CHUNK_BYTES: Final = 4096  # an SSE event
_CARRY_BYTES: Final = 64  # of the previous chunk: the longest key, colon, spaces and digits that its end can cut


class CountScanner:
    """Counts found so far, last one wins; or summed over the items of a batch reply."""

    __slots__ = ("aborted", "cached", "completion", "prompt", "_cache_creation", "_cache_read", "_carry", "_sum")

    def __init__(self, *, sum_items: bool = False) -> None:
        self.prompt: int | None = None
        self.completion: int | None = None
        self.cached: int | None = None
        self.aborted = False  # a finish reason says so
        self._cache_read: int | None = None
        self._cache_creation: int | None = None
        self._carry = b""
        self._sum = sum_items

    def feed(self, chunk: bytes) -> None:
        carry = self._carry
        if not carry and chunk[-2:] == b"\n\n":  # whole events, as streams mostly come: nothing is cut
            if _NEEDLE in chunk:
                self._scan(chunk, 0, len(chunk))
            elif _ABORT in chunk and not self.aborted:
                self._look_for_abort(chunk)
            return
        if len(chunk) <= _SMALL_CHUNK_BYTES:
            data = carry + chunk
            self._scan(data, len(carry), len(data))
            self._carry = data[-_CARRY_BYTES:]
            return
        # Joining would copy a large chunk: only what begins in the carry is looked for across the seam.
        if carry:
            self._scan(carry + chunk[:_CARRY_BYTES], len(carry), len(carry))
        self._scan(chunk, 0, len(chunk))
        self._carry = chunk[-_CARRY_BYTES:]

    def finish(self) -> None:
        """Anthropic counts cached prompt tokens apart from its input tokens."""
        if self._cache_read is not None or self._cache_creation is not None:
            read = self._cache_read or 0
            self.cached = read
            self.prompt = (self.prompt or 0) + read + (self._cache_creation or 0)
            self._cache_read = self._cache_creation = None

    def _scan(self, data: bytes, seen: int, begin_before: int) -> None:
        """Keys that begin before `begin_before`; those whose value ends within the first `seen` bytes are known."""
        at = data.find(_NEEDLE)
        while at >= 0:
            value = _VALUE.match(data, at + len(_NEEDLE))
            if value is not None and value.end() >= seen:
                start = data.rfind(b'"', max(0, at - _LONGEST_KEY_BYTES), at)
                name = _KEYS.get(data[start + 1 : at]) if 0 <= start < begin_before else None
                if name is not None:
                    self._count(name, int(value[1]))
            at = data.find(_NEEDLE, at + len(_NEEDLE))
        if not self.aborted:
            self._look_for_abort(data)

    def _look_for_abort(self, data: bytes) -> None:
        at = data.find(_ABORT)
        while at >= 0:
            if _ABORT_KEY.search(data, max(0, at - 32), at):
                self.aborted = True
                return
            at = data.find(_ABORT, at + len(_ABORT))

    def _count(self, name: str, value: int) -> None:
        if name == "prompt":
            self.prompt = value + ((self.prompt or 0) if self._sum else 0)
        elif name == "completion":
            self.completion = value + ((self.completion or 0) if self._sum else 0)
        elif name == "cached":
            self.cached = value + ((self.cached or 0) if self._sum else 0)
        elif name == "cache_read":
            self._cache_read = value
        else:
            self._cache_creation = value


class IdCounter:
    """Counts the ids in the arrays under one key, over chunk boundaries: `"token_ids":[1,2,3]` is 3."""

    __slots__ = ("count", "_begin", "_carry", "_inside", "_pending")

    def __init__(self, key: bytes) -> None:
        self.count = 0
        self._begin = re.compile(rb'"' + key + rb'"\s*:\s*\[')
        self._carry = b""
        self._inside = False
        self._pending = False  # an id stands after the last comma, or after the opening bracket

    def feed(self, chunk: bytes) -> None:
        data, at = self._carry + chunk, 0
        self._carry = b""
        while at < len(data):
            if not self._inside:
                found = self._begin.search(data, at)
                if found is None:
                    self._carry = data[max(at, len(data) - _CARRY_BYTES) :]
                    return
                at, self._inside, self._pending = found.end(), True, False
            end = data.find(b"]", at)
            stop = len(data) if end < 0 else end
            self.count += data.count(b",", at, stop)
            self._pending = self._pending or stop > at
            if end >= 0:
                self.count += self._pending
                self._inside = False
            at = stop + 1
