"""working_set as a closed loop of random rollouts: pausing never deadlocks, and the books come back to zero.

Rollouts of random turns run on replicas that may hold less than two of them. Steps are drawn at random: a rollout sends
its next turn, a running request ends, time passes, a replica is lost or restarted. Then everything is driven to its end
by the rules of a shell alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidegate.policy.entities import LIVE, Session
from tidegate.policy.params import CoreParams, LedgerParams, ReplicaParams, WorkingSetParams
from tidegate.policy.scheduler import Scheduler
from tidegate.policy.working_set import WorkingSetPolicy
from tidegate.types import (
    AnyDecision,
    Hold,
    Place,
    ReplicaAdded,
    ReplicaHealth,
    ReplicaReset,
    ReplicaSample,
    RequestArrived,
    RequestEnded,
    RequestProgress,
    SessionFinished,
    Tick,
)

URLS = ["http://a", "http://b"]
PAUSE_LIMIT_S = 50.0


@dataclass
class Rollout:
    id: str
    workload: str
    turns: int
    grows: int  # prompt tokens of each turn
    answers: int  # generated tokens of each turn
    group: str | None = None
    context: int = 0
    request: int | None = None
    arrived_s: float = 0.0


class PausingMachine(RuleBasedStateMachine):
    @initialize(capacity=st.sampled_from([900, 2_500, 12_000, None]), forced=st.booleans())
    def start(self, capacity: int | None, forced: bool) -> None:
        limit_s = PAUSE_LIMIT_S if forced else 1e9
        self.forced = forced
        self.scheduler = Scheduler(
            "working_set",
            CoreParams(
                working_set=WorkingSetParams(pause_limit_s=limit_s),
                replica=ReplicaParams(stale_after_s=1e9),
                ledger=LedgerParams(idle_ttl_initial_s=1e9, idle_ttl_floor_s=1e8, idle_ttl_ceiling_s=1e9),
            ),
        )
        self.capacity = capacity
        self.now_s = 0.0
        self.requests = 0
        self.generated = dict.fromkeys(URLS, 0)
        self.computed = dict.fromkeys(URLS, 0)
        self.rollouts: dict[str, Rollout] = {}
        self.where: dict[int, str] = {}  # running request -> replica
        self.waiting: set[int] = set()
        self.owner: dict[int, Rollout] = {}
        for url in URLS:
            self.send(ReplicaAdded(at_s=0.0, replica=url, kv_capacity_tokens=capacity))

    @property
    def policy(self) -> WorkingSetPolicy:
        policy = self.scheduler.policy
        assert isinstance(policy, WorkingSetPolicy)
        return policy

    # --- the shell ---------------------------------------------------------------------------------------------
    def send(self, event: object) -> list[AnyDecision]:
        decisions = self.scheduler.handle(event)  # type: ignore[arg-type]
        for decision in decisions:
            if isinstance(decision, Place):
                assert decision.request not in self.where
                self.waiting.discard(decision.request)
                self.where[decision.request] = decision.replica
            elif isinstance(decision, Hold):
                assert decision.request not in self.where, "a generation was stopped"
                self.waiting.add(decision.request)
        return decisions

    def turn(self, rollout: Rollout) -> None:
        self.requests += 1
        rollout.request = self.requests
        rollout.arrived_s = self.now_s
        rollout.context += rollout.grows
        self.owner[self.requests] = rollout
        self.send(
            RequestArrived(
                at_s=self.now_s,
                request=self.requests,
                session=rollout.id,
                workload=rollout.workload,
                group=rollout.group,
                prompt_tokens=rollout.context,
            )
        )

    def answer(self, request: int, cached: int) -> None:
        rollout = self.owner.pop(request)
        url = self.where.pop(request)
        self.generated[url] += rollout.answers
        prompt = rollout.context
        rollout.context += rollout.answers
        rollout.turns -= 1
        rollout.request = None
        self.send(
            RequestEnded(
                at_s=self.now_s,
                request=request,
                outcome="ok",
                prompt_tokens=prompt,
                completion_tokens=rollout.answers,
                cached_tokens=min(cached, prompt),
            )
        )
        if not rollout.turns:
            del self.rollouts[rollout.id]
            self.send(SessionFinished(at_s=self.now_s, session=rollout.id))

    # --- rules -------------------------------------------------------------------------------------------------
    @precondition(lambda self: len(self.rollouts) < 12)
    @rule(
        workload=st.sampled_from(["agentic", "rlvr"]),
        turns=st.integers(1, 5),
        grows=st.integers(1, 400),
        answers=st.integers(0, 300),
        group=st.sampled_from([None, "g"]),
    )
    def begin(self, workload: str, turns: int, grows: int, answers: int, group: str | None) -> None:
        rollout = Rollout(f"s{self.requests}", workload, turns, grows, answers, group)
        self.rollouts[rollout.id] = rollout
        self.turn(rollout)

    @rule(index=st.integers(0, 99))
    def go_on(self, index: int) -> None:
        idle = [rollout for rollout in self.rollouts.values() if rollout.request is None]
        if idle:
            self.turn(idle[index % len(idle)])

    @rule(index=st.integers(0, 99), cached=st.sampled_from([0, 0, 50, 100_000]))
    def end(self, index: int, cached: int) -> None:
        if self.where:
            self.answer(sorted(self.where)[index % len(self.where)], cached)

    @rule(index=st.integers(0, 99), comes_back=st.booleans())
    def client_leaves(self, index: int, comes_back: bool) -> None:
        if not self.owner:
            return
        request = sorted(self.owner)[index % len(self.owner)]
        rollout = self.owner.pop(request)
        self.where.pop(request, None)
        self.waiting.discard(request)
        rollout.request = None
        self.send(RequestEnded(at_s=self.now_s, request=request, outcome="aborted"))
        if not comes_back:
            del self.rollouts[rollout.id]
            self.send(SessionFinished(at_s=self.now_s, session=rollout.id))

    @rule(index=st.integers(0, 99), tokens=st.integers(1, 200))
    def progress(self, index: int, tokens: int) -> None:
        if self.where:
            request = sorted(self.where)[index % len(self.where)]
            self.send(RequestProgress(at_s=self.now_s, request=request, completion_tokens=tokens))

    @rule(by_s=st.sampled_from([0.1, 1.0, 5.0, 60.0]), counted=st.booleans())
    def time_passes(self, by_s: float, counted: bool) -> None:
        self.now_s += by_s
        for url in URLS:
            running = sum(replica == url for replica in self.where.values())
            self.generated[url] += running * int(by_s * 3)
            self.computed[url] += running * int(by_s * 1_000)
            self.send(
                ReplicaSample(
                    at_s=self.now_s,
                    replica=url,
                    running=running if counted else None,
                    generation_tokens_total=self.generated[url] if counted else None,
                    prompt_tokens_total=self.computed[url] if counted else None,
                )
            )
        self.send(Tick(at_s=self.now_s))
        if self.forced:
            self.nobody_waits_beyond_the_limit()

    @rule(url=st.sampled_from(URLS), usable=st.booleans())
    def health(self, url: str, usable: bool) -> None:
        self.send(ReplicaHealth(at_s=self.now_s, replica=url, usable=usable or url == URLS[0]))

    @rule(url=st.sampled_from(URLS))
    def reset(self, url: str) -> None:
        self.send(ReplicaReset(at_s=self.now_s, replica=url, reason="restart"))

    # --- promises ----------------------------------------------------------------------------------------------
    def nobody_waits_beyond_the_limit(self) -> None:
        for request in self.waiting:
            rollout = self.owner[request]
            session = self.scheduler.ledger.sessions[rollout.id]
            if session.state == LIVE:
                assert self.now_s - rollout.arrived_s < PAUSE_LIMIT_S, rollout

    @invariant()
    def the_oldest_never_waits(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        oldest: dict[str, Session] = {}
        for session in sorted(self.policy.claims, key=lambda s: self.policy.claims[s].rank):
            assert session.replica is not None
            if session.replica.usable:
                oldest.setdefault(session.replica.url, session)
        for session in oldest.values():
            assert not session.waiting, (session.id, "the oldest of its replica waits")

    @invariant()
    def sums_match_the_ledger(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        ledger = self.scheduler.ledger
        ledger.check()
        live = {s for s in ledger.sessions.values() if s.state == LIVE}
        assert set(self.policy.claims) == live
        for slot, working_set in enumerate(self.policy.sets):
            replica = ledger.slots[slot]
            mine = [s for s in live if s.replica is replica]
            assert len(working_set.order) == len(mine)
            claims = {s: self.policy.claims[s] for s in mine}
            assert working_set.dormant == sum(c.dormant for c in claims.values())
            assert not any(s.running or s.waiting for s, c in claims.items() if c.dormant)
            idle = sum(max(s.tokens, c.asked) - c.shared for s, c in claims.items() if not c.growing and not c.dormant)
            total = working_set.order.total
            assert (total[0], total[2]) == (idle, sum(len(self.policy.claims[s].growing) for s in mine))
            assert total[2] == sum(s.running for s in mine)
        paused = {r for r in self.waiting if ledger.sessions[self.owner[r].id].state == LIVE}
        assert self.scheduler.view(self.now_s).paused_sessions == len(paused)

    @invariant()
    def whoever_fits_is_let_go(self) -> None:
        """No paused session waits though the sum up to it fits beside what newer sessions' running requests pin, or
        though nobody older claims anything."""
        if not hasattr(self, "scheduler") or self.capacity is None:
            return
        policy = self.policy
        for request in self.waiting:
            session = self.scheduler.ledger.sessions[self.owner[request].id]
            if session.state == LIVE and session.replica is not None and session.replica.usable:
                working_set = policy.set_of(session.replica)
                claimed = working_set.claimed_up_to(session, self.now_s)
                claimed += working_set.pinned_after(session, self.now_s)
                assert not working_set.claims_first(session)
                assert claimed > policy.own.resident_fraction * self.capacity

    def teardown(self) -> None:
        """Everybody comes to an end: whoever may run, runs; nobody who waits is helped by anything else."""
        if not hasattr(self, "scheduler"):
            return
        for url in URLS:
            self.send(ReplicaHealth(at_s=self.now_s, replica=url, usable=True))
        for _ in range(2_000):
            if not self.rollouts:
                break
            for rollout in [r for r in self.rollouts.values() if r.request is None]:
                self.turn(rollout)
            assert self.where, "deadlock: everybody waits"
            for request in sorted(self.where):
                self.answer(request, 0)
        assert not self.rollouts
        self.sums_match_the_ledger()
        assert not self.policy.claims
        assert not self.waiting
        for working_set in self.policy.sets:
            assert working_set.order.total == (0, 0, 0)
            assert working_set.claimed_tokens(self.now_s) == 0
            assert working_set.longest_admitted() is None
            assert not working_set.dormant


PausingMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
test_pausing_never_deadlocks_and_counts_return_to_zero = PausingMachine.TestCase


def walk(seed: int) -> None:
    """One random run, its steps as often as in a real pool; Hypothesis draws rare ones too often to fill one."""
    random = Random(seed)
    machine = PausingMachine()

    def step(rule: Callable[..., None], **drawn: object) -> None:
        rule(machine, **drawn)
        machine.the_oldest_never_waits()  # type: ignore[operator]
        machine.sums_match_the_ledger()  # type: ignore[operator]
        machine.whoever_fits_is_let_go()  # type: ignore[operator]

    rules = PausingMachine
    step(rules.start, capacity=random.choice([900, 2_500, 12_000, None]), forced=random.random() < 0.5)
    for kind in random.choices(range(8), [30, 40, 40, 5, 10, 15, 5, 3], k=80):
        index = random.randrange(100)
        if kind == 0 and len(machine.rollouts) < 12:
            turns, grows, answers = random.randint(1, 5), random.randint(1, 400), random.randint(0, 300)
            workload, group = random.choice(["agentic", "rlvr"]), random.choice([None, "g"])
            step(rules.begin, workload=workload, turns=turns, grows=grows, answers=answers, group=group)
        elif kind == 1:
            step(rules.go_on, index=index)
        elif kind == 2:
            step(rules.end, index=index, cached=random.choice([0, 0, 50, 100_000]))
        elif kind == 3:
            step(rules.client_leaves, index=index, comes_back=random.random() < 0.5)
        elif kind == 4:
            step(rules.progress, index=index, tokens=random.randint(1, 200))
        elif kind == 5:
            step(rules.time_passes, by_s=random.choice([0.1, 1.0, 5.0, 60.0]), counted=random.random() < 0.5)
        elif kind == 6:
            step(rules.health, url=random.choice(URLS), usable=random.random() < 0.5)
        elif kind == 7:
            step(rules.reset, url=random.choice(URLS))
    machine.teardown()


@pytest.mark.parametrize("first", range(0, 500, 100))
def test_pausing_holds_its_promises_on_random_walks(first: int) -> None:
    for seed in range(first, first + 100):
        walk(seed)
