"""What a run looked like over time, for plots: sampled at even steps, cheap enough to be always on when asked for."""

from __future__ import annotations

import msgspec

from tidegate.sim.cluster import Cluster
from tidegate.types import WorkloadClass

POINTS = 240  # over the whole run


class Timeline(msgspec.Struct, kw_only=True):
    """Lists of one length. Shares are of the pool's KV capacity; by class where it says so."""

    at_s: list[float] = []
    ledger_share: list[float] = []  # summed footprints of live sessions, by the scheduler's ledger
    running_share: list[float] = []  # held by running requests: what an engine's own gauge shows
    live: list[int] = []
    held: list[int] = []
    hit_rate: list[float | None] = []  # of the prompts since the last point
    completed: dict[WorkloadClass, list[int]] = {}  # so far
    footprint_tokens: dict[WorkloadClass, list[int]] = {}  # of live sessions


class Observer:
    def __init__(self, cluster: Cluster, until_s: float) -> None:
        self.timeline = Timeline(
            completed={name: [] for name in cluster.workload.shares},
            footprint_tokens={name: [] for name in cluster.workload.shares},
        )
        self._cluster = cluster
        self._before = (0, 0)
        self._seen = 0
        self._completed = dict.fromkeys(cluster.workload.shares, 0)
        cluster.kernel.every(until_s / POINTS, self._look)

    def _look(self) -> None:
        cluster, line = self._cluster, self.timeline
        ledger = cluster.gate.scheduler.ledger
        replicas = list(cluster.replicas.values())
        totals = [replica.totals() for replica in replicas]
        blocks = sum(replica.config.num_blocks for replica in replicas)
        tokens = sum(replica.config.num_blocks * replica.config.block_size for replica in replicas)
        line.at_s.append(cluster.kernel.now_s)
        line.ledger_share.append(sum(replica.tokens for replica in ledger.replicas.values()) / max(1, tokens))
        line.running_share.append(sum(total.used_blocks for total in totals) / max(1, blocks))
        line.live.append(sum(klass.live for klass in ledger.classes))
        line.held.append(sum(klass.held for klass in ledger.classes))
        line.hit_rate.append(self._hit_rate(sum(t.prompt_tokens for t in totals), sum(t.cached_tokens for t in totals)))
        for ended in cluster.clients.ended[self._seen :]:
            self._completed[ended.workload] += ended.completed
        self._seen = len(cluster.clients.ended)
        footprints = dict.fromkeys(self._completed, 0)
        for rollout in cluster.clients.live.values():
            session = ledger.sessions.get(rollout.id)
            if session is not None and session.replica is not None:
                footprints[rollout.plan.workload] += session.tokens
        for name, count in self._completed.items():
            line.completed[name].append(count)
            line.footprint_tokens[name].append(footprints[name])

    def _hit_rate(self, prompt: int, cached: int) -> float | None:
        before_prompt, before_cached = self._before
        self._before = (prompt, cached)
        gained = prompt - before_prompt
        return (cached - before_cached) / gained if gained > 0 else None
