"""A shell in miniature: sends events with its own clock and keeps the decisions."""

from __future__ import annotations

from typing import Any

from tidegate.policy.params import CoreParams
from tidegate.policy.scheduler import Scheduler
from tidegate.types import (
    AnyDecision,
    Ended,
    Hold,
    MixtureSet,
    Place,
    Reject,
    ReplicaAdded,
    ReplicaHealth,
    ReplicaSample,
    RequestArrived,
    RequestEnded,
    RequestReturned,
    SessionFinished,
    Tick,
)


class Shell:
    def __init__(
        self, policy: str, replicas: int = 2, *, capacity: int | None = 1_000_000, params: CoreParams | None = None
    ) -> None:
        self.scheduler = Scheduler(policy, params or CoreParams())
        self.ledger = self.scheduler.ledger
        self.now_s = 10.0
        self.requests = 0
        self.urls = [f"http://r{i}" for i in range(replicas)]
        for url in self.urls:
            self.send(ReplicaAdded(at_s=self.now_s, replica=url, kv_capacity_tokens=capacity))

    def send(self, event: Any) -> list[AnyDecision]:
        decisions = self.scheduler.handle(event)
        self.ledger.check()
        return decisions

    def arrive(self, session: str | None = None, **fields: Any) -> AnyDecision:
        """The decision on a new request; its id is `self.requests`."""
        return self.arrive_all(session, **fields)[-1]

    def arrive_all(self, session: str | None = None, **fields: Any) -> list[AnyDecision]:
        self.requests += 1
        return self.send(RequestArrived(at_s=self.now_s, request=self.requests, session=session, **fields))

    def end(self, request: int, outcome: str = "ok", **fields: Any) -> list[AnyDecision]:
        return self.send(RequestEnded(at_s=self.now_s, request=request, outcome=outcome, **fields))  # type: ignore[arg-type]

    def turn(self, session: str, prompt: int = 100, completion: int = 10, **fields: Any) -> str:
        """A whole request that must be placed; gives the replica."""
        decision = self.arrive(session, prompt_tokens=prompt, **fields)
        assert isinstance(decision, Place), decision
        self.end(self.requests, prompt_tokens=prompt, completion_tokens=completion)
        return decision.replica

    def returned(self, request: int, url: str) -> AnyDecision:
        return self.send(RequestReturned(at_s=self.now_s, request=request, failed=url))[-1]

    def finish(self, session: str) -> list[AnyDecision]:
        return self.send(SessionFinished(at_s=self.now_s, session=session))

    def health(self, url: str, usable: bool) -> list[AnyDecision]:
        return self.send(ReplicaHealth(at_s=self.now_s, replica=url, usable=usable))

    def sample(self, url: str, **fields: Any) -> list[AnyDecision]:
        return self.send(ReplicaSample(at_s=self.now_s, replica=url, **fields))

    def mixture(self, **shares: float) -> list[AnyDecision]:
        return self.send(MixtureSet(at_s=self.now_s, shares=shares))

    def tick(self, by_s: float = 1.0, *, sampled: bool = True) -> list[AnyDecision]:
        self.now_s += by_s
        decisions: list[AnyDecision] = []
        if sampled:
            for url in self.urls:
                decisions += self.sample(url, waiting=0)
        return decisions + self.send(Tick(at_s=self.now_s))

    def view(self) -> Any:
        return self.scheduler.view(self.now_s)

    def tokens(self, url: str) -> int:
        return self.ledger.replicas[url].tokens


def ended(decisions: list[AnyDecision]) -> list[Ended]:
    return [decision for decision in decisions if isinstance(decision, Ended)]


def placed(decisions: list[AnyDecision]) -> list[Place]:
    return [decision for decision in decisions if isinstance(decision, Place)]


def rejected(decisions: list[AnyDecision]) -> list[Reject]:
    return [decision for decision in decisions if isinstance(decision, Reject)]


def held(decision: AnyDecision) -> Hold:
    assert isinstance(decision, Hold), decision
    return decision
