"""The order of one rank's KV events: what is a gap, a duplicate, a restart; and whether the residency can be believed.

    seq == last + 1                    apply
    seq > last + 1                     a gap: batches from last + 1 are to be replayed first
    seq <= last, time not after last   a duplicate: a replay and the live stream overlap
    seq <= last, time after last       the publisher restarted: its cache is empty and it counts from 0 again

Residency is exact while every batch since the publisher's start was applied. After a gap that no replay fills it is
unknown: it starts anew from nothing, and is exact again once the engine says that its cache was cleared, or once as
many tokens were stored as its cache holds, so that all that was there before has been evicted, but for what was hit all
along. Pure: no sockets, no clock.
"""

from __future__ import annotations

import enum

import msgspec

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
        self._last_ts_s = float("-inf")
        self._stale_since_tokens = 0  # stored_tokens when trust was lost

    @property
    def next_seq(self) -> int:
        return self._last_seq + 1

    def offer(self, seq: int, payload: bytes) -> int | None:
        """Apply a live batch, or give the number from which to replay before it is offered again."""
        batch = self._decoded(seq, payload)
        if batch is None:
            return None
        if seq <= self._last_seq:
            if batch.ts_s <= self._last_ts_s:
                return None
            self.restart()
        if seq > self.next_seq:
            return self.next_seq
        self._apply(seq, batch)
        return None

    def offer_replayed(self, seq: int, payload: bytes) -> None:
        """Apply a batch of a replay. Where the publisher's buffer no longer reaches back, a gap stays."""
        if seq < self.next_seq:
            return
        batch = self._decoded(seq, payload)
        if batch is None:
            return
        if seq > self.next_seq:
            self._lose(seq)
        self._apply(seq, batch)

    def replayed(self) -> None:
        """A replay is complete: everything the publisher had to say was applied."""
        if self.trust is Trust.WAITING:
            self.trust = Trust.EXACT

    def accept(self, seq: int, payload: bytes) -> None:
        """Apply a live batch though batches before it are lost."""
        batch = self._decoded(seq, payload)
        if batch is None or seq <= self._last_seq:
            return
        if seq > self.next_seq:
            self._lose(seq)
        self._apply(seq, batch)

    def restart(self, before_s: float | None = None) -> None:
        """The publisher is a new process, with an empty cache. `before_s`: when it started, by the engine's wall clock;
        batches since then are its own."""
        if self._last_seq < 0 or (before_s is not None and self._last_ts_s >= before_s):
            return
        self.residency.clear()
        self.restarts += 1
        self.doubted = False
        self._last_seq, self._last_ts_s = -1, float("-inf")
        self.trust = Trust.WAITING

    def regain(self, capacity_tokens: int | None) -> None:
        """Whether enough was stored since trust was lost to make up for it."""
        stored = self.residency.stored_tokens - self._stale_since_tokens
        if self.trust is Trust.STALE and capacity_tokens is not None and stored >= capacity_tokens:
            self.trust = Trust.EXACT

    def _apply(self, seq: int, batch: Batch) -> None:
        cleared = self.residency.cleared
        self.residency.apply(batch.events)
        self._last_seq, self._last_ts_s = seq, batch.ts_s
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
            return decode(payload)
        except msgspec.DecodeError as error:
            self.lost_batches += 1
            self._last_seq = max(self._last_seq, seq)
            self.residency.clear()
            self._distrust(f"batch {seq} is not readable: {error}")
            return None

    def _distrust(self, error: str) -> None:
        self.last_error = error
        self.trust = Trust.STALE
        self._stale_since_tokens = self.residency.stored_tokens
