"""Subscribes to a replica's KV events and reports which session's KV is resident.

One SUB socket for each data-parallel rank, connected to where the engine binds its publisher; ZMQ reconnects by itself.
Missed batches are asked for at the rank's replay socket (a ROUTER: [empty, first number] asks; [empty, topic, number,
payload] answers, number -1 ends), at the start too, so that a router that restarts learns what is resident. Older
publishers leave the topic out of a replay.

Nothing is reported unless every rank's residency is exact: an unknown cache must not read as an empty one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec
import zmq
import zmq.asyncio

from tidegate.clock import Clock
from tidegate.config.engines import EnginesConfig
from tidegate.engines.base import KvSource
from tidegate.engines.kv_feed import KvFeed, Trust
from tidegate.types import ReplicaId, ReplicaResidency, SessionId

_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_RECEIVE_LIMIT = 100_000  # batches kept by ZMQ while we replay, as many as vLLM's publisher keeps
_REPLAY_RETRY_S = 30.0  # a replay socket that did not answer is left alone for this
_BATCHES_AT_ONCE = 64  # then others get the event loop
_IDLE_PERIODS = 5  # between reports while nothing changes
_SOCKET_RETRY_S = 5.0
_LOOK_AGAIN_S = 60.0  # for publishers, of an engine that named none
_LOOK_SOON_S = 0.5  # of an engine that could not be asked yet


class KvEventsView(msgspec.Struct, frozen=True, kw_only=True):
    """For /state."""

    trust: Trust
    ranks: int
    blocks: int
    resident_tokens: int
    offloaded_tokens: dict[str, int]
    batches: int
    lost_batches: int
    restarts: int
    last_error: str | None


class KvEvents:
    """All ranks of one replica."""

    def __init__(
        self, url: ReplicaId, config: EnginesConfig, clock: Clock, capacity_tokens: Callable[[], int | None]
    ) -> None:
        self._url = url
        self._config = config
        self._clock = clock
        self._capacity_tokens = capacity_tokens
        self._feeds: list[KvFeed] = []
        self._reported_evicted_tokens = 0
        self._reported_at_s: float | None = None
        self._reported_batches = -1
        self._look_at_s = float("-inf")

    async def run(
        self, find_sources: Callable[[], Awaitable[list[KvSource] | None]], report: Callable[[ReplicaResidency], None]
    ) -> None:
        """Until cancelled. `find_sources` asks the engine for its publishers; None: it could not be asked."""
        sources: list[KvSource] = []
        reader: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while True:
                if self._clock.now_s() >= self._look_at_s:
                    found = await find_sources()
                    self._look_at_s = self._clock.now_s() + (_LOOK_SOON_S if found is None else _LOOK_AGAIN_S)
                    if found is not None and found != sources:
                        if reader is not None:
                            reader.cancel()
                        sources = found
                        reader = tasks.create_task(self._read(sources))
                snapshot = self.snapshot()
                if snapshot is not None:
                    report(snapshot)
                await asyncio.sleep(self._config.residency_period_s / 2)

    async def _read(self, sources: Sequence[KvSource]) -> None:
        self._feeds = [KvFeed(self._config.kv_event_block_limit) for _ in sources]
        self._reported_evicted_tokens, self._reported_batches = 0, -1
        async with asyncio.TaskGroup() as tasks:
            for source, feed in zip(sources, self._feeds, strict=True):
                tasks.create_task(_Subscription(source, feed, self._config, self._clock).run())

    def restarted(self, started_at_s: float | None) -> None:
        """The replica is a new process since this Unix time, seen by other means than its events. A feed that has
        heard of the new one already is left as it is. The publishers may be others now."""
        self._look_at_s = self._clock.now_s()
        for feed in self._feeds:
            feed.restarted(started_at_s)

    def doubt(self) -> None:
        """The cache may have been cleared. Engines publish that with their next batch only, so until it comes nothing
        is reported."""
        for feed in self._feeds:
            feed.doubted = True

    def snapshot(self) -> ReplicaResidency | None:
        """What is resident; None unless it is known, and at most once per `residency_period_s`. Between batches it is
        given again now and then, so that its age tells a dead stream from an idle engine's."""
        if not self._due():
            return None
        feeds = self._feeds
        tokens: dict[SessionId, int] = {}
        for feed in feeds:
            for session, count in feed.residency.session_tokens().items():
                tokens[session] = tokens.get(session, 0) + count
        evicted = sum(feed.residency.evicted_tokens for feed in feeds)
        report = ReplicaResidency(
            at_s=self._clock.now_s(),
            replica=self._url,
            session_tokens=tokens,
            resident_tokens=sum(feed.residency.resident_tokens for feed in feeds),
            evicted_tokens=evicted - self._reported_evicted_tokens,
        )
        self._reported_evicted_tokens, self._reported_at_s = evicted, report.at_s
        self._reported_batches = sum(feed.batches for feed in feeds)
        return report

    def _due(self) -> bool:
        if self.trust is not Trust.EXACT or any(feed.doubted for feed in self._feeds):
            return False
        if self._reported_at_s is None:
            return True
        age_s = self._clock.now_s() - self._reported_at_s
        changed = self._reported_batches != sum(feed.batches for feed in self._feeds)
        return age_s >= self._config.residency_period_s * (1 if changed else _IDLE_PERIODS)

    @property
    def trust(self) -> Trust:
        """The least of all ranks'."""
        for feed in self._feeds:
            feed.regain(self._rank_capacity_tokens())
        trusts = {feed.trust for feed in self._feeds}
        return next((trust for trust in (Trust.STALE, Trust.WAITING, Trust.EXACT) if trust in trusts), Trust.WAITING)

    def view(self) -> KvEventsView:
        offloaded: dict[str, int] = {}
        for feed in self._feeds:
            for medium, tokens in feed.residency.offloaded_tokens().items():
                offloaded[medium] = offloaded.get(medium, 0) + tokens
        return KvEventsView(
            trust=self.trust,
            ranks=len(self._feeds),
            blocks=sum(len(feed.residency) for feed in self._feeds),
            resident_tokens=sum(feed.residency.resident_tokens for feed in self._feeds),
            offloaded_tokens=offloaded,
            batches=sum(feed.batches for feed in self._feeds),
            lost_batches=sum(feed.lost_batches for feed in self._feeds),
            restarts=sum(feed.restarts for feed in self._feeds),
            last_error=next((feed.last_error for feed in self._feeds if feed.last_error), None),
        )

    def _rank_capacity_tokens(self) -> int | None:
        capacity = self._capacity_tokens()
        return None if capacity is None else capacity // max(1, len(self._feeds))


class _Subscription:
    """One rank's sockets."""

    def __init__(self, source: KvSource, feed: KvFeed, config: EnginesConfig, clock: Clock) -> None:
        self._source = source
        self._feed = feed
        self._config = config
        self._clock = clock
        self._replay_failed_at_s: float | None = None

    async def run(self) -> None:
        """Until cancelled: sockets that cannot be had cost residency, never the replica."""
        while True:
            try:
                await self._follow()
            except (zmq.ZMQError, OSError) as error:
                self._feed.last_error = f"{self._source.endpoint}: {error}"
            await asyncio.sleep(_SOCKET_RETRY_S)

    async def _follow(self) -> None:
        with self._socket(zmq.SUB) as subscriber:
            subscriber.setsockopt(zmq.RCVHWM, _RECEIVE_LIMIT)
            subscriber.setsockopt(zmq.SUBSCRIBE, self._source.topic.encode())
            subscriber.connect(self._source.endpoint)
            await self._replay()
            handled = 0
            while True:
                frames = await subscriber.recv_multipart()
                await self._live(frames)
                handled += 1
                if handled % _BATCHES_AT_ONCE == 0:
                    await asyncio.sleep(0)

    async def _live(self, frames: list[bytes]) -> None:
        if len(frames) < 2 or len(frames[-2]) != 8:
            return
        seq, payload = int.from_bytes(frames[-2], "big"), frames[-1]
        if self._feed.offer(seq, payload):
            return
        if self._may_replay():
            await self._replay()
        self._feed.accept(seq, payload)

    def _may_replay(self) -> bool:
        failed_at_s = self._replay_failed_at_s
        return failed_at_s is None or self._clock.now_s() - failed_at_s >= _REPLAY_RETRY_S

    async def _replay(self) -> None:
        if self._source.replay_endpoint is None:
            return
        try:
            async with asyncio.timeout(self._config.kv_replay_timeout_s):
                while not await self._replay_from(self._source.replay_endpoint, self._feed.replay_from):
                    pass  # another process answered, or some batches were dropped on the way
            self._replay_failed_at_s = None
        except (TimeoutError, zmq.ZMQError) as error:
            self._replay_failed_at_s = self._clock.now_s()
            self._feed.last_error = f"replay at {self._source.replay_endpoint}: {str(error) or 'no answer'}"

    async def _replay_from(self, endpoint: str, first: int) -> bool:
        """False: to be asked again. A publisher's ROUTER drops what its queue (1,000 batches) cannot hold."""
        with self._socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.RCVHWM, 0)
            dealer.connect(endpoint)
            await dealer.send_multipart([b"", first.to_bytes(8, "big")])
            handled = 0
            while True:
                frames = await dealer.recv_multipart()
                if len(frames) < 2 or frames[-2] == _END_OF_REPLAY:
                    break
                seq = int.from_bytes(frames[-2], "big")
                dropped = handled > 0 and seq > self._feed.next_seq
                if dropped or not self._feed.offer_replayed(seq, frames[-1]):
                    return False
                handled += 1
                if handled % _BATCHES_AT_ONCE == 0:
                    await asyncio.sleep(0)
        return self._feed.replayed(handled)

    @contextlib.contextmanager
    def _socket(self, kind: int) -> Iterator[zmq.asyncio.Socket]:
        socket = zmq.asyncio.Context.instance().socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        try:
            yield socket
        finally:
            socket.close()
