"""RolloutScheduler against a gate that does as it is told: limits, sessions told, and every way out of a block."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from typing import Any

import anyio
import pytest
from tests.unit.client.fake_gate import FakeGate, advice, until

from tidegate.client import GateRefused, RolloutScheduler, SchedulerClosed

QUICK: dict[str, Any] = {"poll_s": 0.02}
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing answers


# --- sessions --------------------------------------------------------------------------------------------------------
async def test_a_session_says_who_it_is_and_is_finished(fake: FakeGate) -> None:
    async with RolloutScheduler(f"{fake.url}/v1", **QUICK) as gate:
        async with gate.session(workload="agentic", group="g1") as s:
            assert s.base_url == gate.base_url == f"{fake.url}/v1"
            assert s.headers == {"X-Session-ID": s.id, "X-Workload-Class": "agentic", "X-Group-ID": "g1"}
            assert fake.started == []  # its first request says it all
        await until(lambda: fake.finished == [s.id])


async def test_its_expected_size_is_announced_before_it_begins(fake: FakeGate) -> None:
    async with RolloutScheduler(fake.url, **QUICK) as gate, gate.session(workload="a", expected_tokens=5000, id="mine"):
        assert fake.asked("/start_session") == [{"session_id": "mine", "workload": "a", "expected_tokens": 5000}]
    assert fake.finished == ["mine"]


async def test_an_adopted_id_is_announced_and_finished_in_its_place(fake: FakeGate) -> None:
    async with RolloutScheduler(fake.url, **QUICK) as gate, gate.session(workload="a") as s:
        s.adopt("trace-1")
        s.adopt("trace-1")
        s.adopt("trace-2")
    assert fake.started == ["trace-1", "trace-2"]
    assert sorted(fake.finished) == ["trace-1", "trace-2"]
    assert [path for _, path, body in fake.calls if body.get("session_id") == "trace-1"][-1] == "/finish_session"


async def test_an_error_in_the_body_is_raised_as_it_is_and_the_session_finished(fake: FakeGate) -> None:
    fake.statuses["/finish_session"] = 400
    async with RolloutScheduler(fake.url, **QUICK) as gate:
        with pytest.raises(ZeroDivisionError):
            async with gate.session(workload="a"):
                _ = 1 / 0
        assert gate.stats().classes["a"].failed == 1
    assert len(fake.finished) == 1  # refused: not asked again


async def test_the_end_is_told_again_until_the_gate_has_heard_it(fake: FakeGate) -> None:
    async with RolloutScheduler(fake.url, **QUICK) as gate:
        fake.statuses["/finish_session"] = 503
        async with gate.session() as s:
            pass
        await until(lambda: len(fake.finished) >= 2)
        assert gate.stats().unfinished == 1
        fake.statuses.clear()
        await until(lambda: gate.stats().unfinished == 0)
    assert set(fake.finished) == {s.id}


@pytest.mark.parametrize("label", ["", "x" * 257, "a\nb", "ü" * 129])
async def test_labels_that_the_gate_would_refuse_are_refused_here(fake: FakeGate, label: str) -> None:
    async with RolloutScheduler(fake.url, **QUICK) as gate:
        for arguments in ({"workload": label}, {"group": label}, {"id": label}):
            with pytest.raises(ValueError, match="bytes"):
                gate.session(**arguments)
        async with gate.session() as s:
            with pytest.raises(ValueError, match="session id"):
                s.adopt(label)


async def test_a_context_is_entered_once_and_a_closed_scheduler_gives_none(fake: FakeGate) -> None:
    gate = RolloutScheduler(fake.url, **QUICK)
    with pytest.raises(SchedulerClosed):
        await gate.session().__aenter__()
    async with gate:
        context = gate.session()
        async with context:
            with pytest.raises(RuntimeError, match="once"):
                await context.__aenter__()
    with pytest.raises(SchedulerClosed):
        await gate.session().__aenter__()
    with pytest.raises(RuntimeError, match="once"):
        await gate.__aenter__()


# --- cancellation ----------------------------------------------------------------------------------------------------
async def test_a_cancelled_rollout_gives_its_slot_back_and_is_finished(fake: FakeGate) -> None:
    fake.advice = advice(1)

    async def rollout() -> None:
        async with gate.session(workload="a"):
            await asyncio.sleep(60)

    async with RolloutScheduler(fake.url, **QUICK) as gate:
        running, waiting = asyncio.create_task(rollout()), asyncio.create_task(rollout())
        await until(lambda: "a" in gate.stats().classes and gate.stats().classes["a"].waiting == 1)
        waiting.cancel()
        running.cancel()
        await asyncio.wait({running, waiting})
        assert gate.stats().in_flight == 0
        async with asyncio.timeout(5), gate.session(workload="a"):
            pass
    assert len(fake.finished) == 2


async def test_a_cancelled_announcement_is_followed_by_a_finish(fake: FakeGate) -> None:
    async with RolloutScheduler(fake.url, **QUICK) as gate:
        entering = asyncio.create_task(gate.session(expected_tokens=1, id="s").__aenter__())
        await asyncio.sleep(0)
        entering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await entering
        assert gate.stats().in_flight == 0
    assert fake.started == fake.finished in ([], ["s"])


async def test_a_cancelled_scheduler_tells_the_end_of_all_its_sessions_first(fake: FakeGate) -> None:
    async def train() -> None:
        async with RolloutScheduler(fake.url, **QUICK) as gate, asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(rollout(gate))

    async def rollout(gate: RolloutScheduler) -> None:
        async with gate.session(workload="a") as s:
            begun.append(s.id)
            await asyncio.sleep(60)

    begun: list[str] = []
    training = asyncio.create_task(train())
    await until(lambda: len(begun) == 5)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert sorted(fake.finished) == sorted(begun)


async def test_cancellation_while_the_scheduler_is_left_is_kept_and_the_ends_are_told(fake: FakeGate) -> None:
    async def train() -> None:
        async with RolloutScheduler(fake.url, **QUICK) as gate:
            async with gate.session(id="s"):
                pass
            leaving.set()

    leaving = asyncio.Event()
    training = asyncio.create_task(train())
    await leaving.wait()
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert fake.finished == ["s"]


async def test_in_a_cancelled_scope_of_anyio_too(fake: FakeGate) -> None:
    """anyio cancels again at every await: clean-up that waited in the scope would be cut."""
    begun: list[str] = []

    async def rollout(gate: RolloutScheduler) -> None:
        async with gate.session(workload="a", expected_tokens=10) as s:
            begun.append(s.id)
            await anyio.sleep(60)

    with anyio.CancelScope() as scope:
        async with RolloutScheduler(fake.url, **QUICK) as gate, anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(rollout, gate)
            await until(lambda: len(begun) == 3)
            scope.cancel()
    assert scope.cancelled_caught
    assert sorted(fake.finished) == sorted(begun)


async def test_ends_that_nobody_hears_do_not_hold_the_trainer_up(
    fake: FakeGate, caplog: pytest.LogCaptureFixture
) -> None:
    async with RolloutScheduler(fake.url, close_s=0.05, **QUICK) as gate:
        fake.statuses["/finish_session"] = 503
        async with gate.session():
            pass
    assert "not told of the end of 1 sessions" in caplog.text


async def test_a_session_that_outlives_its_scheduler_leaves_no_task(
    fake: FakeGate, caplog: pytest.LogCaptureFixture
) -> None:
    async with RolloutScheduler(fake.url, **QUICK) as gate:
        context = gate.session(id="late")
        session = await context.__aenter__()
    session.adopt("later")
    await context.__aexit__(None, None, None)
    assert "outlived" in caplog.text
    assert fake.started == []


# --- limits ----------------------------------------------------------------------------------------------------------
async def test_the_advice_is_followed_up_and_down(fake: FakeGate) -> None:
    fake.advice = advice(2)
    async with RolloutScheduler(fake.url, **QUICK) as gate, asyncio.TaskGroup() as tasks:
        release = asyncio.Event()

        async def rollout() -> None:
            async with gate.session():
                await release.wait()

        for _ in range(6):
            tasks.create_task(rollout())
        await until(lambda: gate.stats().in_flight == 2)
        fake.advice = advice(5)
        await until(lambda: gate.stats().in_flight == 5)
        fake.advice = advice(1)
        await until(lambda: gate.stats().limit == 1)
        assert gate.stats().in_flight == 5  # none is called off
        release.set()


async def test_without_a_mixture_a_look_at_the_advice_is_one_call(fake: FakeGate) -> None:
    fake.advice = advice(2, mixture_given=False)
    async with RolloutScheduler(fake.url, poll_s=60) as gate:
        assert gate.stats().limit == 2
    assert [path for _, path, _ in fake.calls] == ["/advice"]


async def test_its_own_number_is_the_most(fake: FakeGate) -> None:
    fake.advice = advice(1000)
    async with RolloutScheduler(fake.url, max_sessions=3, **QUICK) as gate:
        assert gate.stats().limit == 3


async def test_a_part_of_the_pool_is_a_part_of_the_advice(fake: FakeGate) -> None:
    fake.advice = advice(21, {"a": 16, "b": 5})
    async with RolloutScheduler(fake.url, part=1 / 4, **QUICK) as gate:
        stats = gate.stats()
        assert stats.limit == 5
        assert gate.stats().source == "following"
        async with gate.session(workload="a"), gate.session(workload="b"):
            by_class = gate.stats().classes
        assert (by_class["a"].limit, by_class["b"].limit) == (4, 1)


async def test_without_a_gate_it_is_a_plain_limiter() -> None:
    async with RolloutScheduler(None, sessions={"a": 1, "b": 2}) as gate:
        async with gate.session(workload="a") as s:
            assert (s.base_url, dict(s.headers)["X-Workload-Class"]) == (None, "a")
            another = asyncio.create_task(gate.session(workload="a").__aenter__())
            async with gate.session(workload="b"), gate.session(workload="b"):
                assert not another.done()
        await another
        assert gate.stats().source == "fixed"


async def test_a_gate_that_is_away_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with RolloutScheduler(NOWHERE, sessions=2, mixture={"a": 1}, **QUICK) as gate:
        async with gate.session(workload="a", expected_tokens=1) as s:
            assert s.base_url == f"{NOWHERE}/v1"
        await asyncio.sleep(0.2)
        assert (gate.stats().source, gate.stats().limit) == ("fixed", 2)
    said = [record for record in caplog.records if "no advice" in record.getMessage()]
    assert len(said) == 1
    assert said[0].levelno == logging.WARNING


@pytest.mark.parametrize(
    "answer", [{"sessions": "many"}, {"object": "list"}, [], advice(-1, reason=None) | {"classes": 3}]
)
async def test_an_answer_that_is_no_advice_leaves_the_fixed_limits(fake: FakeGate, answer: Any) -> None:
    fake.advice = answer
    async with RolloutScheduler(fake.url, sessions=7, **QUICK) as gate:
        assert (gate.stats().source, gate.stats().limit) == ("fixed", 7)


async def test_an_engine_instead_of_a_gate_leaves_the_fixed_limits(fake: FakeGate) -> None:
    fake.statuses = {"/advice": 404, "/mixture": 404}
    async with RolloutScheduler(fake.url, sessions=7, mixture={"a": 1}, **QUICK) as gate:
        assert (gate.stats().source, gate.stats().limit) == ("fixed", 7)


async def test_a_gate_that_restarts_is_followed_again_and_told_the_mixture(
    fake: FakeGate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tidegate.client")
    fake.advice = advice(5)
    async with RolloutScheduler(fake.url, mixture={"a": 3, "b": 1}, **QUICK) as gate:
        assert fake.asked("/mixture") == [{"shares": {"a": 0.75, "b": 0.25}}]
        async with gate.session(workload="a", id="s"):
            await fake.stop()
            await until(lambda: gate.stats().source == "last")
            assert gate.stats().limit == 5
        fake.advice = advice(3, mixture_given=False)
        await fake.start()
        await until(lambda: gate.stats().source == "following" and gate.stats().limit == 3)
        await until(lambda: gate.stats().unfinished == 0)
    assert len(fake.asked("/mixture")) >= 2
    assert fake.finished == ["s"]
    assert [r.getMessage().split(" ")[0] for r in caplog.records if r.name == "tidegate.client"] == [
        "following",
        "the",  # gate does not answer
        "following",
    ]


async def test_a_mixture_that_the_gate_refuses_is_an_error(fake: FakeGate) -> None:
    fake.statuses["/mixture"] = 400
    with pytest.raises(GateRefused) as refused:
        async with RolloutScheduler(fake.url, mixture={"a": 1}, **QUICK):
            pass
    assert (refused.value.status, refused.value.code) == (400, "told_so")


@pytest.mark.parametrize(
    "arguments",
    [
        {"mixture": {"a": -1.0}},
        {"sessions": 0},
        {"sessions": {}},
        {"max_sessions": 0},
        {"poll_s": 0},
        {"part": 0},
        {"part": 1.5},
        {"sessions": {"a": 0}},
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"share|session|poll"):
        RolloutScheduler(NOWHERE, **arguments)
    with pytest.raises(ValueError, match="URL"):
        RolloutScheduler("gate:8080")


# --- the mixture -----------------------------------------------------------------------------------------------------
async def test_sessions_come_in_the_mixture_whoever_asks(fake: FakeGate) -> None:
    fake.advice = advice(4, {"a": 2, "b": 2})
    async with RolloutScheduler(fake.url, mixture={"a": 0.75, "b": 0.25}, **QUICK) as gate:
        seen = Counter[str | None]()
        for _ in range(40):
            async with gate.session() as s:
                seen[s.workload] += 1
        assert seen == {"a": 30, "b": 10}
        assert gate.stats().tv_distance == pytest.approx(0.0)
        await gate.set_mixture({"b": 1.0})
        assert [gate.next_class() for _ in range(3)] == ["b", "b", "b"]
    assert fake.asked("/mixture")[-1] == {"shares": {"b": 1.0}}


async def test_without_a_mixture_there_is_no_next_class(fake: FakeGate) -> None:
    async with RolloutScheduler(fake.url, **QUICK) as gate:
        with pytest.raises(ValueError, match="mixture"):
            gate.next_class()
        async with gate.session() as s:
            assert s.workload is None
            assert set(s.headers) == {"X-Session-ID"}
