"""A request that the scheduler knows of: from its arrival to the one RequestEnded that it is owed. It is the meter of
its own exchange, so that a request is one object here."""

from __future__ import annotations

from collections.abc import Collection

from tidegate.observe.counters import ClassCounters
from tidegate.proxy.identity import Identity
from tidegate.proxy.seam import Exchange
from tidegate.proxy.usage import UsageMeter, Watcher
from tidegate.types import ReplicaId


class Entry(UsageMeter):
    replica: ReplicaId | None = None  # where it runs now
    attempts = 0  # replicas that it was given to in vain
    failures = 0  # of them, those that it reached
    hold_reason: str | None = None

    def __init__(
        self, exchange: Exchange, watcher: Watcher, identity: Identity, counters: ClassCounters, arrived_s: float
    ) -> None:
        super().__init__(exchange.head, watcher)
        self.exchange = exchange
        self.identity = identity
        self.counters = counters  # of its class
        self.arrived_s = arrived_s
        self.placed_s = arrived_s

    def goes_by(self, ids: Collection[str]) -> bool:
        """Whether it is one of these requests: by the id that its client gave it, bare or as vLLM writes it."""
        given = self.exchange.head.get(b"x-request-id")
        return given is not None and any(kind + given.decode("latin-1") in ids for kind in ("", "cmpl-", "chatcmpl-"))

    def over(self) -> None:
        """Nothing more will come of it. May be told twice."""
