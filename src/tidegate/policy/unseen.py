"""What running requests have generated and nobody has told, given to the ledger as progress.

Replies that are not streamed say what they made when they end. Until then their sessions look as small as they were,
and what is learned of a class comes from those that have ended: the short ones first. After a synchronised start of
long answers an admission by such estimates lets in too many, and finds out when all have grown. So a clock for each
replica (decode_clock.py) says how far its running requests have come.
"""

from __future__ import annotations

from tidegate.policy.decode_clock import DecodeClock
from tidegate.policy.entities import Replica, Request
from tidegate.policy.ledger import Ledger
from tidegate.types import ReplicaSample, RequestEnded

TOLD_TOKENS = 128  # unseen growth worth telling, and more than a request can have waited for its prefill


class UnseenGrowth:
    __slots__ = ("_clocks", "_ledger", "_next_slot", "_since", "_where")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._clocks: list[DecodeClock] = []  # by replica slot
        self._since: list[dict[int, int]] = []  # by slot: request -> the clock when its tokens were last known
        self._where: dict[int, int] = {}  # request -> slot
        self._next_slot = 0

    def __len__(self) -> int:
        return len(self._where)

    def replica_added(self, replica: Replica) -> None:
        self._of(replica.slot)
        self._clocks[replica.slot] = DecodeClock(self._ledger.now_s)  # the slot's last replica may have been another

    def sampled(self, replica: Replica, sample: ReplicaSample) -> None:
        self._of(replica.slot)
        self._clocks[replica.slot].sampled(sample)

    def placed(self, request: Request, replica: Replica) -> None:
        self._forget(request.id)
        self._where[request.id] = replica.slot
        self._of(replica.slot)[request.id] = int(self._clocks[replica.slot].at(self._ledger.now_s))

    def progressed(self, request: Request) -> None:
        if request.replica is not None:
            self.placed(request, request.replica)

    def answered(self, request: Request, event: RequestEnded) -> None:
        slot, now_s = self._forget(request.id), self._ledger.now_s
        if slot is not None and event.completion_tokens is not None:
            self._clocks[slot].answered(event.completion_tokens, now_s - request.arrived_s, now_s)

    def _forget(self, request_id: int) -> int | None:
        slot = self._where.pop(request_id, None)
        if slot is not None:
            self._since[slot].pop(request_id, None)
        return slot

    def tell(self, most: int) -> None:
        """Replicas in turn, until so many requests were looked at."""
        slots = self._ledger.slots
        for _ in range(len(slots)):
            slot = self._next_slot % len(slots)
            self._next_slot = slot + 1
            replica = slots[slot]
            if replica is not None:
                most -= self._tell(replica)
            if most <= 0:
                return

    def _tell(self, replica: Replica) -> int:
        ledger, since = self._ledger, self._of(replica.slot)
        looked = len(since) + 1
        clock = int(self._clocks[replica.slot].at(ledger.now_s))
        for request_id, then in list(since.items()):
            request = ledger.requests.get(request_id)
            if request is None or request.replica is None:  # the replica gave it back
                self._forget(request_id)
            elif clock - then >= TOLD_TOKENS:
                ledger.progress(request, request.completion_tokens + clock - then)
                since[request_id] = clock
        return looked

    def _of(self, slot: int) -> dict[int, int]:
        while len(self._since) <= slot:
            self._since.append({})
            self._clocks.append(DecodeClock(self._ledger.now_s))
        return self._since[slot]
