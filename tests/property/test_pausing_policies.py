"""Policies that pause sessions, on a random walk with too little memory: right books, bounded waits, no leaks."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from tests.unit.policy.shell import Shell

from tidegate.policy.baselines.adaptive_cap import AdaptiveCap
from tidegate.policy.baselines.aimd import Aimd
from tidegate.policy.baselines.params import AdaptiveCapParams, AimdParams, ProgramParams
from tidegate.policy.baselines.program import Program
from tidegate.policy.entities import LIVE
from tidegate.policy.params import CoreParams
from tidegate.types import Hold, Place, Reject, RequestProgress

LIMIT_S = 20.0
CAPACITY = 4_000
PARAMS = CoreParams(
    aimd=AimdParams(initial_window=3.0, interval_s=1.0, pause_limit_s=LIMIT_S),
    program=ProgramParams(interval_s=1.0, resume_after_s=LIMIT_S),
    adaptive_cap=AdaptiveCapParams(max_context_tokens=1_000, poll_s=1.0, pause_limit_s=LIMIT_S),
)


class Walk:
    def __init__(self, policy: str, seed: int) -> None:
        self.lots = Random(seed)
        self.shell = Shell(policy, 2, capacity=CAPACITY, params=PARAMS)
        self.prompts: dict[str, int] = {}  # of sessions not finished, their next
        self.asked: dict[int, str] = {}  # requests not ended
        self.held: set[int] = set()
        self.pauses = 0
        self.born = 0

    def take(self, decisions: list[Any]) -> None:
        for decision in decisions:
            assert not isinstance(decision, Reject)
            if isinstance(decision, Hold):
                self.held.add(decision.request)
                self.pauses += decision.reason == "paused"
            elif isinstance(decision, Place):
                self.held.discard(decision.request)

    def step(self) -> None:
        act = self.lots.choice(
            [self.ask, self.ask, self.ask, self.answer, self.answer, self.answer, self.tick, self.end]
        )
        act()

    def ask(self) -> None:
        busy = set(self.asked.values())
        free = [session for session in self.prompts if session not in busy]
        if not free or (self.lots.random() < 0.2 and len(self.prompts) < 12):
            self.born += 1
            free = [f"s{self.born}"]
            self.prompts[free[0]] = 200
        session = self.lots.choice(free)
        decisions = self.shell.arrive_all(session, prompt_tokens=self.prompts[session])
        self.asked[self.shell.requests] = session
        self.take(decisions)

    def answer(self) -> None:
        placed = [request for request in self.asked if request not in self.held]
        if not placed:
            return
        request = self.lots.choice(placed)
        if self.lots.random() < 0.2:
            event = RequestProgress(at_s=self.shell.now_s, request=request, completion_tokens=self.lots.randrange(300))
            self.take(self.shell.send(event))
            return
        session = self.asked.pop(request)
        prompt, completion = self.prompts[session], self.lots.randrange(1, 400)
        self.prompts[session] = min(prompt + completion, CAPACITY - 500)
        self.take(self.shell.end(request, prompt_tokens=prompt, completion_tokens=completion))

    def end(self) -> None:
        """A session, in three of ten such steps; in the others a replica fails or comes back."""
        if self.lots.random() < 0.7:
            url = self.lots.choice(self.shell.urls)
            self.take(self.shell.health(url, self.lots.random() < 0.8))
        elif self.prompts:
            session = self.lots.choice(list(self.prompts))
            if session not in self.asked.values():
                del self.prompts[session]
                self.take(self.shell.finish(session))

    def tick(self) -> None:
        self.shell.now_s += self.lots.choice([0.5, 1.0, 5.0])
        for url in self.shell.urls:
            total = self.shell.requests * 1_000
            used = self.lots.choice([None, 0.1, 0.7, 0.95])
            preemptions = self.shell.requests if self.lots.random() < 0.3 else 0
            sampled = self.shell.sample(
                url, waiting=0, kv_used_fraction=used, preemptions_total=preemptions,
                prompt_tokens_total=total, cached_tokens_total=total // 10,
            )  # fmt: skip
            self.take(sampled)
        self.take(self.shell.tick(0.0, sampled=False))
        self.no_wait_is_over_the_limit()

    def no_wait_is_over_the_limit(self) -> None:
        ledger = self.shell.ledger
        if ledger.usable:
            for request_id in self.held:
                request = ledger.requests[request_id]
                if request.session.state == LIVE:
                    assert self.shell.now_s - request.arrived_s < LIMIT_S, (request_id, request.session.id)

    def drain(self) -> None:
        for url in self.shell.urls:
            self.take(self.shell.health(url, True))
        for request in list(self.asked):
            self.take(self.shell.end(request, "aborted"))
        self.shell.now_s += 1e6
        self.take(self.shell.tick(0.0, sampled=False))


def nothing_left(policy: object) -> bool:
    if isinstance(policy, Aimd):
        return not policy._active_on and not any(window.active for window in policy.windows)
    if isinstance(policy, Program):
        return not policy.paused and not policy._moving and not policy._marked
    assert isinstance(policy, AdaptiveCap)
    return not policy.paused and not policy._live


@pytest.mark.parametrize("policy", ["aimd", "program", "adaptive_cap"])
def test_every_paused_session_goes_on_and_nothing_is_left_of_those_that_ended(policy: str) -> None:
    pauses = 0
    for seed in range(12):
        walk = Walk(policy, seed)
        for _ in range(250):
            walk.step()
        pauses += walk.pauses
        walk.drain()
        assert not walk.shell.ledger.sessions
        assert nothing_left(walk.shell.scheduler.policy), seed
    assert pauses > 20  # the walk went where it was meant to
