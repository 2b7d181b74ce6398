"""A prompt's prefix as hashes of its bytes, chunk by chunk, each over all before: for policies that route by it.

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


def chunk_hashes(body: bytes, size: int) -> tuple[int, ...]:
    """Of whole chunks only: the last one differs with every turn."""
    running = blake2b(digest_size=8)
    hashes = []
    for start in range(0, min(len(body), MAX_CHUNKS * size) - size + 1, size):
        running.update(body[start : start + size])
        hashes.append(int.from_bytes(running.digest(), "big") >> 1)  # 63 bits: fits a signed integer in any log reader
    return tuple(hashes)
