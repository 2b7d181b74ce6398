"""What a run is made of. A scenario is plain data: it can be written down, changed by a flag, and compared."""

from __future__ import annotations

from typing import Literal

import msgspec

from tidegate.sim.monitor import MonitorSpec
from tidegate.sim.replica import ReplicaConfig
from tidegate.sim.trainer import TrainerSpec
from tidegate.sim.workload_names import WorkloadOptions
from tidegate.types import ReplicaId

RECORDED = "recorded"  # the workload that is the trace itself


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    config: ReplicaConfig
    count: int = 1


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    about: str
    version: int = 1  # figures of two versions are not to be compared
    workload: str  # a named one, or `recorded`: the sessions of options.trace
    options: WorkloadOptions = WorkloadOptions()
    replicas: tuple[ReplicaSpec, ...]
    trainer: TrainerSpec = TrainerSpec()
    monitor: MonitorSpec = MonitorSpec()
    warmup_s: float
    duration_s: float  # after the warm-up
    labelled: float = 1.0  # share of sessions that say their class
    announces: bool = False  # clients open their sessions with the expected tokens
    finishes: bool = True  # clients say that a session is over
    streams: bool = False
    fidelity: Literal["fast", "exact"] = "fast"  # of the replicas: in leaps, or step by step

    @property
    def replica_count(self) -> int:
        return sum(spec.count for spec in self.replicas)

    def configs(self) -> dict[ReplicaId, ReplicaConfig]:
        configs = [spec.config for spec in self.replicas for _ in range(spec.count)]
        return {f"http://replica-{number}": config for number, config in enumerate(configs)}
