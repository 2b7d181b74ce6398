"""What happens to a cluster in the middle of a run: a replica dies and comes back, the mixture changes, lengths drift.

A dead replica drops its requests. Replies that had no byte yet (all, unless they are streamed) are placed anew; of the
others the client gets an error. The gate sees the broken connections at once, and the replica come back with its first
answered probe: empty, under the same address.
"""

from __future__ import annotations

import msgspec

from tidegate.sim.workload import SessionPlan, SessionSource, fit_to_context
from tidegate.types import WorkloadClass


class ReplicaLoss(msgspec.Struct, frozen=True, kw_only=True):
    replica: int  # its number
    at_s: float
    back_s: float | None = None  # None: it stays away


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's mixture is another one from now on; nobody tells the gate."""

    at_s: float
    shares: dict[WorkloadClass, float]


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """Outputs of a class get longer: by `factor` after every so many of its sessions."""

    workload: WorkloadClass
    factor: float
    every: int


class Drifting:
    """A source whose n-th session is longer the larger n is."""

    def __init__(self, source: SessionSource, drift: Drift, limit_tokens: int) -> None:
        self.workload = source.workload
        self._source = source
        self._drift = drift
        self._limit_tokens = limit_tokens

    def session(self, index: int) -> SessionPlan:
        plan = self._source.session(index)
        factor = self._drift.factor ** (index // self._drift.every)
        turns = [
            msgspec.structs.replace(turn, output_tokens=min(self._limit_tokens, round(turn.output_tokens * factor)))
            for turn in plan.turns
        ]
        return msgspec.structs.replace(plan, turns=fit_to_context(turns, self._limit_tokens))
