"""cache_aware, as the vLLM and SGLang routers have it: follow the longest known prefix unless the load is uneven.

    max - min requests in flight > 64 and max > 1.5 min   -> the replica with the fewest
    else longest match > 0.3 of the prompt                -> the replica that matches
    else                                                  -> the replica with the smallest tree

Their radix tree over characters is here an index of chained chunk hashes (RequestArrived.prefix): a chunk's hash covers
all chunks before it, so the match of a replica is the number of leading chunks that it holds. Bounded by count and by
age, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict

from tidegate.policy.base import PerRequest
from tidegate.policy.baselines.params import CacheAwareParams
from tidegate.policy.entities import Replica, Request
from tidegate.policy.ledger import Ledger
from tidegate.policy.params import CoreParams
from tidegate.policy.placement import members


class PrefixIndex:
    """Chunks that a replica has been sent, most recently used last."""

    def __init__(self, params: CacheAwareParams) -> None:
        self._params = params
        self._chunks: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def match(self, prefix: tuple[int, ...]) -> int:
        """Leading chunks held. Chains are inserted whole and aged from the tail on, so they are searched by halves."""
        chunks = self._chunks
        low, high = 0, len(prefix)
        while low < high:
            middle = (low + high) // 2
            if prefix[middle] in chunks:
                low = middle + 1
            else:
                high = middle
        return low

    def insert(self, prefix: tuple[int, ...], now_s: float) -> None:
        chunks = self._chunks
        for chunk in reversed(prefix):  # the head is used last, so it is the last to go
            chunks[chunk] = now_s
            chunks.move_to_end(chunk)
        while len(chunks) > self._params.max_chunks:
            chunks.popitem(last=False)

    def age(self, now_s: float) -> None:
        chunks = self._chunks
        while chunks and now_s - next(iter(chunks.values())) > self._params.max_age_s:
            chunks.popitem(last=False)

    def clear(self) -> None:
        self._chunks.clear()


class CacheAware(PerRequest):
    name = "cache_aware"
    wants_prefix = True

    def __init__(self, ledger: Ledger, params: CoreParams, seed: int) -> None:
        super().__init__(ledger, params, seed)
        self.prefix_chunk_tokens = params.cache_aware.chunk_tokens
        self._params = params.cache_aware
        self._trees: dict[int, PrefixIndex] = {}

    def replica_added(self, replica: Replica) -> None:
        self._trees[replica.slot] = PrefixIndex(self._params)

    def replica_removed(self, replica: Replica) -> None:
        self._trees[replica.slot].clear()

    def cold(self, replica: Replica) -> None:
        self._trees[replica.slot].clear()

    def tick(self) -> None:
        for tree in self._trees.values():
            tree.age(self.ledger.now_s)

    def route(self, request: Request) -> Replica | None:
        usable = self.candidates(request)
        if not usable:
            return None
        slots = list(members(usable))
        loads = self.ledger.by_requests.loads
        fewest, most = min(loads[slot] for slot in slots), max(loads[slot] for slot in slots)
        if most - fewest > self._params.balance_requests and most > self._params.balance_ratio * fewest:
            return self._pick([slot for slot in slots if loads[slot] == fewest])
        prefix = request.prefix
        if prefix:
            matches = [self._trees[slot].match(prefix) for slot in slots]
            longest = max(matches)
            if longest > self._params.match_share * len(prefix):
                return self._pick([slot for slot, match in zip(slots, matches, strict=True) if match == longest])
        sizes = [len(self._trees[slot]) for slot in slots]
        smallest = min(sizes)
        return self._pick([slot for slot, size in zip(slots, sizes, strict=True) if size == smallest])

    def _pick(self, slots: list[int]) -> Replica:
        return self.ledger.at(self.turn.pick(sum(1 << slot for slot in slots)))

    def placed(self, request: Request, replica: Replica) -> None:
        if request.prefix:
            self._trees[replica.slot].insert(request.prefix, self.ledger.now_s)
