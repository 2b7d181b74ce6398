"""The subscription over real ZMQ sockets: live events, replays, gaps, restarts, several ranks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from tests.unit.engines.stub import CLOCK, Recorder, StubPublisher, eventually, store, stub_publisher

from tidegate.config.engines import EnginesConfig
from tidegate.engines.base import KvSource
from tidegate.engines.kv_events import KvEvents
from tidegate.engines.kv_feed import Trust
from tidegate.types import AnyEvent, ReplicaResidency

URL = "http://r:1"
CONFIG = EnginesConfig(residency_period_s=0.01, kv_replay_timeout_s=5.0)


def source(publisher: StubPublisher, *, rank: int = 0, replay: bool = True) -> KvSource:
    return KvSource(
        rank=rank,
        endpoint=f"tcp://127.0.0.1:{publisher.port}",
        replay_endpoint=f"tcp://127.0.0.1:{publisher.replay_port}" if replay else None,
        topic=publisher.topic.decode(),
    )


@contextlib.asynccontextmanager
async def following(
    *sources: KvSource, config: EnginesConfig = CONFIG, capacity: int | None = None
) -> AsyncIterator[tuple[KvEvents, Recorder]]:
    events, recorder = KvEvents(URL, config, CLOCK, lambda: capacity), Recorder()

    async def find() -> list[KvSource]:
        return list(sources)

    task = asyncio.create_task(events.run(find, recorder))
    try:
        yield events, recorder
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def holds(**tokens: int):
    def check(event: AnyEvent) -> bool:
        return isinstance(event, ReplicaResidency) and event.session_tokens == tokens

    return check


async def publish_until_heard(publisher: StubPublisher, events: KvEvents, seq: int) -> None:
    """A subscription takes a moment; the same batch again is a duplicate."""
    async with asyncio.timeout(20):
        while events.view().batches < 1:
            await publisher.send(seq)
            await asyncio.sleep(0.01)


async def test_what_was_published_before_is_learned_by_replay() -> None:
    async with stub_publisher() as publisher:
        publisher.remember(0, 1.0, store(1, 2, session="a"))
        publisher.remember(1, 2.0, store(3, parent=2, session="b"))
        async with following(source(publisher)) as (_, recorder):
            index = await recorder.until(holds(a=32, b=48))
            report = recorder.events[index]
            assert isinstance(report, ReplicaResidency)
            assert (report.replica, report.resident_tokens) == (URL, 48)
            await publisher.publish(2, 3.0, store(4, parent=3, session="b"))
            await recorder.until(holds(a=32, b=64))


async def test_replays_without_a_topic_frame_are_read() -> None:
    async with stub_publisher(topic_in_replay=False) as publisher:
        publisher.remember(0, 1.0, store(1))
        async with following(source(publisher)) as (_, recorder):
            await recorder.until(holds(s=16))


async def test_an_idle_engine_with_an_empty_replay_holds_nothing() -> None:
    async with stub_publisher() as publisher, following(source(publisher)) as (_, recorder):
        await recorder.until(holds())


async def test_a_gap_is_replayed_before_the_batch_that_showed_it() -> None:
    async with stub_publisher() as publisher:
        publisher.remember(0, 1.0, store(1))
        async with following(source(publisher)) as (events, recorder):
            await recorder.until(holds(s=16))
            publisher.remember(1, 2.0, store(2))
            publisher.remember(2, 3.0, store(3))
            async with asyncio.timeout(20):
                publisher.remember(3, 4.0, store(4))
                while events.view().batches < 4:
                    await publisher.send(3)
                    await asyncio.sleep(0.01)
            await recorder.until(holds(s=64))
            assert events.view().lost_batches == 0
            assert events.trust is Trust.EXACT


async def test_batches_dropped_from_a_replay_are_asked_for_again() -> None:
    async with stub_publisher() as publisher:
        for seq in range(6):
            publisher.remember(seq, seq + 1.0, store(seq + 1))
        publisher.dropped_once = {2, 3}
        async with following(source(publisher)) as (events, recorder):
            await recorder.until(holds(s=96))
            assert events.view().lost_batches == 0
            assert len(publisher.replays) == 2


async def test_without_replay_a_late_subscriber_reports_nothing() -> None:
    async with stub_publisher() as publisher:
        publisher.remember(5, 1.0, store(1))
        async with following(source(publisher, replay=False)) as (events, recorder):
            await publish_until_heard(publisher, events, 5)
            await asyncio.sleep(0.05)
            assert events.trust is Trust.STALE
            assert recorder.events == []
            await publisher.publish(6, 2.0, {"type": "AllBlocksCleared"}, store(9, session="b"))
            await recorder.until(holds(b=16))


async def test_a_replay_socket_that_is_silent_costs_its_timeout_only() -> None:
    config = EnginesConfig(residency_period_s=0.01, kv_replay_timeout_s=0.05)
    async with stub_publisher() as publisher, stub_publisher() as silent:
        silent._task.cancel()
        publisher.remember(5, 1.0, store(1))
        mute = KvSource(
            rank=0, endpoint=source(publisher).endpoint, replay_endpoint=source(silent).replay_endpoint, topic="kv"
        )
        async with following(mute, config=config) as (events, _):
            await publish_until_heard(publisher, events, 5)
            view = events.view()
            assert view.trust is Trust.STALE
            assert view.last_error is not None


async def test_a_restart_is_seen_in_the_numbers() -> None:
    async with stub_publisher() as publisher:
        publisher.remember(0, 1.0, store(1, session="a"))
        publisher.remember(1, 2.0, store(2, session="a"))
        async with following(source(publisher)) as (events, recorder):
            await recorder.until(holds(a=32))
            publisher.history.clear()
            publisher.remember(0, 10.0, store(1, session="b"))
            async with asyncio.timeout(20):
                while events.view().restarts < 1:
                    await publisher.send(0)
                    await asyncio.sleep(0.01)
            await recorder.until(holds(b=16))


async def test_ranks_add_up_and_one_unknown_rank_makes_all_unknown() -> None:
    async with stub_publisher() as first, stub_publisher() as second:
        first.remember(0, 1.0, store(1, session="a"))
        second.remember(0, 1.0, store(1, 2, session="a"), store(3, session="b"))
        both = (source(first), source(second, rank=1))
        async with following(*both) as (_, recorder):
            await recorder.until(holds(a=48, b=16))
        async with following(source(first), source(second, rank=1, replay=False)) as (events, recorder):
            await eventually(lambda: events.view().batches == 1)
            assert events.trust is Trust.WAITING
            assert recorder.events == []


async def test_after_a_clear_that_is_not_published_yet_nothing_is_reported() -> None:
    config = EnginesConfig(residency_period_s=0.002)
    async with stub_publisher() as publisher:
        publisher.remember(0, 1.0, store(1, session="a"))
        async with following(source(publisher), config=config) as (events, recorder):
            await recorder.until(holds(a=16))
            events.doubt()
            told = len(recorder.events)
            await asyncio.sleep(0.1)
            assert len(recorder.events) == told
            publisher.remember(1, 2.0, {"type": "AllBlocksCleared"}, store(7, session="b"))
            async with asyncio.timeout(20):
                while events.view().batches < 2:
                    await publisher.send(1)
                    await asyncio.sleep(0.01)
            index = await recorder.until(lambda event: True, after=told)
            assert holds(b=16)(recorder.events[index])


async def test_reports_say_what_was_evicted_since_the_last() -> None:
    async with stub_publisher() as publisher:
        publisher.remember(0, 1.0, store(1, 2, 3, session="a"))
        publisher.remember(1, 2.0, {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"})
        async with following(source(publisher)) as (_, recorder):
            await recorder.until(holds(a=32))
            reports = [event for event in recorder.events if isinstance(event, ReplicaResidency)]
            assert sum(report.evicted_tokens for report in reports) == 16


@pytest.mark.parametrize("endpoint", ["tcp://", "nonsense"])
async def test_an_endpoint_that_cannot_be_connected_to_is_said_and_does_no_harm(endpoint: str) -> None:
    async with following(KvSource(rank=0, endpoint=endpoint)) as (events, recorder):
        await eventually(lambda: events.view().last_error is not None)
        assert events.trust is Trust.WAITING
        assert recorder.events == []


async def test_other_publishers_named_later_replace_the_first() -> None:
    async with stub_publisher() as first, stub_publisher() as second:
        first.remember(0, 1.0, store(1, session="a"))
        second.remember(0, 1.0, store(1, session="b"))
        named = [source(first)]
        events, recorder = KvEvents(URL, CONFIG, CLOCK, lambda: None), Recorder()

        async def find() -> list[KvSource]:
            return list(named)

        task = asyncio.create_task(events.run(find, recorder))
        try:
            await recorder.until(holds(a=16))
            named[:] = [source(second)]
            events.restarted(None)
            await recorder.until(holds(b=16))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
