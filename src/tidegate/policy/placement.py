"""Where: sets of replicas as bit masks, the least loaded of a set, ties rotated.

A set of replicas is an int with one bit per replica slot: union, difference and the next member after a given slot cost
a few machine words for hundreds of replicas, and have one order on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator


def members(mask: int) -> Iterator[int]:
    """Slots in the set, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def next_member(mask: int, start: int) -> int:
    """The first slot at or after `start`, wrapping round; the set is not empty."""
    high = mask >> start
    if high:
        return start + (high & -high).bit_length() - 1
    return (mask & -mask).bit_length() - 1


class Rotation:
    """Picks from a set so that equal candidates take turns."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def pick(self, mask: int) -> int:
        slot = next_member(mask, self._next)
        self._next = slot + 1
        return slot

    def some(self, mask: int, limit: int) -> list[int]:
        """Up to `limit` members in rotated order, the turn not yet taken."""
        found: list[int] = []
        start = self._next
        high = mask >> start << start
        for part in (high, mask ^ high):
            while part and len(found) < limit:
                low = part & -part
                found.append(low.bit_length() - 1)
                part ^= low
        return found

    def took(self, slot: int) -> None:
        self._next = slot + 1


class LoadIndex:
    """Integer loads of slots, with the set of slots at each load: moves and minima without a scan of the slots."""

    __slots__ = ("_buckets", "loads")

    def __init__(self) -> None:
        self.loads: list[int] = []
        self._buckets: dict[int, int] = {}

    def add(self, slot: int) -> None:
        """Slots are added in order, each once, with load 0."""
        self.loads.append(0)
        self._buckets[0] = self._buckets.get(0, 0) | 1 << slot

    def shift(self, slot: int, by: int) -> None:
        old = self.loads[slot]
        new = old + by
        buckets = self._buckets
        bit = 1 << slot
        left = buckets[old] ^ bit
        if left:
            buckets[old] = left
        else:
            del buckets[old]
        buckets[new] = buckets.get(new, 0) | bit
        self.loads[slot] = new

    def least(self, mask: int) -> int:
        """The members of `mask` with the least load, as a set; empty only for an empty `mask`."""
        best, found = -1, 0
        for load, slots in self._buckets.items():
            if (best < 0 or load < best) and slots & mask:
                best, found = load, slots & mask
        return found

    def below(self, mask: int, load: int) -> int:
        """The members of `mask` whose load is less than `load`."""
        found = 0
        for at, slots in self._buckets.items():
            if at < load:
                found |= slots
        return found & mask
