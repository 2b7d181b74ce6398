"""Tokens from bytes, learned: how many tokens a body of this size on this path had, by what replicas reported.

The ratio differs by path (ids, text, chat JSON) and by size (a short body is mostly JSON around the prompt), so it is
kept per path and octave of the size. It is used at arrival, when the prompt's true length is not known yet, and at
the end where a replica reports no usage.
"""

from __future__ import annotations

from typing import Final, TypeAlias

Bucket: TypeAlias = tuple[str, int]

PRIOR_TOKENS_PER_BYTE: Final = 0.2  # ids in JSON take 5-6 bytes each, English text about 4 a token, JSON adds its own
NEW_SHARE: Final = 0.1  # of a new observation in the moving mean: about the last twenty count


class TokenRatios:
    """Paths are the gate's own few and sizes are octaves, so the tables stay small."""

    def __init__(self) -> None:
        self._prompts: dict[Bucket, float] = {}
        self._replies: dict[Bucket, float] = {}
        self._means: dict[str, float] = {}  # prompt tokens by path

    def estimate(self, path: str, size_bytes: int | None) -> int:
        """Prompt tokens, at least 1. A body of unknown size (chunked) counts as the path's mean."""
        if size_bytes is None:
            return max(1, round(self._means.get(path, 1.0)))
        return _estimate(self._prompts, path, size_bytes)

    def learn(self, path: str, size_bytes: int, tokens: int) -> None:
        _learn(self._prompts, path, size_bytes, tokens)
        mean = self._means.get(path)
        self._means[path] = tokens if mean is None else mean + NEW_SHARE * (tokens - mean)

    def estimate_reply(self, path: str, size_bytes: int) -> int:
        """Completion tokens of a reply without usage."""
        return _estimate(self._replies, path, size_bytes)

    def learn_reply(self, path: str, size_bytes: int, tokens: int) -> None:
        _learn(self._replies, path, size_bytes, tokens)


def _estimate(ratios: dict[Bucket, float], path: str, size_bytes: int) -> int:
    octave = size_bytes.bit_length()
    ratio = ratios.get((path, octave))
    if ratio is None:  # the octave below is the nearest that is likely to be known: prompts grow
        ratio = ratios.get((path, octave - 1), PRIOR_TOKENS_PER_BYTE)
    return int(size_bytes * ratio) or 1


def _learn(ratios: dict[Bucket, float], path: str, size_bytes: int, tokens: int) -> None:
    if size_bytes <= 0 or tokens <= 0:
        return
    bucket = (path, size_bytes.bit_length())
    ratio = tokens / size_bytes
    known = ratios.get(bucket)
    ratios[bucket] = ratio if known is None else known + NEW_SHARE * (ratio - known)
