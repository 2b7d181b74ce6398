"""The client's limiter as a state machine: slots are conserved, limits hold, the mixture is kept."""

from __future__ import annotations

import asyncio
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidegate.client.limiter import Limiter
from tidegate.client.slots import Limits, Slots

CLASSES = ["a", "b", "c"]
SHARES = {"a": 0.6, "b": 0.3, "c": 0.1}
LABELS = st.sampled_from([*CLASSES, "outside", None])


class LimiterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.limiter = Limiter(Slots(Limits(3), SHARES))
        self.tasks: list[asyncio.Task[Any]] = []
        self.held: list[str | None] = []

    def teardown(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.turn()
        self.loop.close()

    def turn(self) -> None:
        """Let every task run as far as it can."""

        async def a_few() -> None:
            for _ in range(4):
                await asyncio.sleep(0)

        self.loop.run_until_complete(a_few())
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            if not task.cancelled():
                self.held.append(task.result())

    @rule(label=LABELS)
    def wait(self, label: str | None) -> None:
        self.tasks.append(self.loop.create_task(self.limiter.acquire(label)))
        self.turn()

    @rule(classes=st.sets(st.sampled_from(CLASSES), min_size=1))
    def wait_for_any(self, classes: set[str]) -> None:
        self.tasks.append(self.loop.create_task(self.limiter.acquire(among=frozenset(classes))))
        self.turn()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.limiter.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))
        self.turn()

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), also_release=st.booleans(), first=st.booleans())
    def cancel(self, data: st.DataObject, also_release: bool, first: bool) -> None:
        """In one breath with a release: before or after the waiter was given the slot."""
        task = data.draw(st.sampled_from(self.tasks))
        if first:
            task.cancel()
        if also_release and self.held:
            self.limiter.release(self.held.pop())
        task.cancel()
        self.turn()

    @rule(sessions=st.integers(0, 6), a=st.none() | st.integers(1, 3), b=st.none() | st.integers(1, 3))
    def limits(self, sessions: int, a: int | None, b: int | None) -> None:
        classes = {name: number for name, number in (("a", a), ("b", b)) if number is not None}
        self.limiter.set_limits(Limits(sessions, classes))
        self.turn()

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        (self.limiter.pause if paused else self.limiter.resume)()
        self.turn()

    @invariant()
    def slots_are_those_that_are_held(self) -> None:
        slots = self.limiter.slots
        assert {label: n for label, n in slots.in_flight.items() if n} == {
            label: self.held.count(label) for label in set(self.held)
        }

    @invariant()
    def nobody_waits_who_could_go(self) -> None:
        slots = self.limiter.slots
        if self.limiter.paused or not self.tasks or slots.total >= slots.limits.sessions:
            return
        queues = self.limiter._queues
        assert not [label for label, queue in queues.items() if queue and slots.room(label)]
        assert len(self.tasks) == sum(map(len, queues.values())) + len(self.limiter._choosers)

    @invariant()
    def what_is_owed_is_bounded(self) -> None:
        assert all(self.limiter.slots.owed(label) <= 8.0 for label in CLASSES)


TestLimiter = LimiterMachine.TestCase
TestLimiter.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@settings(deadline=None)
@given(
    shares=st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 1.0), min_size=1),
    limits=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 20)),
    count=st.integers(1, 200),
    sessions=st.integers(1, 30),
    ends=st.randoms(use_true_random=False),
)
def test_what_was_started_is_within_a_session_or_so_of_the_mixture(
    shares: dict[str, float], limits: dict[str, int], count: int, sessions: int, ends: Any
) -> None:
    """Whatever the limits by class are, and however long sessions of each class stay."""
    slots = Slots(Limits(sessions, dict(limits)), shares)
    open_ones: list[str] = []
    started = dict.fromkeys(slots.shares, 0)
    for _ in range(count):
        while (chosen := slots.next_of(list(slots.shares))) is None:
            slots.end(open_ones.pop(ends.randrange(len(open_ones))))
        slots.start(chosen)
        open_ones.append(chosen)
        started[chosen] += 1
    for label, share in slots.shares.items():
        assert abs(started[label] - share * count) <= len(shares) + 1.0
