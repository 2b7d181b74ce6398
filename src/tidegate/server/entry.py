"""A request that the scheduler knows of: from its arrival to the one RequestEnded that it is owed."""

from __future__ import annotations

from tidegate.proxy.identity import Identity
from tidegate.proxy.seam import Exchange
from tidegate.proxy.usage import UsageMeter
from tidegate.types import ReplicaId, WorkloadClass


class Entry:
    __slots__ = (
        "arrived_s",
        "attempts",
        "exchange",
        "hold_reason",
        "identity",
        "label",
        "meter",
        "placed_s",
        "replica",
    )

    def __init__(self, exchange: Exchange, identity: Identity, label: WorkloadClass, arrived_s: float) -> None:
        self.exchange = exchange
        self.identity = identity
        self.label = label  # of the metrics: the class, or `other` when there are too many
        self.arrived_s = arrived_s
        self.placed_s = arrived_s
        self.replica: ReplicaId | None = None  # where it runs now
        self.attempts = 0  # replicas that failed it
        self.hold_reason: str | None = None
        self.meter: UsageMeter | None = None
