"""A monitor against a real server that behaves as a replica does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from tests.unit.engines.stub import CLOCK, Recorder, StubReplica, eventually, store, stub_publisher, stub_replica

from tidegate.config.engines import EnginesConfig
from tidegate.engines.control import control_session
from tidegate.engines.health import State
from tidegate.engines.monitor import ReplicaMonitor
from tidegate.types import AnyEvent, ReplicaHealth, ReplicaReset, ReplicaResidency, ReplicaSample

FAST = EnginesConfig(
    scrape_period_s=0.02,
    health_period_s=0.02,
    scrape_timeout_s=10.0,
    health_timeout_s=10.0,
    eject_s=0.05,
    drain_s=0.05,
    residency_period_s=0.02,
)


@contextlib.asynccontextmanager
async def monitored(
    replica: StubReplica, config: EnginesConfig = FAST
) -> AsyncIterator[tuple[ReplicaMonitor, Recorder]]:
    recorder = Recorder()
    async with control_session(config) as session:
        monitor = ReplicaMonitor(replica.url, config, recorder, CLOCK, session)
        task = asyncio.create_task(monitor.run())
        try:
            yield monitor, recorder
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def health(usable: bool, reason: str) -> Callable[[AnyEvent], bool]:
    return lambda event: isinstance(event, ReplicaHealth) and (event.usable, event.reason) == (usable, reason)


def sample(**fields: object) -> Callable[[AnyEvent], bool]:
    return lambda event: (
        isinstance(event, ReplicaSample) and all(getattr(event, name) == value for name, value in fields.items())
    )


def reset(reason: str) -> Callable[[AnyEvent], bool]:
    return lambda event: isinstance(event, ReplicaReset) and event.reason == reason


async def test_a_replica_that_answers_is_usable_and_sampled() -> None:
    async with stub_replica() as replica:
        replica.metrics(running=2, waiting=1, prompt=10, cached=4, generated=3, started=100)
        async with monitored(replica) as (monitor, recorder):
            await recorder.until(health(True, "ok"))
            index = await recorder.until(sample(running=2, waiting=1, prompt_tokens_total=10, cached_tokens_total=4))
            event = recorder.events[index]
            assert isinstance(event, ReplicaSample)
            assert event.kv_capacity_tokens is None
            assert event.kv_used_fraction is None
            assert (await monitor.wait_probed(20.0)).usable
            view = monitor.view()
            assert (view.engine, view.state) == ("vllm", State.HEALTHY)
            assert view.sample_age_s is not None
            assert msgspec.json.decode(msgspec.json.encode(view))["state"] == "healthy"


async def test_a_configured_capacity_wins_and_one_by_url_wins_over_it() -> None:
    async with stub_replica() as replica:
        replica.answers["/metrics"] = (200, 'vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1.0\n')
        async with monitored(replica) as (_, recorder):
            await recorder.until(sample(kv_capacity_tokens=160))
        async with monitored(replica, msgspec.structs.replace(FAST, kv_capacity_tokens=99)) as (_, recorder):
            await recorder.until(sample(kv_capacity_tokens=99))
        by_url = msgspec.structs.replace(FAST, kv_capacity_tokens=99, kv_capacity_tokens_by_url={replica.url: 77})
        async with monitored(replica, by_url) as (_, recorder):
            await recorder.until(sample(kv_capacity_tokens=77))


async def test_nobody_there_at_start_is_said_and_found_later() -> None:
    replica = StubReplica()
    await replica.start()
    port = replica.port
    await replica.stop()
    async with monitored(replica) as (monitor, recorder):
        await recorder.until(health(False, "connect_failed"))
        assert monitor.state is State.UNREACHABLE
        assert monitor.view().last_error
        await replica.start(port)
        await recorder.until(health(True, "ok"))
        await replica.stop()


async def test_a_restart_is_told_before_the_replica_is_usable_again() -> None:
    async with stub_replica() as replica:
        replica.metrics(prompt=10, started=100)
        async with monitored(replica) as (_, recorder):
            await recorder.until(sample(prompt_tokens_total=10))
            await replica.stop()
            gone = await recorder.until(health(False, "connect_failed"))
            replica.metrics(prompt=0, started=200)
            await replica.start(replica.port)
            back = await recorder.until(health(True, "ok"), after=gone)
            assert await recorder.until(reset("restart"), after=gone) < back


@pytest.mark.parametrize(("prompt", "generated"), [(5, 9), (10, 1)])
async def test_a_counter_that_goes_backwards_is_a_restart(prompt: int, generated: int) -> None:
    async with stub_replica() as replica:
        replica.metrics(prompt=10, generated=9)
        async with monitored(replica) as (_, recorder):
            await recorder.until(sample(prompt_tokens_total=10))
            replica.metrics(prompt=prompt, generated=generated)
            await recorder.until(reset("restart"))


async def test_counters_that_grow_are_no_restart() -> None:
    async with stub_replica() as replica:
        replica.metrics(prompt=10, started=100.0)
        async with monitored(replica) as (_, recorder):
            await recorder.until(sample(prompt_tokens_total=10))
            replica.metrics(prompt=11, started=100.0)
            await recorder.until(sample(prompt_tokens_total=11))
            assert not any(isinstance(event, ReplicaReset) for event in recorder.events)


async def test_a_pause_made_at_the_engine_is_seen_and_so_is_its_end() -> None:
    async with stub_replica() as replica:
        replica.metrics()
        replica.answers["/is_paused"] = (200, '{"is_paused":false}')
        async with monitored(replica) as (monitor, recorder):
            await recorder.until(health(True, "ok"))
            await recorder.until(sample(running=0))
            replica.answers["/is_paused"] = (200, '{"is_paused":true}')
            paused = await recorder.until(health(False, "paused"))
            assert monitor.engine_paused is True
            assert await recorder.until(reset("paused_at_engine")) < paused
            replica.answers["/is_paused"] = (200, '{"is_paused":false}')
            await recorder.until(health(True, "ok"), after=paused)


async def test_health_is_not_asked_while_paused() -> None:
    async with stub_replica() as replica:
        replica.metrics()
        replica.answers["/is_paused"] = (200, '{"is_paused":true}')
        async with monitored(replica) as (_, recorder):
            await recorder.until(health(False, "paused"))
            await eventually(lambda: sum(call[1] == "/is_paused" for call in replica.calls) >= 5)
            assert not any(call[1] == "/health" for call in replica.calls)


async def test_sglang_paused_is_not_ready_and_its_health_is_left_alone() -> None:
    async with stub_replica() as replica:
        replica.answers["/metrics"] = (200, "sglang:num_running_reqs 0\nsglang:max_total_num_tokens 100\n")
        replica.answers["/ready"] = (200, "")
        async with monitored(replica) as (monitor, recorder):
            await recorder.until(sample(kv_capacity_tokens=100))
            await recorder.until(health(True, "ok"))
            replica.answers["/ready"] = (503, "")
            replica.hanging.add("/health")
            paused = await recorder.until(health(False, "paused"))
            await eventually(lambda: sum(call[1] == "/ready" for call in replica.calls) >= 6)
            assert monitor.state is State.PAUSED
            assert not any(isinstance(event, ReplicaReset) for event in recorder.events)
            replica.release()
            replica.answers["/ready"] = (200, "")
            await recorder.until(health(True, "ok"), after=paused)


async def test_sglang_without_metrics_is_sampled_by_its_loads() -> None:
    async with stub_replica() as replica:
        replica.answers["/server_info"] = (200, '{"internal_states":[],"kv_events":null}')
        replica.answers["/v1/loads"] = (
            200,
            '{"loads":[{"dp_rank":0,"num_running_reqs":2,"num_waiting_reqs":1,"max_total_num_tokens":64,'
            '"token_usage":0.5}]}',
        )
        async with monitored(replica) as (_, recorder):
            await recorder.until(sample(running=2, waiting=1, kv_capacity_tokens=64, prompt_tokens_total=None))


async def test_a_sleeping_engine_is_not_usable_and_is_cold() -> None:
    async with stub_replica() as replica:
        replica.answers["/metrics"] = (200, 'vllm:engine_sleep_state{sleep_state="awake"} 1.0\n')
        async with monitored(replica) as (_, recorder):
            await recorder.until(health(True, "ok"))
            replica.answers["/metrics"] = (200, 'vllm:engine_sleep_state{sleep_state="awake"} 0.0\n')
            asleep = await recorder.until(health(False, "sleeping"))
            assert await recorder.until(reset("sleep")) < asleep
            replica.answers["/metrics"] = (200, 'vllm:engine_sleep_state{sleep_state="awake"} 1.0\n')
            await recorder.until(health(True, "ok"), after=asleep)


async def test_nothing_counts_while_the_gate_holds_the_pool() -> None:
    async with stub_replica() as replica:
        replica.metrics()
        async with monitored(replica) as (monitor, recorder):
            await recorder.until(health(True, "ok"))
            monitor.suspend()
            told = len([event for event in recorder.events if not isinstance(event, ReplicaSample)])
            replica.answers["/health"] = (503, "")
            replica.answers["/is_paused"] = (200, '{"is_paused":true}')
            for _ in range(10):
                monitor.connect_failed("reset")
            monitor.saw_empty_abort()
            await asyncio.sleep(0.1)
            assert len([event for event in recorder.events if not isinstance(event, ReplicaSample)]) == told
            replica.answers["/health"] = (200, "")
            replica.answers["/is_paused"] = (200, '{"is_paused":false}')
            monitor.resume()
            await eventually(lambda: monitor.engine_paused is False)
            assert monitor.state is State.HEALTHY


async def test_failed_connections_eject_and_an_answer_brings_it_back() -> None:
    async with stub_replica() as replica:
        replica.metrics()
        async with monitored(replica) as (monitor, recorder):
            await recorder.until(health(True, "ok"))
            for _ in range(3):
                monitor.connect_failed("reset")
            assert monitor.state is State.EJECTED
            ejected = await recorder.until(health(False, "ejected"))
            half = await recorder.until(health(True, "half_open"), after=ejected)
            monitor.response_ok()
            await recorder.until(health(True, "ok"), after=half)


async def test_a_refused_request_has_the_replica_probed_at_once() -> None:
    config = msgspec.structs.replace(FAST, health_period_s=3600.0)
    async with stub_replica() as replica, monitored(replica, config) as (monitor, recorder):
        await recorder.until(health(True, "ok"))
        probes = sum(call[1] == "/health" for call in replica.calls)
        monitor.connect_failed("refused")
        await eventually(lambda: sum(call[1] == "/health" for call in replica.calls) > probes)


async def test_a_hanging_replica_stays_usable_if_it_is_the_last_and_comes_back_when_it_becomes_so() -> None:
    config = msgspec.structs.replace(FAST, health_timeout_s=0.05, scrape_timeout_s=0.05, stalled_after_s=0.2)
    last = [True]
    recorder = Recorder()
    async with stub_replica() as replica, control_session(config) as session:
        replica.metrics(prompt=1, generated=1)
        monitor = ReplicaMonitor(replica.url, config, recorder, CLOCK, session, last_usable=lambda: last[0])
        task = asyncio.create_task(monitor.run())
        try:
            await recorder.until(sample(prompt_tokens_total=1))
            await recorder.until(health(True, "ok"))
            replica.hanging |= {"/health", "/metrics"}
            hung = CLOCK.now_s()
            await eventually(lambda: CLOCK.now_s() > hung + 1.0)
            assert monitor.state is State.HEALTHY
            last[0] = False
            stalled = await recorder.until(health(False, "stalled"))
            last[0] = True  # the others are gone meanwhile
            await recorder.until(health(True, "ok"), after=stalled)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            replica.release()


async def test_an_empty_abort_is_draining() -> None:
    config = msgspec.structs.replace(FAST, drain_s=60.0)
    async with stub_replica() as replica, monitored(replica, config) as (monitor, recorder):
        await recorder.until(health(True, "ok"))
        monitor.saw_empty_abort()
        assert monitor.state is State.DRAINING
        await recorder.until(health(False, "draining"))


@pytest.mark.parametrize("status", [401, 404, 429])
async def test_a_4xx_to_a_probe_is_an_answer(status: int) -> None:
    async with stub_replica() as replica:
        replica.answers["/health"] = (status, "")
        async with monitored(replica) as (_, recorder):
            await recorder.until(health(True, "ok"))


async def test_a_5xx_to_probes_is_unhealthy() -> None:
    async with stub_replica() as replica, monitored(replica) as (_, recorder):
        await recorder.until(health(True, "ok"))
        replica.answers["/health"] = (503, "")
        await recorder.until(health(False, "health_failed"))


async def test_missing_or_unreadable_metrics_leave_the_replica_usable_and_unread() -> None:
    async with stub_replica() as replica:
        replica.answers["/metrics"] = (200, "vllm:num_requests_running {{{\n")
        async with monitored(replica) as (monitor, recorder):
            await recorder.until(health(True, "ok"))
            await eventually(lambda: "not readable" in (monitor.view().last_error or ""))
            assert monitor.view().sample_age_s is None
            assert not any(isinstance(event, ReplicaSample) for event in recorder.events)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/is_paused", '{"is_paused": false, "more": ' + "[" * 100_000),
        ("/kv_event_sources", "[" * 100_000),
        ("/kv_event_sources", '{"0": {"endpoint": "tcp://*:%s", "publisher": "zmq"}}' % ("9" * 5000)),
        ("/metrics", 'vllm:cache_config_info{block_size="16",num_gpu_blocks="%s"} 1\n' % ("9" * 5000)),
    ],
)
async def test_nothing_that_a_replica_says_ends_its_monitor(path: str, text: str) -> None:
    async with stub_replica() as replica:
        replica.metrics(running=1)
        replica.answers[path] = (200, text)
        async with monitored(replica) as (_, recorder):
            await eventually(lambda: any(called == path for _, called, *_ in replica.calls))
            before = len(replica.calls)
            await eventually(lambda: len(replica.calls) > before + 10)
            replica.metrics(running=3)
            await recorder.until(sample(running=3))


async def test_resident_kv_is_reported_from_the_publisher_that_the_engine_names() -> None:
    async with stub_replica() as replica, stub_publisher() as publisher:
        replica.metrics()
        publisher.remember(0, 1.0, store(1, 2, session="a"))
        replica.answers["/kv_event_sources"] = (
            200,
            msgspec.json.encode(
                {
                    "0": {
                        "enable_kv_cache_events": True,
                        "publisher": "zmq",
                        "endpoint": f"tcp://*:{publisher.port}",
                        "replay_endpoint": f"tcp://*:{publisher.replay_port}",
                        "topic": "kv",
                    }
                }
            ).decode(),
        )
        async with monitored(replica) as (monitor, recorder):
            await recorder.until(
                lambda event: isinstance(event, ReplicaResidency) and event.session_tokens == {"a": 32}
            )
            assert monitor.view().kv_events.trust == "exact"
        replica.calls.clear()
        async with monitored(replica, msgspec.structs.replace(FAST, kv_events="off")) as (monitor, recorder):
            await recorder.until(sample(running=0))
            await eventually(lambda: len(replica.calls) > 20)
            assert not any(call[1] == "/kv_event_sources" for call in replica.calls)
            assert monitor.view().kv_events.ranks == 0


async def test_scrapes_ask_for_no_compression() -> None:
    async with stub_replica() as replica:
        replica.metrics()
        async with monitored(replica) as (_, recorder):
            await recorder.until(sample(running=0))
        assert {headers["accept-encoding"] for headers in replica.headers} == {"identity"}
