"""The order of one rank's KV events: what is a gap, a duplicate, a restart; and whether the residency can be believed.

    seq == last + 1                    apply
    seq > last + 1                     a gap: the batches between are to be replayed first
    seq <= last, time not after last   a duplicate: a replay and the live stream overlap
    seq <= last, time after last       the publisher restarted: its cache is empty and it counts from 0 again

A restart whose first batches were missed can look like a gap, or like nothing at all. So a replay starts at the last
batch that was applied: if the publisher has another batch of that number, or none, it is another process. And
`restarted` is told of restarts that were seen elsewhere.

Residency is exact while every batch since the publisher's start was applied. After a gap that no replay fills it is
unknown: it starts anew from nothing, and is exact again once the engine says that its cache was cleared, or once as
many tokens were stored as its cache holds, so that all that was there before has been evicted, but for what was hit all
along. Pure: no sockets, no clock.
"""

from __future__ import annotations

import enum
import math

from tidegate.engines.base import UNREADABLE
from tidegate.engines.kv_wire import Batch, decode
from tidegate.engines.residency import Residency


class Trust(enum.StrEnum):
    WAITING = "waiting"  # nothing heard yet
    EXACT = "exact"
    STALE = "stale"  # batches were lost


class KvFeed:
    def __init__(self, block_limit: int) -> None:
        self.residency = Residency(block_limit)
        self.trust = Trust.WAITING
        self.last_error: str | None = None
        self.doubted = False  # the cache may have been cleared: the engine says so only with its next batch
        self.batches = 0
        self.lost_batches = 0
        self.restarts = 0
        self._last_seq = -1
        self._first_ts_s = math.inf  # of this process's batches
        self._last_ts_s = -math.inf
        self._not_before_s = -math.inf  # batches before this are a former process's
        self._stale_since_tokens = 0  # stored_tokens when trust was lost

    @property
    def next_seq(self) -> int:
        return self._last_seq + 1

    @property
    def replay_from(self) -> int:
        """The last batch again, to be sure that it is the same publisher."""
        return max(0, self._last_seq)

    def offer(self, seq: int, payload: bytes) -> bool:
        """Apply a live batch. False: batches before it are missing, from `replay_from`; then `accept` it."""
        batch = self._decoded(seq, payload)
        if batch is None:
            return True
        if seq <= self._last_seq:
            if batch.ts_s <= self._last_ts_s:
                return True
            self._restart()
        if seq > self.next_seq:
            return False
        self._apply(seq, batch)
        return True

    def offer_replayed(self, seq: int, payload: bytes) -> bool:
        """Apply a batch of a replay. False: it is of another process, whose replay is to be asked for from its start.
        Where the publisher's buffer no longer reaches back, a gap stays."""
        if seq < self._last_seq:
            return True
        batch = self._decoded(seq, payload)
        if batch is None:
            return True
        if seq == self._last_seq:
            if batch.ts_s != self._last_ts_s:
                self._restart()
                return False
            return True
        if seq > self.next_seq:
            self._lose(seq)
        self._apply(seq, batch)
        return True

    def replayed(self, batches: int) -> bool:
        """A replay is complete: everything that the publisher had to say was applied. False: it does not know the last
        batch that was applied, so it is another process, whose replay is to be asked for from its start."""
        if not batches and self._last_seq >= 0:
            self._restart()
            return False
        if self.trust is Trust.WAITING:
            self.trust = Trust.EXACT
        return True

    def accept(self, seq: int, payload: bytes) -> None:
        """Apply a live batch though batches before it may be lost."""
        batch = self._decoded(seq, payload)
        if batch is None or seq <= self._last_seq:
            return
        if seq > self.next_seq:
            self._lose(seq)
        self._apply(seq, batch)

    def restarted(self, at_s: float | None) -> None:
        """The replica is a new process, since `at_s` by its wall clock if that is known. If all that was heard is the
        new process's, nothing changes."""
        if self._last_seq < 0 or (at_s is not None and self._first_ts_s >= at_s):
            return
        self._restart()
        if at_s is not None:
            self._not_before_s = at_s

    def regain(self, capacity_tokens: int | None) -> None:
        """Whether enough was stored since trust was lost to make up for it."""
        stored = self.residency.stored_tokens - self._stale_since_tokens
        if self.trust is Trust.STALE and capacity_tokens is not None and stored >= capacity_tokens:
            self.trust = Trust.EXACT

    def _restart(self) -> None:
        self.residency.clear()
        self.restarts += 1
        self.doubted = False
        self._last_seq, self._first_ts_s, self._last_ts_s = -1, math.inf, -math.inf
        self.trust = Trust.WAITING

    def _apply(self, seq: int, batch: Batch) -> None:
        cleared = self.residency.cleared
        self.residency.apply(batch.events)
        self._last_seq, self._last_ts_s = seq, batch.ts_s
        self._first_ts_s = min(self._first_ts_s, batch.ts_s)
        self.batches += 1
        self.doubted = False
        if self.trust is Trust.WAITING or self.residency.cleared > cleared:
            self.trust = Trust.EXACT
        if self.residency.overflowed:
            self.residency.clear()
            self._distrust("more blocks than `kv_event_block_limit`")

    def _lose(self, seq: int) -> None:
        self.lost_batches += seq - self.next_seq
        self.residency.clear()
        self._distrust(f"batches {self.next_seq} to {seq - 1} were lost")

    def _decoded(self, seq: int, payload: bytes) -> Batch | None:
        try:
            batch = decode(payload)
        except UNREADABLE as error:
            self.lost_batches += 1
            self._last_seq = max(self._last_seq, seq)
            self.residency.clear()
            self._distrust(f"batch {seq} is not readable: {error}")
            return None
        return batch if batch.ts_s >= self._not_before_s else None

    def _distrust(self, error: str) -> None:
        self.last_error = error
        self.trust = Trust.STALE
        self._stale_since_tokens = self.residency.stored_tokens
