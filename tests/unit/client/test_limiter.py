"""Slots: whose turn it is, and that a cancelled waiter neither keeps one nor loses one."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tidegate.client.errors import SchedulerClosed
from tidegate.client.limiter import Limiter
from tidegate.client.slots import Limits, Slots, scaled


def limiter(sessions: int, mixture: dict[str, float] | None = None, **classes: int) -> Limiter:
    return Limiter(Slots(Limits(sessions, dict(classes)), mixture))


async def waits(task: asyncio.Task[object]) -> bool:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return not task.done()


async def queue(gate: Limiter, *workloads: str | None) -> list[asyncio.Task[str | None]]:
    tasks = [asyncio.create_task(gate.acquire(workload)) for workload in workloads]
    await asyncio.sleep(0)
    return tasks


async def test_first_come_first_served() -> None:
    gate = limiter(1)
    await gate.acquire("a")
    first, second = await queue(gate, "b", "a")
    gate.release("a")
    assert await first == "b"
    assert await waits(second)
    gate.release("b")
    assert await second == "a"


async def test_a_cancelled_waiter_leaves_the_queue() -> None:
    gate = limiter(1)
    await gate.acquire("a")
    first, second = await queue(gate, "a", "a")
    first.cancel()
    gate.release("a")  # before the cancelled task has run
    assert await second == "a"
    assert first.cancelled() or await waits(first) is False
    assert gate.slots.total == 1


async def test_one_cancelled_in_the_moment_of_its_turn_gives_the_slot_on() -> None:
    gate = limiter(1)
    await gate.acquire("a")
    first, second = await queue(gate, "a", "a")
    gate.release("a")  # first's turn
    first.cancel()
    assert await second == "a"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert gate.slots.total == 1
    assert gate.waiting("a") == 0


async def test_a_closed_limiter_lets_go_of_those_who_wait() -> None:
    gate = limiter(1)
    await gate.acquire()
    (waiter,) = await queue(gate, None)
    gate.close()
    with pytest.raises(SchedulerClosed):
        await waiter
    with pytest.raises(SchedulerClosed):
        await gate.acquire()


async def test_a_pause_holds_new_ones_only() -> None:
    gate = limiter(2)
    await gate.acquire("a")
    gate.pause()
    (waiter,) = await queue(gate, "a")
    assert await waits(waiter)
    gate.resume()
    assert await waiter == "a"


async def test_a_lower_limit_ends_nothing_and_starts_nothing() -> None:
    gate = limiter(3)
    for _ in range(3):
        await gate.acquire("a")
    gate.set_limits(Limits(1))
    (waiter,) = await queue(gate, "a")
    gate.release("a")
    gate.release("a")
    assert await waits(waiter)
    gate.release("a")
    assert await waiter == "a"


async def test_whoever_takes_any_class_gets_the_one_that_is_owed() -> None:
    gate = limiter(100, {"a": 0.75, "b": 0.25})
    both = frozenset({"a", "b"})
    assert Counter([await gate.acquire(among=both) for _ in range(40)]) == {"a": 30, "b": 10}


async def test_the_class_that_is_owed_goes_before_one_that_came_first() -> None:
    gate = limiter(1, {"a": 0.5, "b": 0.5})
    await gate.acquire("a")
    another_a, b = await queue(gate, "a", "b")
    gate.release("a")
    assert await b == "b"
    assert await waits(another_a)
    another_a.cancel()


async def test_room_of_a_class_that_is_not_there_is_kept_for_it() -> None:
    gate = limiter(10, {"a": 0.5, "b": 0.5}, a=5, b=5)
    tasks = await queue(gate, *["a"] * 8)
    assert [task.done() for task in tasks] == [True] * 5 + [False] * 3
    assert await gate.acquire("b") == "b"
    assert await asyncio.gather(*(await queue(gate, *["b"] * 3))) == ["b"] * 3
    for task in tasks:
        task.cancel()


async def test_limits_that_are_wrong_do_not_break_the_mixture() -> None:
    gate = limiter(20, {"a": 0.5, "b": 0.5}, a=1, b=19)
    both = frozenset({"a", "b"})
    assert Counter([await gate.acquire(among=both) for _ in range(20)]) == {"a": 10, "b": 10}


async def test_written_limits_by_class_are_never_passed() -> None:
    gate = Limiter(Slots(Limits(4, {"a": 1, "b": 3}, hard=True), {"a": 0.9, "b": 0.1}))
    await gate.acquire("a")
    (waiter,) = await queue(gate, "a")
    await gate.acquire("b")
    assert await waits(waiter)
    waiter.cancel()


async def test_a_class_outside_the_mixture_is_served_by_its_time_of_arrival() -> None:
    gate = limiter(1, {"a": 0.5, "b": 0.5})
    await gate.acquire("a")
    evaluation, b = await queue(gate, "evaluation", "b")
    gate.release("a")
    assert await evaluation == "evaluation"
    gate.release("evaluation")
    assert await b == "b"


async def test_a_class_that_was_away_does_not_take_the_pool_when_it_is_back() -> None:
    gate = limiter(4, {"a": 0.5, "b": 0.5}, a=2, b=2)
    for _ in range(200):
        await gate.acquire("a")
        gate.release("a")
    assert 2.0 < gate.slots.owed("b") <= 3.1


async def test_a_picked_class_counts_once() -> None:
    gate = limiter(100, {"a": 0.5, "b": 0.5})
    picked = [gate.slots.pick() for _ in range(10)]
    assert Counter(picked) == {"a": 5, "b": 5}
    for workload in picked:
        await gate.acquire(workload)
    assert gate.slots.owed("a") == pytest.approx(0.5)


@pytest.mark.parametrize(
    "mixture", [{}, {"a": 0.0}, {"a": -1.0, "b": 2.0}, {"a": float("nan")}, {"a": True}, {"a": "x"}]
)
def test_a_mixture_that_is_none_is_refused(mixture: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="share"):
        scaled(mixture)


def test_shares_are_scaled_and_those_of_nothing_left_out() -> None:
    assert scaled({"a": 3, "b": 1, "c": 0}) == {"a": 0.75, "b": 0.25}
