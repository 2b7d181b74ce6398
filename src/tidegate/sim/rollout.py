"""What moves through a simulated cluster: sessions under way and their requests."""

from __future__ import annotations

from typing import Literal

from tidegate.sim.contexts import Branches, Context
from tidegate.sim.workload import SessionPlan


class Rollout:
    """A session under way."""

    __slots__ = (
        "begun", "call", "completed", "context", "due", "ended_s", "generated", "id", "interrupted", "last_end_s",
        "plan", "repeated", "replica", "retries", "started_s", "turn", "version",
    )  # fmt: skip

    def __init__(self, id: str, plan: SessionPlan, branches: Branches, started_s: float, version: int = 0) -> None:
        self.id = id
        self.plan = plan
        self.context = Context(plan, branches)
        self.turn = 0
        self.started_s = started_s
        self.ended_s: float | None = None
        self.completed = False
        self.version = version  # of the weights when it started
        self.call: Call | None = None  # under way
        self.replica: str | None = None  # where its last call went
        self.last_end_s: float | None = None  # of its last answered call
        self.retries = 0  # of the turn under way
        self.begun = -1  # the last turn whose prompt was made
        self.repeated = 0  # tokens of that prompt that the session had before
        self.generated = 0  # tokens of that turn that an interrupted call left
        self.interrupted = False
        self.due = False  # its next call is to be sent when it is resumed


class Call:
    """A request of a session, from the client's side to the replica's and back."""

    __slots__ = (
        "arrived_s", "attempts", "cached_tokens", "ended_s", "first_placed_s", "id", "outcome", "output_tokens",
        "placed_s", "priority", "prompt_tokens", "repeated_tokens", "replica", "rollout", "sent_s", "told_tokens",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        rollout: Rollout,
        prompt_tokens: int,
        repeated_tokens: int,
        output_tokens: int,
        sent_s: float,
    ) -> None:
        self.id = id
        self.rollout = rollout
        self.prompt_tokens = prompt_tokens
        self.repeated_tokens = repeated_tokens  # of the prompt, computed before in this session
        self.output_tokens = output_tokens
        self.sent_s = sent_s
        self.priority = 0  # for replicas that schedule by it: the smaller, the sooner
        self.arrived_s = sent_s
        self.first_placed_s: float | None = None  # when its wait at the gate was over
        self.placed_s: float | None = None  # on the replica where it is now
        self.ended_s: float | None = None
        self.replica: str | None = None
        self.cached_tokens: int | None = None
        self.attempts = 0
        self.told_tokens = 0  # generated tokens, as told by the last progress report
        self.outcome: Literal["ok", "error", "aborted", "replica_lost", "refused"] = "ok"
