"""splitmix64: a seeded stream that is the same on every machine, for the policies that draw lots."""

from __future__ import annotations

from typing import Final

_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF


class SplitMix64:
    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def next(self) -> int:
        self._state = z = (self._state + 0x9E37_79B9_7F4A_7C15) & _MASK
        z = ((z ^ z >> 30) * 0xBF58_476D_1CE4_E5B9) & _MASK
        z = ((z ^ z >> 27) * 0x94D0_49BB_1331_11EB) & _MASK
        return z ^ z >> 31

    def below(self, bound: int) -> int:
        """Uniform in [0, bound): the high half of a 64 x 64-bit product; its bias is below bound / 2^64."""
        return self.next() * bound >> 64
