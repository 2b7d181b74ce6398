"""Whatever order things happen in, each request that arrived ends exactly once, and nothing is left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.unit.server.exchanges import REPLY, A, B, FakeExchange, Shell

from tidegate.errors import ReplicaError
from tidegate.policy.baselines.params import StaticCapParams
from tidegate.policy.params import AdmissionParams, CoreParams
from tidegate.types import (
    AnyDecision,
    AnyEvent,
    PoolPaused,
    PoolResumed,
    Reject,
    ReplicaHealth,
    RequestArrived,
    RequestEnded,
    SessionFinished,
)

ABORT = b'{"choices": [{"text": "", "finish_reason": "abort"}]}'
sessions = st.sampled_from(["s1", "s2", "s3", "s4", None])


class Ends:
    """Takes the recorder's place: counts how often each request arrived and ended."""

    def __init__(self) -> None:
        self.open: Counter[int] = Counter()

    def record(self, event: AnyEvent, decisions: Sequence[AnyDecision]) -> None:
        if isinstance(event, RequestArrived):
            self.open[event.request] += 1
        if isinstance(event, RequestEnded):
            self.open[event.request] -= 1
        for decision in decisions:
            if isinstance(decision, Reject):
                self.open[decision.request] -= 1


class DriverMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["static_cap", "sticky_least_loaded", "round_robin", "consistent_hash"]))
    def begin(self, policy: str) -> None:
        admission = AdmissionParams(max_waiting=3, hold_timeout_s=20.0)
        self.ends = Ends()
        self.shell = Shell(
            policy,
            CoreParams(static_cap=StaticCapParams(cap=1), admission=admission),
            self.ends,  # type: ignore[arg-type]
        )
        self.shell.add(A, B)
        self.exchanges: list[FakeExchange] = []

    def pick(self, number: int, placed: bool) -> FakeExchange | None:
        self.exchanges = [e for e in self.exchanges if e.rejected is None]
        found = [e for e in self.exchanges if bool(e.placed) == placed]
        return found[number % len(found)] if found else None

    @rule(session=sessions, fault=st.booleans(), workload=st.sampled_from(["a", "b"]))
    def open(self, session: str | None, fault: bool, workload: str) -> None:
        exchange = self.shell.exchange(session, x_workload_class=workload)
        if fault:
            exchange.fault = RuntimeError("boom")
        self.exchanges.append(exchange)
        body = b"{}" if self.shell.driver.wants_body(exchange.head) else None
        self.shell.driver.opened(exchange, body)

    @rule(number=st.integers(0, 9))
    def answer(self, number: int) -> None:
        exchange = self.pick(number, placed=True)
        if exchange is not None:
            self.exchanges.remove(exchange)
            self.shell.answer(exchange, REPLY)

    @rule(number=st.integers(0, 9), placed=st.booleans())
    def leave(self, number: int, placed: bool) -> None:
        exchange = self.pick(number, placed)
        if exchange is not None:
            self.exchanges.remove(exchange)
            self.shell.driver.ended(exchange, "aborted", None)

    @rule(number=st.integers(0, 9), abort=st.booleans())
    def fail_before_the_first_byte(self, number: int, abort: bool) -> None:
        exchange = self.pick(number, placed=True)
        if exchange is None:
            return
        replica = exchange.placed[-1]
        if abort:
            assert exchange.meter is not None
            if exchange.meter.response_head(200, []) != "wait":
                return
            exchange.meter.response_body(ABORT)
            assert exchange.meter.response_end() == "retry"
        attempts, exchange.placed = exchange.placed, []
        self.shell.driver.returned(exchange, replica, ReplicaError("closed", reason="replica_closed"))
        if exchange.placed:
            exchange.placed = attempts + exchange.placed

    @rule(session=sessions)
    def finish(self, session: str | None) -> None:
        if session is not None:
            self.shell.driver.handle(SessionFinished(at_s=self.shell.clock.now_s(), session=session))

    @rule(url=st.sampled_from([A, B]), usable=st.booleans())
    def health(self, url: str, usable: bool) -> None:
        self.shell.driver.handle(ReplicaHealth(at_s=self.shell.clock.now_s(), replica=url, usable=usable))

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        now_s = self.shell.clock.now_s()
        self.shell.driver.handle(PoolPaused(at_s=now_s) if paused else PoolResumed(at_s=now_s))

    @rule(by_s=st.floats(0.1, 30.0))
    def tick(self, by_s: float) -> None:
        self.shell.clock.advance(by_s)
        self.shell.driver.tick()

    @rule()
    def abort_call(self) -> None:
        self.shell.driver.aborts_called()

    @invariant()
    def each_request_ended_at_most_once(self) -> None:
        if hasattr(self, "ends"):
            assert set(self.ends.open.values()) <= {0, 1}
            assert sum(self.ends.open.values()) == self.shell.driver.under_way

    @invariant()
    def the_ledger_counts_what_is_placed_and_held(self) -> None:
        if hasattr(self, "shell"):
            view = self.shell.scheduler.view(self.shell.clock.now_s())
            assert view.in_flight + view.waiting == self.shell.driver.under_way
            assert view.waiting == len(self.shell.driver.held())

    def teardown(self) -> None:
        if not hasattr(self, "shell"):
            return
        for exchange in self.exchanges:
            if exchange.rejected is None:
                self.shell.driver.ended(exchange, "aborted", None)
        assert self.shell.at_rest
        assert set(self.ends.open.values()) <= {0}


TestDriver = DriverMachine.TestCase
TestDriver.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
