"""What a run is made of. A scenario is plain data: it can be written down, changed by a flag, and compared."""

from __future__ import annotations

from typing import Literal

import msgspec

from tidegate.sim.cpu_tier import CpuTierSpec
from tidegate.sim.disturbances import Drift, Flip, ReplicaLoss
from tidegate.sim.monitor import MonitorSpec
from tidegate.sim.replica import ReplicaConfig
from tidegate.sim.trainer import TrainerSpec
from tidegate.sim.workload_names import WorkloadOptions
from tidegate.types import ReplicaId, WorkloadClass

RECORDED = "recorded"  # the workload that is the trace itself


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    config: ReplicaConfig
    count: int = 1
    cpu_tier: CpuTierSpec | None = None  # fast replicas only


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    about: str
    version: int = 1  # figures of two versions are not to be compared
    workload: str  # a named one, or `recorded`: the sessions of options.trace
    options: WorkloadOptions = WorkloadOptions()
    replicas: tuple[ReplicaSpec, ...]
    trainer: TrainerSpec = TrainerSpec()
    monitor: MonitorSpec = MonitorSpec()
    # What a request takes beside the gate's wait and the engine's steps: two hops in one data centre, and our own time.
    # `sim fit` measures what an engine's HTTP server makes of it.
    request_s: float = 0.001
    warmup_s: float
    duration_s: float  # after the warm-up
    labelled: float = 1.0  # share of sessions that say their class
    announces: bool = False  # clients open their sessions with the expected tokens
    finishes: bool = True  # clients say that a session is over
    streams: bool = False
    releases: bool = False  # engines evict the KV of ended sessions first, as vLLM with tidegate's plugin
    priorities: dict[WorkloadClass, int] = {}  # of calls, for replicas that schedule by them: the smaller, the sooner
    losses: tuple[ReplicaLoss, ...] = ()
    flip: Flip | None = None
    drift: Drift | None = None
    fidelity: Literal["fast", "exact"] = "fast"  # of the replicas: in leaps, or step by step

    def __post_init__(self) -> None:
        if self.fidelity == "exact" and any(spec.cpu_tier is not None for spec in self.replicas):
            raise ValueError("a CPU tier is simulated by fast replicas only")
        for loss in self.losses:
            if loss.replica >= self.replica_count:
                raise ValueError(f"replica {loss.replica} is to be lost, and there are {self.replica_count}")
        longest = min(spec.config.max_model_len for spec in self.replicas)
        if self.options.context_tokens > longest:
            raise ValueError(f"sessions of {self.options.context_tokens} tokens on replicas that take {longest}")

    @property
    def replica_count(self) -> int:
        return sum(spec.count for spec in self.replicas)

    def specs(self) -> dict[ReplicaId, ReplicaSpec]:
        specs = [spec for spec in self.replicas for _ in range(spec.count)]
        return {f"http://replica-{number}": spec for number, spec in enumerate(specs)}

    @property
    def shares(self) -> dict[WorkloadClass, float] | None:
        """The mixture that is scored, where it is not the workload's own."""
        return self.flip.shares if self.flip is not None else None
