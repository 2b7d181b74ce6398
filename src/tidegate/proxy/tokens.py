"""Tokens from bytes, learned: how many tokens a body of this size on this path had, by what replicas reported.

The ratio differs by path (ids, text, chat JSON) and by size (a short body is mostly JSON around the prompt), so it is
kept per path and octave of the size. It is used at arrival, when the prompt's true length is not known yet, and at
the end where a replica reports no usage.
"""

from __future__ import annotations

from typing import TypeAlias

Bucket: TypeAlias = tuple[str, int]

PRIOR_TOKENS_PER_BYTE = 0.2  # ids in JSON take 5-6 bytes each, English text about 4 a token, JSON adds its own
NEW_SHARE = 0.1  # of a new observation in the moving mean: about the last twenty count
MAX_BUCKETS = 1024  # paths are bounded by the gate's own list, sizes by the octave; this is a stop, not a tuning


class TokenRatios:
    def __init__(self) -> None:
        self._ratios: dict[Bucket, float] = {}
        self._means: dict[str, float] = {}

    def estimate(self, path: str, size_bytes: int | None) -> int:
        """At least 1. A body of unknown size (chunked) counts as the path's mean."""
        if size_bytes is None:
            return max(1, round(self._means.get(path, 1.0)))
        octave = size_bytes.bit_length()
        ratio = self._ratios.get((path, octave))
        if ratio is None:  # the octave below is the nearest that is likely to be known: prompts grow
            ratio = self._ratios.get((path, octave - 1), PRIOR_TOKENS_PER_BYTE)
        return max(1, round(size_bytes * ratio))

    def learn(self, path: str, size_bytes: int, tokens: int) -> None:
        if size_bytes <= 0 or tokens <= 0:
            return
        bucket = (path, size_bytes.bit_length())
        ratio = tokens / size_bytes
        known = self._ratios.get(bucket)
        if known is not None:
            self._ratios[bucket] = known + NEW_SHARE * (ratio - known)
        elif len(self._ratios) < MAX_BUCKETS:
            self._ratios[bucket] = ratio
        mean = self._means.get(path)
        self._means[path] = tokens if mean is None else mean + NEW_SHARE * (tokens - mean)
