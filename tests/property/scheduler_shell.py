"""A shell around the Scheduler, as a model: it sends each request's end exactly once, moves requests of replicas that
it lost, and checks each decision against books of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis.stateful import RuleBasedStateMachine

from tidegate.policy import reasons
from tidegate.policy.entities import ENDED
from tidegate.policy.scheduler import Scheduler
from tidegate.types import AnyDecision, AnyEvent, Ended, Hold, Place, Reject


@dataclass
class Model:
    """What a shell knows: the state of each request by the decisions it was given."""

    state: dict[int, str] = field(default_factory=dict)  # request -> held | placed | rejected | ended
    where: dict[int, str] = field(default_factory=dict)
    session_of: dict[int, str | None] = field(default_factory=dict)
    admitted: set[str] = field(default_factory=set)  # session ids, by Place and Ended
    queues: dict[str, list[str]] = field(default_factory=dict)  # held sessions by class, in order of their first Hold


class SchedulerShell(RuleBasedStateMachine):
    policy = "misa_t"
    scheduler: Scheduler
    model: Model
    log: list[tuple[AnyEvent, list[AnyDecision]]]

    def send(self, event: AnyEvent) -> list[AnyDecision]:
        admitted_before = set(self.model.admitted)
        decisions = self.scheduler.handle(event)
        self.log.append((event, decisions))
        self.forget_those_that_left(decisions)
        for decision in decisions:
            self.take(event, decision, admitted_before)
        return decisions

    def take(self, event: AnyEvent, decision: AnyDecision, admitted_before: set[str]) -> None:
        model = self.model
        if isinstance(decision, Place):
            assert model.state[decision.request] in ("new", "held", "returned")
            assert decision.reason in reasons.PLACE
            assert self.scheduler.ledger.replicas[decision.replica].usable
            self.leaves_in_order(decision)
            model.state[decision.request] = "placed"
            model.where[decision.request] = decision.replica
            if decision.reason == "admitted":  # others may be of a generation that has ended
                model.admitted.add(decision.session)
        elif isinstance(decision, Hold):
            assert model.state[decision.request] in ("new", "returned")
            assert decision.reason in reasons.HOLD
            if decision.session in admitted_before:  # a continuation waits only where nothing can run, or paused
                assert decision.reason in ("pool_paused", "no_replica", "not_resident", "paused")
                assert self.scheduler.ledger.paused or decision.reason != "pool_paused"
                assert decision.reason != "not_resident" or self.policy == "working_set"
                assert decision.reason != "paused" or self.policy in ("aimd", "program", "adaptive_cap")
            elif self.waits_for_admission(decision):
                klass = self.scheduler.ledger.requests[decision.request].session.klass
                model.queues.setdefault(klass.name, []).append(decision.session)
            model.state[decision.request] = "held"
        elif isinstance(decision, Reject):
            assert decision.reason in reasons.REJECT
            session = model.session_of[decision.request]
            assert session is None or session not in admitted_before, "a continuation was rejected"
            assert model.state[decision.request] in ("new", "held")
            model.state[decision.request] = "rejected"
        elif isinstance(decision, Ended):
            assert decision.cause in reasons.ENDED
            self.dequeue(decision.session)
            model.admitted.discard(decision.session)
            admitted_before.discard(decision.session)  # what follows is a new generation

    def leaves_in_order(self, decision: Place) -> None:
        """A session that enters is the first of its class's queue, or its class has none."""
        if decision.reason != "admitted":
            return
        workload = self.scheduler.ledger.requests[decision.request].session.klass.name
        queue = self.model.queues.get(workload, [])
        assert not queue or queue[0] == decision.session, (decision.session, queue)
        self.dequeue(decision.session)

    def waits_for_admission(self, decision: Hold) -> bool:
        """Its session waits since now; a request that an ended session left behind does not wait for admission."""
        known = any(decision.session in queue for queue in self.model.queues.values())
        return not known and self.scheduler.ledger.requests[decision.request].session.state != ENDED

    def dequeue(self, session: str) -> None:
        for queue in self.model.queues.values():
            if session in queue:
                queue.remove(session)

    def forget_those_that_left(self, decisions: list[AnyDecision]) -> None:
        """Announced sessions stay open, and leave the queue, when their waiting requests leave."""
        waiting = {session.id for klass in self.scheduler.ledger.classes for session in klass.queue}
        waiting |= {decision.session for decision in decisions if isinstance(decision, Place)}
        for queue in self.model.queues.values():
            queue[:] = [session for session in queue if session in waiting]

    def pick(self, states: tuple[str, ...], index: int) -> int | None:
        found = [request for request, state in self.model.state.items() if state in states]
        return found[index % len(found)] if found else None
