"""The order of batches: gaps, duplicates, restarts, and when the residency is exact."""

from __future__ import annotations

from typing import Any

import msgspec

from tidegate.engines.kv_feed import KvFeed, Trust


def batch(ts_s: float, *hashes: int, session: str = "s") -> bytes:
    event = {"type": "BlockStored", "block_hashes": list(hashes), "block_size": 16, "session_id": session}
    return wire(ts_s, event)


def wire(ts_s: float, *events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([ts_s, list(events), 0])


def feed_of(*batches: bytes) -> KvFeed:
    feed = KvFeed(1000)
    for seq, payload in enumerate(batches):
        assert feed.offer(seq, payload)
    return feed


def test_a_stream_from_its_start_is_exact() -> None:
    feed = feed_of(batch(1, 1), batch(2, 2))
    assert feed.trust is Trust.EXACT
    assert feed.residency.session_tokens() == {"s": 32}


def test_nothing_heard_is_not_exact() -> None:
    assert KvFeed(1000).trust is Trust.WAITING


def test_an_empty_replay_from_the_start_is_exact() -> None:
    feed = KvFeed(1000)
    assert feed.replayed(0)
    assert feed.trust is Trust.EXACT


def test_a_late_subscriber_without_replay_knows_nothing() -> None:
    feed = KvFeed(1000)
    assert not feed.offer(7, batch(1, 1))
    feed.accept(7, batch(1, 1))
    assert feed.trust is Trust.STALE


def test_a_gap_is_filled_by_a_replay_that_overlaps() -> None:
    feed = feed_of(batch(1, 1))
    assert not feed.offer(3, batch(4, 4))
    assert feed.replay_from == 0
    for seq in range(4):
        assert feed.offer_replayed(seq, batch(seq + 1, seq + 1))
    assert feed.replayed(4)
    feed.accept(3, batch(4, 4))
    assert feed.trust is Trust.EXACT
    assert feed.residency.resident_tokens == 64
    assert feed.lost_batches == 0


def test_a_gap_that_is_not_filled_starts_residency_anew_as_unknown() -> None:
    feed = feed_of(batch(1, 1))
    assert not feed.offer(3, batch(4, 4))
    feed.accept(3, batch(4, 4))
    assert feed.trust is Trust.STALE
    assert feed.residency.resident_tokens == 16
    assert feed.lost_batches == 2
    assert feed.last_error == "batches 1 to 2 were lost"


def test_a_replay_whose_buffer_no_longer_reaches_back_leaves_the_gap() -> None:
    feed = feed_of(batch(1, 1))
    assert not feed.offer(5, batch(6, 6))
    assert feed.offer_replayed(3, batch(4, 4))
    assert feed.trust is Trust.STALE


def test_duplicates_of_a_replay_change_nothing() -> None:
    feed = feed_of(batch(1, 1), batch(2, 2))
    assert feed.offer(1, batch(2, 2))
    assert feed.offer(0, batch(1, 1))
    assert feed.restarts == 0
    assert feed.residency.resident_tokens == 32


def test_a_number_that_goes_back_in_later_time_is_a_restart() -> None:
    feed = feed_of(batch(1, 1), batch(2, 2))
    assert feed.offer(0, batch(9, 9))
    assert feed.restarts == 1
    assert feed.residency.session_tokens() == {"s": 16}
    assert feed.trust is Trust.EXACT


def test_a_restart_whose_first_batches_were_missed_wants_a_replay_from_the_start() -> None:
    feed = feed_of(batch(1, 1), batch(2, 2), batch(3, 3))
    assert not feed.offer(1, batch(9, 9))
    assert feed.replay_from == 0


def test_a_replay_by_another_process_is_noticed_and_asked_for_again() -> None:
    feed = feed_of(batch(1, 1), batch(2, 2))
    assert not feed.offer(4, batch(14, 14))
    assert feed.replay_from == 1
    assert not feed.offer_replayed(1, batch(11, 11))
    assert feed.replay_from == 0
    for seq in range(5):
        assert feed.offer_replayed(seq, batch(10 + seq, 10 + seq))
    assert feed.trust is Trust.EXACT
    assert feed.residency.resident_tokens == 5 * 16


def test_a_publisher_that_does_not_know_the_last_batch_is_another_process() -> None:
    feed = feed_of(batch(1, 1), batch(2, 2), batch(3, 3))
    assert not feed.replayed(0)
    assert feed.replay_from == 0
    assert feed.residency.resident_tokens == 0
    assert feed.replayed(0)
    assert feed.trust is Trust.EXACT


def test_a_restart_seen_elsewhere_empties_what_the_old_process_said() -> None:
    feed = feed_of(batch(1, 1), batch(2, 2))
    feed.restarted(5.0)
    assert feed.trust is Trust.WAITING
    assert feed.residency.resident_tokens == 0
    assert feed.offer(0, batch(6, 6))
    assert feed.trust is Trust.EXACT


def test_a_restart_that_the_feed_has_heard_of_changes_nothing() -> None:
    feed = feed_of(batch(1, 1))
    assert feed.offer(0, batch(9, 9))
    feed.restarted(8.0)
    assert feed.trust is Trust.EXACT
    assert feed.residency.resident_tokens == 16


def test_a_restart_that_looked_like_the_next_batch_is_undone_once_it_is_seen() -> None:
    feed = feed_of(batch(1, 1))
    assert feed.offer(1, batch(9, 9))
    feed.restarted(8.0)
    assert feed.trust is Trust.WAITING
    assert not feed.offer(2, batch(10, 10))


def test_late_batches_of_the_old_process_are_dropped() -> None:
    feed = feed_of(batch(1, 1), batch(2, 2))
    feed.restarted(5.0)
    assert feed.offer(2, batch(3, 3))
    assert feed.residency.resident_tokens == 0
    assert feed.trust is Trust.WAITING


def test_a_cleared_cache_ends_doubt() -> None:
    feed = feed_of(batch(1, 1))
    feed.accept(3, batch(4, 4))
    assert feed.trust is Trust.STALE
    assert feed.offer(4, wire(5, {"type": "AllBlocksCleared"}))
    assert feed.trust is Trust.EXACT
    assert feed.residency.resident_tokens == 0


def test_a_whole_cache_stored_anew_ends_doubt() -> None:
    feed = feed_of(batch(1, 1))
    feed.accept(3, batch(4, 4))
    feed.regain(48)
    assert feed.trust is Trust.STALE
    for seq in range(4, 8):
        assert feed.offer(seq, batch(seq + 1, seq + 1))
    feed.regain(None)
    assert feed.trust is Trust.STALE
    feed.regain(48)
    assert feed.trust is Trust.EXACT


def test_an_unreadable_batch_makes_residency_unknown() -> None:
    feed = feed_of(batch(1, 1))
    assert feed.offer(1, b"\xc1")
    assert feed.trust is Trust.STALE
    assert feed.residency.resident_tokens == 0
    assert feed.offer(2, batch(3, 3))


def test_more_blocks_than_allowed_make_residency_unknown() -> None:
    feed = KvFeed(2)
    assert feed.offer(0, batch(1, 1, 2))
    assert feed.trust is Trust.EXACT
    assert feed.offer(1, batch(2, 3))
    assert feed.trust is Trust.STALE


def test_a_batch_ends_the_suspicion_of_a_cleared_cache() -> None:
    feed = feed_of(batch(1, 1))
    feed.doubted = True
    assert feed.offer(1, batch(2, 2))
    assert not feed.doubted
