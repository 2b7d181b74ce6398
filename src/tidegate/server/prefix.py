"""A prompt's prefix as hashes of its bytes, chunk by chunk, each over all before: for policies that route by it, and
for finding the session that it goes on with (`lineage`).

The bytes of a request are its prompt behind a few constant keys, so equal prefixes of prompts are equal prefixes of
bodies as long as a client writes its keys in one order, which all do. Decoding 32k ids for this would cost more than
the rest of the relay.
"""

from __future__ import annotations

from hashlib import blake2b

from tidegate.proxy.tokens import PRIOR_TOKENS_PER_BYTE

MAX_CHUNKS = 1024  # 256k tokens at a policy's 256 a chunk: beyond it the share of the rest changes no choice


def chunk_bytes(chunk_tokens: int) -> int:
    """Of a chunk of about so many tokens. Not by the learned ratio: equal prefixes must keep equal chunks."""
    return round(chunk_tokens / PRIOR_TOKENS_PER_BYTE)


def chunk_hashes(data: bytes, size: int, kind: bytes | None = None) -> tuple[int, ...]:
    """Of whole chunks only: the last one differs with every turn. With a `kind`, behind the hash of that alone: data of
    different kinds have no hash in common."""
    running = blake2b(digest_size=8)
    hashes = []
    if kind is not None:
        running.update(kind)
        hashes.append(_number(running.digest()))
    for start in range(0, min(len(data), MAX_CHUNKS * size) - size + 1, size):
        running.update(data[start : start + size])
        hashes.append(_number(running.digest()))
    return tuple(hashes)


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "big") >> 1  # 63 bits: fits a signed integer in any log reader
