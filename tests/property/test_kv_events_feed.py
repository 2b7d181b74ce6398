"""Whatever is dropped, doubled, replayed or restarted: when a feed says that it is exact, it is."""

from __future__ import annotations

import itertools
from collections import deque

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tidegate.engines.kv_feed import KvFeed, Trust
from tidegate.engines.kv_wire import decode
from tidegate.engines.residency import Residency

LIMIT = 10**6


class Publisher:
    """An engine's publisher: numbers batches from 0, keeps the last few for replay."""

    def __init__(self, started_at_s: float) -> None:
        self.started_at_s = started_at_s
        self.numbers = itertools.count()
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=6)
        self.history: list[bytes] = []

    def publish(self, at_s: float, events: list[dict[str, object]]) -> tuple[int, bytes]:
        message = (next(self.numbers), msgspec.msgpack.encode([at_s, events, 0]))
        self.buffer.append(message)
        self.history.append(message[1])
        return message


class FeedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.feed = KvFeed(LIMIT)
        self.publisher = Publisher(self.now_s)
        self.sent: list[tuple[int, bytes]] = []  # live messages of this process that reached the socket
        self.restart_unseen = False

    def tick(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def replay(self) -> None:
        again, restarts = True, self.feed.restarts
        while again:
            first, batches, again = self.feed.replay_from, 0, False
            for seq, payload in list(self.publisher.buffer):
                if seq >= first and not again:
                    again = not self.feed.offer_replayed(seq, payload)
                    batches += 1
            again = again or not self.feed.replayed(batches)
        if self.feed.restarts > restarts:  # else a restart may have looked like the next batch: only its metrics tell
            self.restart_unseen = False

    def deliver(self, seq: int, payload: bytes, *, replay_works: bool) -> None:
        if not self.feed.offer(seq, payload):
            if replay_works:
                self.replay()
            self.feed.accept(seq, payload)

    @rule(
        hashes=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
        session=st.sampled_from("ab"),
        kind=st.sampled_from(["store", "store", "remove", "clear"]),
        delivered=st.sampled_from([True, True, False]),
        replay_works=st.booleans(),
    )
    def publish(self, hashes: list[int], session: str, kind: str, delivered: bool, replay_works: bool) -> None:
        events: dict[str, dict[str, object]] = {
            "store": {"type": "BlockStored", "block_hashes": hashes, "block_size": 1, "session_id": session},
            "remove": {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"},
            "clear": {"type": "AllBlocksCleared"},
        }
        message = self.publisher.publish(self.tick(), [events[kind]])
        if delivered:
            self.sent.append(message)
            self.deliver(*message, replay_works=replay_works)

    @rule(index=st.integers(0, 20), replay_works=st.booleans())
    def deliver_again(self, index: int, replay_works: bool) -> None:
        if self.sent:
            self.deliver(*self.sent[index % len(self.sent)], replay_works=replay_works)

    @rule()
    def subscribe_with_replay(self) -> None:
        self.replay()

    @rule()
    def engine_restarts(self) -> None:
        self.publisher = Publisher(self.tick())
        self.sent = []
        self.restart_unseen = True

    @rule()
    def restart_is_seen(self) -> None:
        self.feed.restarted(self.publisher.started_at_s)
        self.restart_unseen = False

    @invariant()
    def exact_means_exact(self) -> None:
        caught_up = self.feed.next_seq == len(self.publisher.history)
        if self.feed.trust is not Trust.EXACT or self.restart_unseen or not caught_up:
            return
        truth = Residency(LIMIT)
        for payload in self.publisher.history:
            truth.apply(decode(payload).events)
        assert self.feed.residency.resident_tokens == truth.resident_tokens
        assert self.feed.residency.session_tokens() == truth.session_tokens()


FeedMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestFeed = FeedMachine.TestCase
