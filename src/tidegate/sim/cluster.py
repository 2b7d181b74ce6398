"""One simulated cluster: kernel, replicas, monitors, the gate with the production Scheduler, clients and a trainer."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tidegate.config.nearest import suggestion
from tidegate.errors import ConfigError
from tidegate.policy import policies
from tidegate.policy.params import CoreParams
from tidegate.policy.scheduler import Scheduler
from tidegate.sim.clients import Clients
from tidegate.sim.disturbances import Drifting, ReplicaLoss
from tidegate.sim.fast_replica import FastReplica
from tidegate.sim.gate import Gate, Recorder
from tidegate.sim.kernel import Kernel
from tidegate.sim.monitor import Monitor
from tidegate.sim.recorded import recorded_workload
from tidegate.sim.replicas import ExactReplica, SimReplica
from tidegate.sim.scenario import RECORDED, ReplicaSpec, Scenario
from tidegate.sim.trainer import trainer
from tidegate.sim.workload import Workload
from tidegate.sim.workload_names import build_workload
from tidegate.types import (
    EpochStarted,
    PoolPaused,
    PoolResumed,
    ReplicaAdded,
    ReplicaHealth,
    ReplicaId,
    ReplicaReset,
)


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
        self.kernel = kernel = Kernel(seed)
        self.workload = seeded_workload(scenario, seed)
        self.replicas: dict[ReplicaId, SimReplica] = {}
        self.lost_preemptions = 0  # of replicas that are gone
        self.gate = Gate(
            kernel,
            Scheduler(policy, params, seed),
            self.replicas,
            labelled=scenario.labelled,
            streams=scenario.streams,
            hop_s=scenario.request_s / 2,
            releases=scenario.releases,
            recorder=recorder,
        )
        self.clients = Clients(
            kernel,
            self.gate,
            block_tokens=min(spec.config.block_size for spec in scenario.replicas),
            announces=scenario.announces,
            finishes=scenario.finishes,
            record_from_s=scenario.warmup_s,
            priorities=scenario.priorities,
        )
        self._specs = scenario.specs()
        self._monitors: dict[ReplicaId, Monitor] = {}
        self._syncing = False
        for url in self._specs:
            self._start_replica(url)
            self.gate.handle(ReplicaAdded(at_s=kernel.now_s, replica=url))
        self.trainer = trainer(kernel, self.clients, self.workload, scenario.trainer, self.sync_weights)
        # The router is up before the trainer: it has read its replicas once.
        kernel.at(2 * scenario.monitor.delay_s, self.trainer.start)
        self._plan_disturbances()

    def run(self, until_s: float) -> None:
        self.kernel.run(until_s)

    # --- replicas ----------------------------------------------------------------------------------------------
    def _start_replica(self, url: ReplicaId) -> None:
        replica = self.replicas[url] = self._made(self._specs[url])
        self._monitors[url] = Monitor(
            self.kernel, self.scenario.monitor, url, replica, self.clients.live.values, self.gate.handle
        )

    def _made(self, spec: ReplicaSpec) -> SimReplica:
        if self.scenario.fidelity == "fast":
            return FastReplica(self.kernel, spec.config, self.gate.done, spec.cpu_tier, releases=self.scenario.releases)
        return ExactReplica(self.kernel, spec.config, self.gate.done, releases=self.scenario.releases)

    def lose(self, url: ReplicaId) -> None:
        """It dies; the gate sees its connections break."""
        replica = self.replicas.pop(url)
        self.lost_preemptions += replica.totals().preemptions
        self._monitors.pop(url).stop()
        calls = [(call, replica.generated(call)) for call in self.gate.calls_on(url) if call.placed_s is not None]
        replica.pause()
        self.gate.handle(ReplicaHealth(at_s=self.kernel.now_s, replica=url, usable=False, reason="connect_failed"))
        for call, generated in calls:
            self.gate.lost(call, url, before_first_byte=not (self.scenario.streams and generated))

    def restore(self, url: ReplicaId) -> None:
        """It is back, empty, under its old address."""
        self._start_replica(url)
        now_s = self.kernel.now_s
        self.gate.handle(ReplicaReset(at_s=now_s, replica=url, reason="restart"))
        self.gate.handle(ReplicaHealth(at_s=now_s, replica=url, usable=True, reason="ok"))

    # --- weights -----------------------------------------------------------------------------------------------
    def sync_weights(self, for_s: float, then: Callable[[], None]) -> None:
        """The pool is paused, its weights change, all caches are cold. A second call waits for the first."""
        if self._syncing:
            self.kernel.after(for_s, self.sync_weights, for_s, then)
            return
        self._syncing = True
        self.gate.handle(PoolPaused(at_s=self.kernel.now_s))
        for replica in self.replicas.values():
            replica.pause()
        self.kernel.after(for_s, self._synced, then)

    def _synced(self, then: Callable[[], None]) -> None:
        self._syncing = False
        for replica in self.replicas.values():
            replica.flush()
            replica.resume()
        self.gate.handle(EpochStarted(at_s=self.kernel.now_s, reason="weights"))
        self.gate.handle(PoolResumed(at_s=self.kernel.now_s))
        then()

    # --- disturbances ------------------------------------------------------------------------------------------
    def _plan_disturbances(self) -> None:
        urls = list(self._specs)
        for loss in self.scenario.losses:
            self._plan_loss(urls[loss.replica], loss)
        flip = self.scenario.flip
        if flip is not None:
            self.kernel.at(flip.at_s, self.trainer.set_mixture, flip.shares)

    def _plan_loss(self, url: ReplicaId, loss: ReplicaLoss) -> None:
        self.kernel.at(loss.at_s, self.lose, url)
        if loss.back_s is not None:
            self.kernel.at(loss.back_s, self.restore, url)


def seeded_workload(scenario: Scenario, seed: int) -> Workload:
    options = msgspec.structs.replace(scenario.options, seed=scenario.options.seed + seed)
    workload = (
        recorded_workload(options) if scenario.workload == RECORDED else build_workload(scenario.workload, options)
    )
    drift = scenario.drift
    if drift is None:
        return workload
    source = Drifting(workload.sources[drift.workload], drift, options.context_tokens)
    return msgspec.structs.replace(workload, sources={**workload.sources, drift.workload: source})
