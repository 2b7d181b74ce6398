"""Rollout clients: each plays a session's turns one after the other, through the gate, and says when it ends.

They behave as rollout workers do: no timeouts, Retry-After honoured, a failed call tried again as SDKs do, a finish
call at the end. A session whose call keeps failing is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import TypeAlias

from tidegate.sim.contexts import Branches
from tidegate.sim.gate import Gate
from tidegate.sim.kernel import Kernel
from tidegate.sim.rollout import Call, Rollout
from tidegate.sim.score import RequestRecord, SessionRecord
from tidegate.sim.workload import SessionPlan
from tidegate.types import Reject, WorkloadClass

Over: TypeAlias = Callable[[Rollout], None]

# The OpenAI SDK's: two retries of a 5xx, half a second apart at first.
MAX_RETRIES = 2
RETRY_S = 0.5


class Clients:
    """All clients of a run, and the books of what they saw."""

    def __init__(
        self,
        kernel: Kernel,
        gate: Gate,
        *,
        block_tokens: int,
        announces: bool = False,
        finishes: bool = True,
        record_from_s: float = 0.0,
        priorities: Mapping[WorkloadClass, int] | None = None,
    ) -> None:
        """`announces`: a session is opened with its expected tokens before its first request. `finishes`: its end is
        told; otherwise the gate has to find out by itself. `record_from_s`: calls answered before then are not kept.
        `priorities`: of the calls of a class, for replicas that schedule by them; 0 where nothing is said."""
        self.ended: list[SessionRecord] = []
        self.requests: list[RequestRecord] = []
        # Of every call: when its wait at the gate was over, its class, how long it was.
        self.holds_s: list[tuple[float, WorkloadClass, float]] = []
        self.block_time: list[tuple[float, WorkloadClass, float]] = []  # (end, class, token-seconds) of every call
        self.refusals = 0
        self.live: dict[str, Rollout] = {}
        self.over: Over = lambda rollout: None  # set by the trainer
        self._kernel = kernel
        self.gate = gate
        self._block_tokens = block_tokens
        self._announces = announces
        self._finishes = finishes
        self._record_from_s = record_from_s
        self._priorities = priorities or {}
        self._branches = Branches()
        self._numbers = count()
        gate.answered = self._answered
        gate.refused = self._refused

    def start(self, plan: SessionPlan, version: int = 0) -> Rollout:
        now_s = self._kernel.now_s
        rollout = Rollout(f"{plan.workload}-{plan.index}", plan, self._branches, now_s, version)
        self.live[rollout.id] = rollout
        if self._announces:
            self.gate.open(rollout.id, plan.workload, plan.group, plan.peak_tokens())
        self._ask(rollout)
        return rollout

    def interrupt(self, rollout: Rollout) -> None:
        """A partial rollout: what was generated stays, nothing goes on until `resume`."""
        rollout.interrupted = True
        call, rollout.call = rollout.call, None
        if call is not None:
            rollout.due = True
            rollout.generated += self.gate.abort(call)

    def resume(self, rollout: Rollout) -> None:
        rollout.interrupted = False
        if rollout.due:
            rollout.due = False
            self._begin_turn(rollout)

    def open_sessions(self) -> Iterator[SessionRecord]:
        for rollout in self.live.values():
            yield SessionRecord(workload=rollout.plan.workload, started_s=rollout.started_s, ended_s=None)

    # --- a turn ------------------------------------------------------------------------------------------------
    def _ask(self, rollout: Rollout) -> None:
        gap_s = rollout.plan.turns[rollout.turn].gap_s
        if gap_s > 0.0:
            self._kernel.after(gap_s, self._begin_turn, rollout)
        else:
            self._begin_turn(rollout)

    def _begin_turn(self, rollout: Rollout) -> None:
        if rollout.interrupted:
            rollout.due = True
            return
        if rollout.begun != rollout.turn:
            rollout.begun = rollout.turn
            _, rollout.repeated = rollout.context.begin_turn(rollout.turn)
        elif rollout.generated:
            rollout.repeated = rollout.context.tokens + rollout.generated
        prompt = rollout.context.tokens + rollout.generated
        self._send(rollout, prompt, cacheable_tokens(rollout.repeated, prompt, self._block_tokens))

    def _send(self, rollout: Rollout, prompt: int, repeated: int) -> None:
        output = rollout.plan.turns[rollout.turn].output_tokens - rollout.generated
        call = rollout.call = Call(next(self._numbers), rollout, prompt, repeated, max(1, output), self._kernel.now_s)
        if self._priorities:
            call.priority = self._priorities.get(rollout.plan.workload, 0)
        self.gate.send(call)

    def _refused(self, call: Call, reject: Reject) -> None:
        self.refusals += 1
        self._kernel.after(reject.retry_after_s or RETRY_S, self._send_again, call)

    def _send_again(self, call: Call) -> None:
        rollout = call.rollout
        if rollout.call is call:
            self._send(rollout, call.prompt_tokens, call.repeated_tokens)

    def _answered(self, call: Call) -> None:
        rollout = call.rollout
        if call.outcome != "ok":
            self._failed(call)
            return
        self._book(call)
        rollout.call = None
        rollout.retries = 0
        rollout.context.end_turn(call.output_tokens + rollout.generated)
        rollout.generated = 0
        rollout.turn += 1
        if rollout.turn < len(rollout.plan.turns):
            self._ask(rollout)
        else:
            self._end(rollout, completed=True)

    def _failed(self, call: Call) -> None:
        rollout = call.rollout
        rollout.retries += 1
        if rollout.retries > MAX_RETRIES:
            rollout.call = None
            self._end(rollout, completed=False)
        else:
            self._kernel.after(RETRY_S, self._send_again, call)

    def _end(self, rollout: Rollout, *, completed: bool) -> None:
        now_s = rollout.ended_s = self._kernel.now_s
        rollout.completed = completed
        del self.live[rollout.id]
        self.ended.append(
            SessionRecord(
                workload=rollout.plan.workload, started_s=rollout.started_s, ended_s=now_s, completed=completed
            )
        )
        if self._finishes:
            self.gate.finish(rollout.id)
        self.over(rollout)

    def _book(self, call: Call) -> None:
        now_s, placed_s = self._kernel.now_s, call.first_placed_s
        last_end_s, call.rollout.last_end_s = call.rollout.last_end_s, now_s
        if now_s < self._record_from_s:
            return
        assert placed_s is not None
        self.holds_s.append((placed_s, call.rollout.plan.workload, placed_s - call.arrived_s))
        self.block_time.append((now_s, call.rollout.plan.workload, _block_time(call, last_end_s, placed_s, now_s)))
        self.requests.append(
            RequestRecord(
                workload=call.rollout.plan.workload,
                sent_s=call.sent_s,
                first_byte_s=now_s,  # a reply that is not streamed
                ended_s=now_s,
                prompt_tokens=call.prompt_tokens,
                output_tokens=call.output_tokens,
                cached_tokens=call.cached_tokens,
                repeated_tokens=call.repeated_tokens,
            )
        )


def _block_time(call: Call, last_s: float | None, placed_s: float, ended_s: float) -> float:
    """What its session held, from the end of the call before it (a tool's time included) to its own end."""
    during = (call.prompt_tokens + call.output_tokens / 2) * (ended_s - placed_s)
    return during if last_s is None else during + call.rollout.repeated * (placed_s - last_s)


def cacheable_tokens(repeated: int, prompt_tokens: int, block_tokens: int) -> int:
    """Of a prompt's repeated tokens, those that a cache can give back: whole blocks, never the prompt's last token (its
    logits are needed) nor the last one generated (its KV was never computed)."""
    return max(0, min(repeated, prompt_tokens) - 1) // block_tokens * block_tokens
