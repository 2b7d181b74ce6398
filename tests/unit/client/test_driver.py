"""run(): rollouts of several classes in the order of the mixture; what goes wrong in one is its own affair."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from rich.console import Console
from tests.unit.client.fake_gate import FakeGate, advice, until

from tidegate.client import Outcome, Rollout, RolloutScheduler, Session
from tidegate.client.progress import ProgressBar

QUICK: dict[str, Any] = {"poll_s": 0.02}
MIXTURE = {"a": 0.75, "b": 0.25}
Play = Callable[[Session], Awaitable[str]]


async def play(session: Session) -> str:
    await asyncio.sleep(0)
    return f"{session.workload}"


async def streamed(count: int) -> AsyncIterator[Play]:
    for _ in range(count):
        await asyncio.sleep(0)
        yield play


async def test_the_mixture_is_kept_and_the_limit_too(fake: FakeGate) -> None:
    fake.advice = advice(4, {"a": 2, "b": 2})
    outcomes: list[Outcome[str]] = []
    most = 0

    async def watched(session: Session) -> str:
        nonlocal most
        most = max(most, gate.stats().in_flight)
        return await play(session)

    async with RolloutScheduler(fake.url, mixture=MIXTURE, **QUICK) as gate:
        sources = {"a": itertools.repeat(watched), "b": itertools.repeat(watched)}
        assert await gate.run(sources, outcomes.append, sessions=40) == 40
        assert gate.stats().in_flight == 0
    assert Counter(outcome.value for outcome in outcomes) == {"a": 30, "b": 10}
    assert most == 4
    assert sorted(fake.finished) == sorted(outcome.session.id for outcome in outcomes)


async def test_a_class_that_has_no_more_leaves_its_part_to_the_others(fake: FakeGate) -> None:
    fake.advice = advice(4, {"a": 2, "b": 2})
    outcomes: list[Outcome[str]] = []
    async with RolloutScheduler(fake.url, mixture=MIXTURE, **QUICK) as gate:
        started = await gate.run({"a": [play] * 3, "b": streamed(20)}, outcomes.append)
        assert gate.stats().classes["a"].started == 3
    assert started == 23
    assert Counter(outcome.value for outcome in outcomes) == {"a": 3, "b": 20}


async def test_a_source_that_is_slow_holds_up_nobody_else(fake: FakeGate) -> None:
    more = asyncio.Event()

    async def slow() -> AsyncIterator[Play]:
        yield play
        await more.wait()
        yield play

    fake.advice = advice(8, {"a": 4, "b": 4})
    outcomes: list[Outcome[str]] = []
    async with RolloutScheduler(fake.url, mixture=MIXTURE, **QUICK) as gate:
        running = asyncio.create_task(gate.run({"a": slow(), "b": [play] * 20}, outcomes.append))
        await until(lambda: len(outcomes) == 21)
        more.set()
        assert await running == 22
    assert Counter(outcome.value for outcome in outcomes) == {"a": 2, "b": 20}


async def test_a_streamed_source_keeps_the_mixture(fake: FakeGate) -> None:
    fake.advice = advice(6)
    outcomes: list[Outcome[str]] = []
    async with RolloutScheduler(fake.url, mixture=MIXTURE, **QUICK) as gate:
        await gate.run({"a": streamed(100), "b": streamed(100)}, outcomes.append, sessions=80)
    counts = Counter(outcome.value for outcome in outcomes)
    assert abs(counts["a"] - 60) <= 3


async def test_a_source_that_is_being_asked_is_let_go_of(fake: FakeGate) -> None:
    let_go = asyncio.Event()

    async def never() -> AsyncIterator[Play]:
        try:
            await asyncio.sleep(60)
        finally:
            let_go.set()
        yield play

    async with RolloutScheduler(fake.url, mixture=MIXTURE, **QUICK) as gate:
        assert await gate.run({"a": never(), "b": itertools.repeat(play)}, lambda outcome: None, sessions=5) == 5
        assert let_go.is_set()
        running = asyncio.create_task(gate.run({"a": never(), "b": [play]}, lambda outcome: None))
        await until(lambda: gate.stats().classes["b"].completed == 6)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert gate.stats().in_flight == 0


async def test_a_rollout_that_raises_is_an_outcome(fake: FakeGate) -> None:
    async def fails(session: Session) -> str:
        raise ZeroDivisionError

    told: list[Outcome[str]] = []

    async def done(outcome: Outcome[str]) -> None:
        await asyncio.sleep(0)
        told.append(outcome)

    async with RolloutScheduler(fake.url, mixture=MIXTURE, **QUICK) as gate:
        await gate.run({"a": [fails, play], "b": []}, done)
        assert (gate.stats().classes["a"].failed, gate.stats().classes["a"].completed) == (1, 1)
    assert sorted(type(outcome.error).__name__ for outcome in told) == ["NoneType", "ZeroDivisionError"]


async def test_what_is_known_of_a_rollout_is_told(fake: FakeGate) -> None:
    rollout = Rollout(play, group="g", expected_tokens=77)
    outcomes: list[Outcome[str]] = []
    async with RolloutScheduler(fake.url, mixture={"a": 1}, **QUICK) as gate:
        await gate.run({"a": [rollout]}, outcomes.append)
    (session,) = [outcome.session for outcome in outcomes]
    assert session.group == "g"
    assert fake.asked("/start_session") == [
        {"session_id": session.id, "workload": "a", "group": "g", "expected_tokens": 77}
    ]
    assert fake.finished == [session.id]


@pytest.mark.parametrize("where", ["done", "source"])
async def test_a_fault_of_the_caller_ends_the_run_and_cancels_what_is_under_way(fake: FakeGate, where: str) -> None:
    async def long(session: Session) -> str:
        await asyncio.sleep(60)
        return ""

    def source() -> Iterator[Play]:
        yield long
        yield long
        yield play
        if where == "source":
            raise ZeroDivisionError
        yield long

    def done(outcome: Outcome[str]) -> None:
        if where == "done":
            raise ZeroDivisionError

    async with RolloutScheduler(fake.url, mixture={"a": 1}, **QUICK) as gate:
        with pytest.raises(ExceptionGroup) as raised:
            await gate.run({"a": source()}, done)
        assert [type(exc) for exc in raised.value.exceptions] == [ZeroDivisionError]
        assert gate.stats().in_flight == 0
        started = gate.stats().classes["a"].started
    assert len(fake.finished) == started


async def test_a_cancelled_run_leaves_no_session(fake: FakeGate) -> None:
    async def long(session: Session) -> str:
        await asyncio.sleep(60)
        return ""

    fake.advice = advice(3)
    async with RolloutScheduler(fake.url, mixture={"a": 1}, **QUICK) as gate:
        running = asyncio.create_task(gate.run({"a": [long] * 9}, lambda outcome: None))
        await until(lambda: gate.stats().in_flight == 3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert gate.stats().in_flight == 0
        assert all(one.waiting == 0 for one in gate.stats().classes.values())
    assert len(fake.finished) == 3


async def test_other_classes_than_the_mixtures_are_refused(fake: FakeGate) -> None:
    async with RolloutScheduler(fake.url, mixture=MIXTURE, **QUICK) as gate:
        with pytest.raises(ValueError, match="differ in agnetic, b"):
            await gate.run({"a": [play], "agnetic": [play]}, lambda outcome: None)


async def test_the_progress_bar_shows_each_class() -> None:
    screen = io.StringIO()
    async with RolloutScheduler(None, mixture=MIXTURE, sessions=2) as gate:
        bar = ProgressBar(gate.stats, Console(file=screen, width=120))
        bar.total = 4
        bar.start()
        await gate.run({"a": [play] * 3, "b": [play]}, lambda outcome: None)
        bar.stop()
    shown = screen.getvalue()
    assert "a" in shown
    assert "4/4" in shown
    assert "0/2 in flight" in shown
