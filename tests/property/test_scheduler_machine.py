"""The decision core as a state machine: any interleaving of events, for every policy, keeps its promises.

The shell is modelled in `scheduler_shell`. After each step the ledger is recomputed naively, and the promises are
checked against the model's own, separate books.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.property.scheduler_shell import Model, SchedulerShell

from tidegate.policy import policies
from tidegate.policy.baselines.params import AdaptiveCapParams, AimdParams, ProgramParams, StaticCapParams
from tidegate.policy.misa import Misa
from tidegate.policy.params import AdmissionParams, CoreParams, LedgerParams, ReplicaParams
from tidegate.policy.scheduler import Scheduler
from tidegate.types import (
    AnyDecision,
    AnyEvent,
    Ended,
    EpochStarted,
    MixtureSet,
    Place,
    PoolPaused,
    PoolResumed,
    ReplicaAdded,
    ReplicaHealth,
    ReplicaRemoved,
    ReplicaReset,
    ReplicaResidency,
    ReplicaSample,
    RequestArrived,
    RequestEnded,
    RequestProgress,
    RequestReturned,
    SessionFinished,
    SessionOpened,
    Tick,
)

URLS = [f"http://replica-{i}:8000" for i in range(4)]
SESSIONS = [f"session-{i}" for i in range(14)]
CLASSES = ["rlvr", "rlhf", "agentic", "tenant-a", None]
HOLD_MODES = [
    AdmissionParams(),
    AdmissionParams(hold_timeout_s=7.0),
    AdmissionParams(overload="reject"),
    AdmissionParams(max_waiting=2),
]


class SchedulerMachine(SchedulerShell):
    @initialize(
        admission=st.sampled_from(HOLD_MODES),
        capacity=st.sampled_from([4_000, 16_384, 1_000_000]),
        seed=st.integers(0, 9),
    )
    def start(self, admission: AdmissionParams, capacity: int, seed: int) -> None:
        self.params = CoreParams(
            admission=admission,
            ledger=LedgerParams(max_sessions=10, max_classes=4, idle_ttl_initial_s=40.0, idle_gap_min_samples=6),
            replica=ReplicaParams(stale_after_s=15.0),
            static_cap=StaticCapParams(cap=2),
            aimd=AimdParams(initial_window=3.0, interval_s=1.0, pause_limit_s=20.0),
            program=ProgramParams(interval_s=1.0, resume_after_s=20.0),
            adaptive_cap=AdaptiveCapParams(max_context_tokens=1_000, poll_s=1.0, pause_limit_s=20.0),
        )
        self.seed = seed
        self.capacity = capacity
        self.scheduler = Scheduler(self.policy, self.params, seed)
        self.model = Model()
        self.now_s = 100.0
        self.next_request = 0
        self.log: list[tuple[AnyEvent, list[AnyDecision]]] = []
        self.totals = dict.fromkeys(URLS, (0, 0))
        self.send(ReplicaAdded(at_s=self.now_s, replica=URLS[0], kv_capacity_tokens=capacity))
        self.send(ReplicaAdded(at_s=self.now_s, replica=URLS[1]))

    # --- rules -------------------------------------------------------------------------------------------------
    @rule(
        session=st.sampled_from([*SESSIONS, None]),
        workload=st.sampled_from(CLASSES),
        group=st.sampled_from(["g1", None]),
        prompt=st.integers(0, 3_000),
    )
    def arrive(self, session: str | None, workload: str | None, group: str | None, prompt: int) -> None:
        request = self.next_request = self.next_request + 1
        self.model.state[request] = "new"
        self.model.session_of[request] = session
        prefix = tuple(SESSIONS.index(session) * 100 + i for i in range(prompt // 500)) if session else ()
        event = RequestArrived(
            at_s=self.now_s,
            request=request,
            session=session,
            workload=workload,
            group=group,
            prompt_tokens=prompt,
            prefix=prefix,
        )
        self.send(event)
        assert self.model.state[request] in ("placed", "held", "rejected")

    @rule(
        index=st.integers(0, 50),
        outcome=st.sampled_from(["ok", "ok", "ok", "error", "aborted", "replica_lost", "refused"]),
        usage=st.one_of(st.none(), st.tuples(st.integers(1, 4_000), st.integers(0, 500))),
        cached=st.one_of(st.none(), st.integers(0, 4_000)),
        final=st.booleans(),
    )
    def end(self, index: int, outcome: str, usage: tuple[int, int] | None, cached: int | None, final: bool) -> None:
        request = self.pick(("placed", "held"), index)
        if request is None:
            return
        if self.model.state[request] == "held":
            outcome, usage, cached = "aborted", None, None
        self.model.state[request] = "ended"
        self.send(
            RequestEnded(
                at_s=self.now_s,
                request=request,
                outcome=outcome,  # type: ignore[arg-type]
                prompt_tokens=usage[0] if usage else None,
                completion_tokens=usage[1] if usage else None,
                cached_tokens=cached if usage else None,
                final=final,
            )
        )

    @rule(index=st.integers(0, 50), tokens=st.integers(1, 2_000))
    def progress(self, index: int, tokens: int) -> None:
        request = self.pick(("placed",), index)
        if request is not None:
            self.send(RequestProgress(at_s=self.now_s, request=request, completion_tokens=tokens))

    @rule(index=st.integers(0, 50))
    def returned(self, index: int) -> None:
        request = self.pick(("placed",), index)
        if request is not None:
            failed = self.model.where[request]
            self.model.state[request] = "returned"
            for decision in self.send(RequestReturned(at_s=self.now_s, request=request, failed=failed)):
                if isinstance(decision, Place) and decision.request == request:
                    assert decision.replica != failed

    @rule(
        session=st.sampled_from(SESSIONS),
        workload=st.sampled_from(CLASSES),
        expected=st.sampled_from([None, 900]),
    )
    def open(self, session: str, workload: str | None, expected: int | None) -> None:
        self.send(SessionOpened(at_s=self.now_s, session=session, workload=workload, expected_tokens=expected))

    @rule(session=st.sampled_from(SESSIONS))
    def finish(self, session: str) -> None:
        self.send(SessionFinished(at_s=self.now_s, session=session))
        again = self.send(SessionFinished(at_s=self.now_s, session=session))
        assert not any(isinstance(decision, Ended) and decision.session == session for decision in again)

    @rule(url=st.sampled_from(URLS), known=st.booleans())
    def add(self, url: str, known: bool) -> None:
        self.send(ReplicaAdded(at_s=self.now_s, replica=url, kv_capacity_tokens=self.capacity if known else None))

    @rule(url=st.sampled_from(URLS))
    def remove(self, url: str) -> None:
        self.send(ReplicaRemoved(at_s=self.now_s, replica=url))

    @rule(url=st.sampled_from(URLS), usable=st.booleans())
    def health(self, url: str, usable: bool) -> None:
        self.send(
            ReplicaHealth(at_s=self.now_s, replica=url, usable=usable, reason="ok" if usable else "health_failed")
        )

    @rule(
        url=st.sampled_from(URLS),
        waiting=st.integers(0, 2),
        prompt=st.integers(0, 5000),
        share=st.floats(0, 1),
        used=st.sampled_from([None, 0.1, 0.95]),
        preempted=st.booleans(),
    )
    def sample(self, url: str, waiting: int, prompt: int, share: float, used: float | None, preempted: bool) -> None:
        total, cached = self.totals[url]
        self.totals[url] = total + prompt, cached + int(prompt * share)
        self.send(
            ReplicaSample(
                at_s=self.now_s,
                replica=url,
                kv_capacity_tokens=self.capacity,
                kv_used_fraction=used,
                waiting=waiting,
                preemptions_total=self.next_request if preempted else None,
                prompt_tokens_total=self.totals[url][0],
                cached_tokens_total=self.totals[url][1],
            )
        )

    @rule(url=st.sampled_from(URLS), share=st.floats(0, 1))
    def residency(self, url: str, share: float) -> None:
        tokens = {name: int(share * s.base_tokens) for name, s in self.scheduler.ledger.sessions.items()}
        self.send(
            ReplicaResidency(at_s=self.now_s, replica=url, session_tokens=tokens, resident_tokens=sum(tokens.values()))
        )

    @rule(url=st.sampled_from(URLS))
    def reset(self, url: str) -> None:
        self.send(ReplicaReset(at_s=self.now_s, replica=url, reason="restart"))

    @rule(kind=st.sampled_from([PoolPaused, PoolResumed]))
    def pause(self, kind: type[PoolPaused] | type[PoolResumed]) -> None:
        self.send(kind(at_s=self.now_s))

    @rule()
    def epoch(self) -> None:
        self.send(EpochStarted(at_s=self.now_s, reason="weights"))
        self.send(MixtureSet(at_s=self.now_s, shares={"rlvr": 0.5, "agentic": 0.5}))

    @rule(by_s=st.sampled_from([0.1, 1.0, 1.0, 5.0, 30.0]))
    def tick(self, by_s: float) -> None:
        self.now_s += by_s
        self.send(Tick(at_s=self.now_s))

    @precondition(lambda self: self.model.admitted)
    @rule(by_s=st.floats(0.0, 3.0))
    def time_passes(self, by_s: float) -> None:
        self.now_s += by_s

    # --- promises ----------------------------------------------------------------------------------------------
    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        ledger = self.scheduler.ledger
        ledger.check()
        states = self.model.state
        assert {r for r, s in states.items() if s == "placed"} == {
            r.id for r in ledger.requests.values() if r.replica is not None
        }
        assert {r for r, s in states.items() if s == "held"} == {r.id for r in ledger.requests.values() if r.held}
        assert len(self.scheduler.holds) == sum(state == "held" for state in states.values())
        view = self.scheduler.view(self.now_s)
        assert view.held == sum(klass.held for klass in ledger.classes)
        assert view.in_flight == sum(state == "placed" for state in states.values())

    @invariant()
    def class_caps_fit_the_memory(self) -> None:
        if not hasattr(self, "scheduler") or not isinstance(self.scheduler.policy, Misa):
            return
        policy = self.scheduler.policy
        for slot, footprints in policy.apportioned_footprints.items():
            capacity, kbar = footprints
            caps = policy.caps_at(slot)
            assert sum(cap * k for cap, k in zip(caps, kbar, strict=True)) <= capacity * (1 + 1e-9)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.drain()
        self.replay()

    def drain(self) -> None:
        """Everything ends: every count returns to zero, and no request is left without an outcome."""
        self.send(PoolResumed(at_s=self.now_s))
        for request, state in list(self.model.state.items()):
            if state in ("placed", "held") and self.model.state[request] in ("placed", "held"):
                self.model.state[request] = "ended"
                self.send(RequestEnded(at_s=self.now_s, request=request, outcome="aborted"))
        self.now_s += 1e6
        self.send(Tick(at_s=self.now_s))
        self.books_are_right()
        ledger = self.scheduler.ledger
        assert not ledger.requests
        assert not ledger.sessions
        assert not ledger.groups
        assert not ledger.draining
        for klass in ledger.classes:
            assert klass.demand == klass.tokens == len(klass.idle) == 0
            assert klass.started == klass.ended
        for replica in ledger.replicas.values():
            assert replica.tokens == replica.requests == len(replica.live) == 0
            assert replica.credit_new == replica.credit_old == 0
        assert set(self.model.state.values()) <= {"ended", "rejected"}

    def replay(self) -> None:
        """The JSON log gives the same decisions, bit for bit."""
        decoder = msgspec.json.Decoder(AnyEvent)
        fresh = Scheduler(self.policy, self.params, self.seed)
        for event, decisions in self.log:
            again = fresh.handle(decoder.decode(msgspec.json.encode(event)))
            assert msgspec.json.encode(again) == msgspec.json.encode(decisions)


# No shrinking: a failing run of 40 steps is readable, and shrinking one takes minutes.
QUICK = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@pytest.mark.parametrize("policy", list(policies()))
def test_any_interleaving_keeps_the_promises(policy: str) -> None:
    machine = type(f"{policy}_machine", (SchedulerMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=QUICK)
