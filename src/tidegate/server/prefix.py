"""A prompt's prefix as hashes of its bytes, chunk by chunk, each over all before: for policies that route by it.

The bytes of a request are its prompt behind a few constant keys, so equal prefixes of prompts are equal prefixes of
bodies as long as a client writes its keys in one order, which all do. Decoding 32k ids for this would cost more than
the rest of the relay.
"""

from __future__ import annotations

from hashlib import blake2b

CHUNK_BYTES = 1024  # 180-250 tokens: fine enough for a share of the prompt, some 200 hashes for 32k ids
MAX_CHUNKS = 512  # beyond half a megabyte the share of the rest no longer changes a choice


def chunk_hashes(body: bytes) -> tuple[int, ...]:
    """Of whole chunks only: the last one differs with every turn."""
    running = blake2b(digest_size=8)
    hashes = []
    for start in range(0, min(len(body), MAX_CHUNKS * CHUNK_BYTES) - CHUNK_BYTES + 1, CHUNK_BYTES):
        running.update(body[start : start + CHUNK_BYTES])
        hashes.append(int.from_bytes(running.digest(), "big") >> 1)  # 63 bits: fits a signed integer in any log reader
    return tuple(hashes)
