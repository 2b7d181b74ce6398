"""What the gate gets to know of its replicas, and when: readings and residency reports, late, lost or not at all.

One monitor a replica, as in the router: a reading every `period_s`, moved by up to a tenth, so that they spread out. A
reading carries the time at which it was taken and arrives `delay_s` later; `loss` of them never do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from tidegate.sim.kernel import Kernel
from tidegate.sim.replicas import SimReplica, capacity_tokens
from tidegate.sim.rollout import Rollout
from tidegate.types import AnyEvent, ReplicaId, ReplicaResidency, ReplicaSample

JITTER = 0.1  # of a period


class MonitorSpec(msgspec.Struct, frozen=True, kw_only=True):
    period_s: float = 1.0  # the router's engines.scrape_period_s
    delay_s: float = 0.005  # a scrape of a busy engine
    loss: float = 0.0
    outage_s: tuple[float, float] | None = None  # from, to: nothing arrives
    residency: bool = False  # the engines publish KV events, and they are read


class Monitor:
    def __init__(
        self,
        kernel: Kernel,
        spec: MonitorSpec,
        url: ReplicaId,
        replica: SimReplica,
        rollouts: Callable[[], Iterable[Rollout]],
        handle: Callable[[AnyEvent], None],
    ) -> None:
        self._kernel = kernel
        self._spec = spec
        self._url = url
        self._replica = replica
        self._rollouts = rollouts
        self._handle = handle
        self._chance = kernel.stream(f"monitor/{url}")
        self._evicted_tokens = 0
        self._stopped = False
        self._scrape()

    def stop(self) -> None:
        """Its replica is gone."""
        self._stopped = True

    def _scrape(self) -> None:
        if self._stopped:
            return
        self._send(self._sample())
        if self._spec.residency:
            self._send(self._residency())
        period_s = self._spec.period_s * self._chance.uniform(1 - JITTER, 1 + JITTER)
        self._kernel.after(period_s, self._scrape)

    def _send(self, event: AnyEvent) -> None:
        spec, now_s = self._spec, self._kernel.now_s
        lost = self._chance.random() < spec.loss  # drawn always: a loss more changes nothing else
        out = spec.outage_s is not None and spec.outage_s[0] <= now_s < spec.outage_s[1]
        if not lost and not out:
            self._kernel.after(spec.delay_s, self._arrive, event)

    def _arrive(self, event: AnyEvent) -> None:
        if not self._stopped:
            self._handle(event)

    def _sample(self) -> ReplicaSample:
        totals, config = self._replica.totals(), self._replica.config
        return ReplicaSample(
            at_s=self._kernel.now_s,
            replica=self._url,
            kv_capacity_tokens=capacity_tokens(config),
            kv_used_fraction=totals.used_blocks / (config.num_blocks - 1),
            running=totals.running,
            waiting=totals.waiting,
            prompt_tokens_total=totals.prompt_tokens,
            cached_tokens_total=totals.cached_tokens,
            generation_tokens_total=totals.generation_tokens,
            preemptions_total=totals.preemptions,
        )

    def _residency(self) -> ReplicaResidency:
        sessions = {}
        for rollout in self._rollouts():
            if rollout.replica != self._url:
                continue
            tokens = self._replica.resident_tokens(rollout)
            if tokens:
                sessions[rollout.id] = tokens
        totals, size = self._replica.totals(), self._replica.config.block_size
        evicted = totals.evicted_blocks * size
        before, self._evicted_tokens = self._evicted_tokens, evicted
        return ReplicaResidency(
            at_s=self._kernel.now_s,
            replica=self._url,
            session_tokens=sessions,
            resident_tokens=self._replica.resident_blocks() * size,
            evicted_tokens=evicted - before,
        )
