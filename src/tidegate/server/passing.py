"""Requests that cost no KV (/v1/models, /tokenize, unknown paths): relayed without admission, not in the ledger.

One that names a session goes to that session's replica (a stored response, say, is nowhere else); any other to the
usable replica with the fewest of them under way, ties in turn. They pass while the pool is paused: a
trainer asks /v1/models then. A GET that fails before its first byte may try another replica; so may any other method,
because the data path returns it only when no byte of an answer was seen.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from tidegate.errors import ReplicaError, TidegateError
from tidegate.observe.counters import Counters
from tidegate.proxy.seam import Exchange, RequestHead
from tidegate.types import Outcome, ReplicaId


class Passing:
    def __init__(
        self,
        usable: Callable[[], Sequence[ReplicaId]],
        home: Callable[[RequestHead], ReplicaId | None],
        counters: Counters,
        max_attempts: int,
    ) -> None:
        """`home`: the replica of the session that a request's headers name."""
        self._usable = usable
        self._home = home
        self._counters = counters
        self._max_attempts = max_attempts
        self._on: dict[int, ReplicaId] = {}
        self._tried: dict[int, set[ReplicaId]] = {}
        self._loads: Counter[ReplicaId] = Counter()
        self._turn = itertools.count()

    @property
    def under_way(self) -> int:
        return len(self._on)

    def opened(self, exchange: Exchange) -> None:
        self._send(exchange, ReplicaError("no replica is usable", reason="no_replica", status=503, retry_after_s=1.0))

    def returned(self, exchange: Exchange, replica: ReplicaId, error: TidegateError) -> None:
        if exchange.id not in self._on:
            return
        self._release(exchange.id)
        self._counters.replica_errors[replica, error.reason] += 1
        tried = self._tried.setdefault(exchange.id, set())
        tried.add(replica)
        if len(tried) < self._max_attempts:
            self._send(exchange, error)
        else:
            self._refuse(exchange, error)

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        if exchange.id in self._on:
            self._release(exchange.id)
            self._tried.pop(exchange.id, None)
            self._counters.passed[outcome] += 1

    def _send(self, exchange: Exchange, otherwise: TidegateError) -> None:
        tried = self._tried.get(exchange.id, ())
        usable = [url for url in self._usable() if url not in tried]
        if not usable:
            self._refuse(exchange, otherwise)
            return
        home = self._home(exchange.head)
        if home in usable:
            replica = home
        else:
            first = next(self._turn) % len(usable)
            replica = min(usable[first:] + usable[:first], key=self._loads.__getitem__)
        self._on[exchange.id] = replica
        self._loads[replica] += 1
        exchange.place(replica)

    def _release(self, exchange_id: int) -> None:
        replica = self._on.pop(exchange_id)
        self._loads[replica] -= 1
        if not self._loads[replica]:
            del self._loads[replica]

    def _refuse(self, exchange: Exchange, error: TidegateError) -> None:
        self._tried.pop(exchange.id, None)
        self._counters.refused[error.reason] += 1
        exchange.reject(error)
