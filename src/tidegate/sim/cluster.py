"""One simulated cluster: kernel, replicas, monitors, the gate with the production Scheduler, clients and a trainer."""

from __future__ import annotations

import msgspec

from tidegate.config.nearest import suggestion
from tidegate.errors import ConfigError
from tidegate.policy import policies
from tidegate.policy.params import CoreParams
from tidegate.policy.scheduler import Scheduler
from tidegate.sim.clients import Clients
from tidegate.sim.fast_replica import FastReplica
from tidegate.sim.gate import Gate, Recorder
from tidegate.sim.kernel import Kernel
from tidegate.sim.monitor import Monitor
from tidegate.sim.recorded import recorded_workload
from tidegate.sim.replica import ReplicaConfig
from tidegate.sim.replicas import ExactReplica, SimReplica
from tidegate.sim.scenario import RECORDED, Scenario
from tidegate.sim.trainer import Asynchronous
from tidegate.sim.workload import Workload
from tidegate.sim.workload_names import build_workload
from tidegate.types import ReplicaAdded, ReplicaId

REPLICAS = {"fast": FastReplica, "exact": ExactReplica}


class Cluster:
    def __init__(
        self,
        scenario: Scenario,
        policy: str,
        params: CoreParams,
        seed: int,
        *,
        recorder: Recorder | None = None,
    ) -> None:
        if policy not in policies():
            raise ConfigError(f"no policy {policy!r}{suggestion(policy, policies())}", reason="unknown_policy")
        self.scenario = scenario
        self.kernel = Kernel(seed)
        self.workload = seeded_workload(scenario, seed)
        self.replicas: dict[ReplicaId, SimReplica] = {}
        self.gate = Gate(
            self.kernel,
            Scheduler(policy, params, seed),
            self.replicas,
            labelled=scenario.labelled,
            streams=scenario.streams,
            recorder=recorder,
        )
        self.clients = Clients(
            self.kernel,
            self.gate,
            block_tokens=min(spec.config.block_size for spec in scenario.replicas),
            announces=scenario.announces,
            finishes=scenario.finishes,
        )
        self._monitors: dict[ReplicaId, Monitor] = {}
        for url, config in scenario.configs().items():
            self.add_replica(url, config)
        self.trainer = Asynchronous(self.kernel, self.clients, self.workload, scenario.trainer.in_flight)
        # The router is up before the trainer: it has read its replicas once.
        self.kernel.at(2 * scenario.monitor.delay_s, self.trainer.start)

    def add_replica(self, url: ReplicaId, config: ReplicaConfig) -> None:
        replica = self.replicas[url] = REPLICAS[self.scenario.fidelity](self.kernel, config, self.gate.done)
        self.gate.handle(ReplicaAdded(at_s=self.kernel.now_s, replica=url))
        self._monitors[url] = Monitor(
            self.kernel,
            self.scenario.monitor,
            url,
            replica,
            self.clients.live.values,
            self.gate.handle,
        )

    def run(self) -> None:
        self.kernel.run(self.scenario.warmup_s + self.scenario.duration_s)


def seeded_workload(scenario: Scenario, seed: int) -> Workload:
    options = msgspec.structs.replace(scenario.options, seed=scenario.options.seed + seed)
    return recorded_workload(options) if scenario.workload == RECORDED else build_workload(scenario.workload, options)
