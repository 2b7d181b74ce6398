"""Block hashes of token sequences: each chains its parent's hash with its own tokens, the first one a salt.

Hashing costs about a millisecond for 10k tokens, and a conversation sends its whole prefix with each turn, so
`PromptHashes` keeps the last prompt of each conversation and hashes only what is new.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from tidegate.engine.tokenizer import TOKEN_BYTES
from tidegate.sim.blocks import BlockHash

_HASH_BYTES = 8  # what a KV event carries


def root(salt: str | None) -> bytes:
    """The parent of the first block."""
    return blake2b(b"" if salt is None else salt.encode(), digest_size=_HASH_BYTES, person=b"root").digest()


def chain(tokens: bytes, block_size: int, parent: bytes, first: int, end: int) -> list[BlockHash]:
    """Hashes of the blocks `first..end` of `tokens`."""
    width = block_size * TOKEN_BYTES
    hashes: list[BlockHash] = []
    for offset in range(first * width, end * width, width):
        parent = blake2b(parent + tokens[offset : offset + width], digest_size=_HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


class PromptHashes:
    def __init__(self, block_size: int, capacity: int = 512) -> None:
        self._block_size = block_size
        self._capacity = capacity
        self._last: OrderedDict[tuple[str | None, bytes], tuple[bytes, list[BlockHash]]] = OrderedDict()

    def of(self, tokens: bytes, salt: str | None, session: str | None) -> list[BlockHash]:
        """Hashes of all full blocks. The result is the caller's own."""
        width = self._block_size * TOKEN_BYTES
        blocks = len(tokens) // width
        key = (salt, session.encode() if session is not None else tokens[:width])
        known_tokens, known = self._last.pop(key, (b"", []))
        if not tokens.startswith(known_tokens):
            known = []
        hashes = known.copy()
        if len(hashes) < blocks:
            parent = hashes[-1] if hashes else root(salt)
            assert isinstance(parent, bytes)
            hashes += chain(tokens, self._block_size, parent, len(hashes), blocks)
        self._last[key] = (tokens[: blocks * width], hashes.copy())
        if len(self._last) > self._capacity:
            self._last.popitem(last=False)
        return hashes
