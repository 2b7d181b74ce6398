"""The one table of metrics: the exposition and docs/metrics.md are both made from it.

Values are read at scrape time from a Snapshot; nothing is updated on the request path but plain counters. Labels are
bounded: replicas by the operator, classes by MAX_CLASSES, the rest by fixed lists. No label is ever a session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from msgspec import Struct
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from tidegate.engines.health import State
from tidegate.engines.monitor import MonitorView
from tidegate.engines.plugin import PluginView, Tally
from tidegate.observe.counters import MAX_CLASSES, OTHER_CLASSES, ClassCounters, Counters, Histogram
from tidegate.observe.recorder import Recorder
from tidegate.proxy.relay import Listener
from tidegate.types import Advice, PoolView, ReplicaId

STARVED_ALARM_S = 60.0  # the alarm outlives the last failure by this: longer than a scrape of the metrics

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Sample: TypeAlias = tuple[tuple[str, ...], float | Histogram | None]  # label values, value; None: unknown, left out


class Inferred(Struct, frozen=True, kw_only=True):
    """Of sessions that no client named."""

    sessions: int  # that can be gone on with
    opened: int  # requests taken for a first turn, since the start
    continued: int  # requests taken for a further one


class Snapshot(Struct, frozen=True, kw_only=True):
    """Everything that a scrape reads, taken at one moment."""

    version: str
    policy: str
    uptime_s: float
    view: PoolView
    advice: Advice
    counters: Counters
    failed_ticks: int = 0  # in a row
    monitors: tuple[MonitorView, ...]
    plugins: Mapping[ReplicaId, PluginView] = {}
    plugin_tally: Tally = Tally()
    recorder: Recorder | None
    listener: Listener
    passing: int  # requests under way that cost no KV and were not admitted
    inferred: Inferred | None  # None: identity.infer_sessions is off

    @property
    def alarms(self) -> tuple[str, ...]:
        """The decision core's, and those of what only the shell knows."""
        pool, alarms = self.listener.pool, self.view.alarms
        if pool.starved_s is not None and pool.now_s - pool.starved_s <= STARVED_ALARM_S:
            alarms = (*alarms, f"open_files: {pool.starved} connections to replicas had to wait for one")
        if self.failed_ticks:
            alarms = (*alarms, f"failed_ticks: the last {self.failed_ticks} ticks met a fault of the gate's own")
        return alarms


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    action: str  # what to do about it
    read: Callable[[Snapshot], Iterable[Sample]]


def _one(value: Callable[[Snapshot], float | None]) -> Callable[[Snapshot], Iterator[Sample]]:
    return lambda s: iter([((), value(s))])


def _by_replica(field: str) -> Callable[[Snapshot], Iterator[Sample]]:
    return lambda s: (((replica.url,), _number(getattr(replica, field))) for replica in s.view.replicas)


def _by_class(field: str) -> Callable[[Snapshot], Iterator[Sample]]:
    return lambda s: (((name,), _number(getattr(view, field))) for name, view in s.view.classes.items())


def _advised(field: str) -> Callable[[Snapshot], Iterator[Sample]]:
    return lambda s: (((label,), total) for label, total in _bounded(s.advice, field).items())


def _bounded(advice: Advice, field: str) -> dict[str, float]:
    """By class label; a mixture may name more classes than there are series."""
    totals: dict[str, float] = {}
    for name, one in advice.classes.items():
        label = name if len(totals) < MAX_CLASSES or name in totals else OTHER_CLASSES
        totals[label] = totals.get(label, 0.0) + getattr(one, field)
    return totals


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _counted(field: str) -> Callable[[Snapshot], Iterator[Sample]]:
    """A Counter of `Counters`, whose keys are the labels."""

    def read(s: Snapshot) -> Iterator[Sample]:
        counter: Mapping[Any, float | Histogram] = getattr(s.counters, field)
        for key, value in list(counter.items()):
            yield (key if isinstance(key, tuple) else (key,)), value

    return read


def _tallied(field: str) -> Callable[[Snapshot], Iterator[Sample]]:
    """A Counter of the plugins' `Tally`."""
    return lambda s: iter(list(getattr(s.plugin_tally, field).items()))


def _class_counted(value: Callable[[ClassCounters], float | Histogram]) -> Callable[[Snapshot], Iterator[Sample]]:
    return lambda s: (((counters.label,), value(counters)) for counters in s.counters.classes.values())


def _requests(s: Snapshot) -> Iterator[Sample]:
    for counters in s.counters.classes.values():
        for (path, outcome), count in counters.requests.items():
            yield (path, counters.label, outcome), count


def _connections(s: Snapshot) -> Iterator[Sample]:
    pool = s.listener.pool
    idle = pool.idle_connections
    yield ("busy",), pool.open_connections - idle
    yield ("idle",), idle


def _states(s: Snapshot) -> Iterator[Sample]:
    for monitor in s.monitors:
        for state in State:
            yield (monitor.url, str(state)), float(monitor.state is state)


def _alarms(s: Snapshot) -> Iterator[Sample]:
    """An alarm's text begins with its name; the rest names the replica and the numbers."""
    names = [alarm.partition(":")[0].partition(" ")[0] for alarm in s.alarms]
    return (((name,), float(names.count(name))) for name in sorted(set(names)))


def _inferred(s: Snapshot) -> Iterator[Sample]:
    if s.inferred is not None:
        yield ("first",), float(s.inferred.opened)
        yield ("further",), float(s.inferred.continued)


def _recorder(field: str) -> Callable[[Snapshot], Iterator[Sample]]:
    return lambda s: iter([((), _number(getattr(s.recorder, field)) if s.recorder else None)])


_REPLICA, _CLASS = ("replica",), ("workload_class",)

METRICS: tuple[Metric, ...] = (
    Metric("tidegate_build_info", "gauge", ("version", "policy"), "Always 1.", "-",
           lambda s: [((s.version, s.policy), 1.0)]),
    Metric("tidegate_uptime_seconds", "gauge", (), "Since the gate started.", "-", _one(lambda s: s.uptime_s)),
    # --- requests
    Metric("tidegate_requests_total", "counter", ("path", "workload_class", "outcome"),
           "Admitted inference requests by how they ended: ok, error (the replica's own 4xx or 5xx, or a generation it "
           "aborted), aborted (the client left), replica_lost (it died after its first byte), refused (it shed the "
           "request with 429 or 503).",
           "replica_lost and error above a few in a thousand: look at the replica's log. Many aborted: the client has "
           "a read timeout shorter than the hold.", _requests),
    Metric("tidegate_passed_requests_total", "counter", ("outcome",),
           "Requests on other paths, relayed without admission.", "-", _counted("passed")),
    Metric("tidegate_refused_requests_total", "counter", ("reason",),
           "Requests that the gate answered with an error of its own, by the error's code.",
           "hold_timeout, overloaded, queue_full: more rollouts are offered than fit; lower the client's concurrency "
           "or wait. no_replica: none is usable. invalid_*: a client's fault.", _counted("refused")),
    Metric("tidegate_requests_in_flight", "gauge", (), "Requests that run on replicas now.", "-",
           _one(lambda s: float(s.view.in_flight))),
    Metric("tidegate_requests_waiting", "gauge", (), "Requests that are held now.",
           "Steadily growing: the pool is the bottleneck.", _one(lambda s: float(s.view.waiting))),
    Metric("tidegate_passing_requests", "gauge", (), "Requests on other paths under way now.", "-",
           _one(lambda s: float(s.passing))),
    Metric("tidegate_client_connections", "gauge", (), "Open client connections.",
           "Near http.max_connections: raise it, and the limit of open files.",
           _one(lambda s: float(s.listener.connections))),
    Metric("tidegate_client_connections_opened_total", "counter", (), "Client connections accepted.",
           "Near the rate of requests: clients do not keep connections alive.",
           _one(lambda s: float(s.listener.connections_total))),
    Metric("tidegate_client_connections_refused_total", "counter", (), "Client connections over the limit.",
           "Raise http.max_connections, and the limit of open files.",
           _one(lambda s: float(s.listener.refused_total))),
    Metric("tidegate_replica_connections", "gauge", ("state",), "Connections to replicas, busy and idle.", "-",
           _connections),
    Metric("tidegate_replica_connects_total", "counter", ("result",), "Connections to replicas, opened and failed.",
           "Near the rate of requests: replicas close idle connections sooner than http.upstream_keep_alive_s.",
           lambda s: [(("opened",), s.listener.pool.opened), (("failed",), s.listener.pool.failed)]),
    Metric("tidegate_relayed_bytes_total", "counter", ("source",), "Bytes from clients and from replicas.", "-",
           lambda s: [(("clients",), s.listener.bytes_in), (("replicas",), s.listener.pool.bytes_in)]),
    Metric("tidegate_replay_bytes", "gauge", (), "Request bytes kept so that a request can leave a failed replica.",
           "Near http.replay_total_bytes: requests under way are many and large; the newest cannot be tried again.",
           _one(lambda s: float(s.listener.replay_bytes))),
    Metric("tidegate_request_held_seconds", "histogram", _CLASS, "From arrival to placement.",
           "High for one class only: its share of the capacity is below its demand; see the caps.",
           _class_counted(lambda c: c.held_s)),
    Metric("tidegate_time_to_first_byte_seconds", "histogram", _CLASS,
           "From placement to the first byte of the response: the replica's queue and prefill; for replies that are "
           "not streamed, the whole generation.",
           "Grows while hit rate falls: prompts are computed again, the pool is over its capacity.",
           _class_counted(lambda c: c.first_byte_s)),
    Metric("tidegate_request_duration_seconds", "histogram", _CLASS, "From arrival to the end of the response.", "-",
           _class_counted(lambda c: c.duration_s)),
    Metric("tidegate_retried_requests_total", "counter", ("reason",),
           "Requests that left a replica before its first byte and were given to another one.",
           "Rising: a replica is dying or draining; see tidegate_replica_state.", _counted("retried")),
    # --- tokens
    Metric("tidegate_prompt_tokens_total", "counter", _CLASS, "Prompt tokens of ended requests.", "-",
           _class_counted(lambda c: c.prompt_tokens)),
    Metric("tidegate_cached_prompt_tokens_total", "counter", _CLASS,
           "Prompt tokens that the replica found in its cache. Hit rate is this over tidegate_prompt_tokens_total.",
           "Always 0: start vLLM with --enable-prompt-tokens-details.", _class_counted(lambda c: c.cached_tokens)),
    Metric("tidegate_computed_prompt_tokens_total", "counter", _CLASS,
           "Prompt tokens that had to be computed.",
           "Approaching the prompt tokens in a multi-turn class: the pool thrashes.",
           _class_counted(lambda c: c.prompt_tokens - c.cached_tokens)),
    Metric("tidegate_completion_tokens_total", "counter", _CLASS, "Generated tokens of ended requests.", "-",
           _class_counted(lambda c: c.completion_tokens)),
    Metric("tidegate_estimated_usages_total", "counter", ("path",),
           "Requests whose token counts were estimated, since the reply had no usage.",
           "For streams, have the client ask for stream_options.include_usage.", _counted("estimated_usages")),
    # --- sessions
    Metric("tidegate_sessions_live", "gauge", _CLASS, "Admitted sessions that have not ended.", "-",
           _by_class("live")),
    Metric("tidegate_sessions_held", "gauge", _CLASS, "Sessions that wait for admission.",
           "As tidegate_requests_waiting.", _by_class("held")),
    Metric("tidegate_sessions_paused", "gauge", (), "Admitted sessions whose next turn waits.",
           "Above 0 without a weight update: their replica is not usable.",
           _one(lambda s: float(s.view.paused_sessions))),
    Metric("tidegate_sessions_completed_total", "counter", _CLASS, "Sessions that ended as completed rollouts.",
           "The trainer's samples; compare the classes with tidegate_class_share.", _by_class("completed")),
    Metric("tidegate_sessions_ended_total", "counter", ("cause",),
           "Sessions that ended: finished (the client said so), expired (idle), evicted (the table was full), "
           "single_request, abandoned (left before admission).",
           "Many expired: the client does not say when a rollout is over; their KV room is held for the idle time.",
           _counted("ended")),
    Metric("tidegate_inferred_requests_total", "counter", ("turn",),
           "Requests without a session id, by what their prompt was taken for: the first turn of a session, or a "
           "further one.",
           "Absent: identity.infer_sessions is off. Few further ones in a multi-turn workload: prompts do not begin "
           "with what was replied; have the client send X-Session-ID.", _inferred),
    Metric("tidegate_inferred_sessions", "gauge", (), "Inferred sessions that a further turn would be recognised of.",
           "At identity.infer_sessions_limit: the longest unused are forgotten.",
           _one(lambda s: float(s.inferred.sessions) if s.inferred else None)),
    Metric("tidegate_class_cap_sessions", "gauge", _CLASS, "Sessions of the class that may be live, over all replicas.",
           "Absent: the policy has no cap per class.", _by_class("cap")),
    Metric("tidegate_class_footprint_tokens", "gauge", _CLASS, "Estimated KV footprint of a session.",
           "Drifts up as trajectories grow; caps follow.", _by_class("footprint_tokens")),
    Metric("tidegate_class_residency_seconds", "gauge", _CLASS, "Estimated time from admission to end of a session.",
           "-", _by_class("residency_s")),
    Metric("tidegate_class_share", "gauge", _CLASS, "Target mixture, given by the trainer or learned.", "-",
           _by_class("share")),
    Metric("tidegate_advice_sessions", "gauge", _CLASS,
           "Sessions of the class that a trainer should have in flight: GET /advice.",
           "A trainer far below starves the pool; far above, its sessions wait at the gate, or thrash the caches "
           "under a policy that admits all.", _advised("sessions")),
    Metric("tidegate_advice_held_sessions", "gauge", _CLASS,
           "Of these, sessions that are expected to wait at the gate.", "-", _advised("held_sessions")),
    # --- decisions
    Metric("tidegate_placements_total", "counter", ("reason",), "Place decisions.",
           "repinned: a session lost its KV with its replica.", _counted("placed")),
    Metric("tidegate_holds_total", "counter", ("reason",), "Hold decisions.",
           "capacity_unknown, stale_state: the gate cannot see a replica; see the alarms.", _counted("held")),
    Metric("tidegate_epoch", "gauge", (), "Counts weight updates and pool-wide cache resets.", "-",
           _one(lambda s: float(s.view.epoch))),
    Metric("tidegate_pool_paused", "gauge", (), "1 while generation is paused on the pool.",
           "1 for longer than a weight update: POST /resume.", _one(lambda s: float(s.view.paused))),
    Metric("tidegate_alarms", "gauge", ("alarm",), "Alarms that stand, by name; their text is in /state.",
           "Each narrows the admission of new sessions or says that something is not known; see docs/engines.md.",
           _alarms),
    # --- replicas
    Metric("tidegate_replica_ready", "gauge", _REPLICA, "1 if it may take requests.", "0: see tidegate_replica_state.",
           _by_replica("ready")),
    Metric("tidegate_replica_state", "gauge", ("replica", "state"), "1 for the state it is in.",
           "See docs/engines.md for what each means and what ends it.", _states),
    Metric("tidegate_replica_sessions", "gauge", _REPLICA, "Live sessions.", "-", _by_replica("sessions")),
    Metric("tidegate_replica_requests", "gauge", _REPLICA, "Requests that run on it.", "-", _by_replica("requests")),
    Metric("tidegate_replica_kv_capacity_tokens", "gauge", _REPLICA, "KV capacity.",
           "Absent: unknown, and new sessions enter narrowly; set engines.kv_capacity_tokens.",
           _by_replica("kv_capacity_tokens")),
    Metric("tidegate_replica_kv_used_tokens", "gauge", _REPLICA, "Footprints of its live sessions, by the ledger.",
           "Above the capacity for long: estimates are low; report it.", _by_replica("kv_used_tokens")),
    Metric("tidegate_replica_kv_resident_tokens", "gauge", _REPLICA, "Cached tokens, by its KV events.",
           "Absent: it publishes none.", _by_replica("kv_resident_tokens")),
    Metric("tidegate_replica_hit_rate", "gauge", _REPLICA, "Cached over all prompt tokens, lately.",
           "Falls well below its usual value: thrash.", _by_replica("hit_rate")),
    Metric("tidegate_replica_pressure", "gauge", _REPLICA, "Confirmed overload pressure: 0 is none.",
           "Above 0: the caps are being contracted; nothing to do unless it stays.", _by_replica("pressure")),
    Metric("tidegate_replica_stale", "gauge", _REPLICA, "1 if its numbers are older than core.replica.stale_after_s.",
           "1: its /metrics does not answer; new sessions enter narrowly.", _by_replica("stale")),
    Metric("tidegate_replica_errors_total", "counter", ("replica", "reason"),
           "Requests that it failed, before or after the first byte.", "Look at its log.",
           _counted("replica_errors")),
    Metric("tidegate_replica_empty_aborts_total", "counter", _REPLICA,
           "New requests that it answered with an abort and no text, as a draining vLLM does; another replica took "
           "them.", "Expected while it shuts down, and only then.", _counted("empty_aborts")),
    Metric("tidegate_replica_aborted_replies_total", "counter", _REPLICA,
           "Generations that it ended with an abort after some text; passed on, never counted as completed.",
           "Expected with a pause or abort call; else look at its log.", _counted("aborted_replies")),
    Metric("tidegate_open_files_exhausted_total", "counter", (),
           "Connections to replicas that had to wait, because this process had no open file left for them.",
           "Above 0: raise the limit of open files (ulimit -n), or lower http.max_connections.",
           _one(lambda s: float(s.listener.pool.starved))),
    Metric("tidegate_replica_implausible_usages_total", "counter", _REPLICA,
           "Replies whose token counts cannot be: negative, absurd, or more cached than the prompt has. They were "
           "estimated instead.", "Above 0: a fault of the engine, or of a proxy before it.",
           _counted("implausible_usages")),
    Metric("tidegate_replica_resets_total", "counter", ("replica", "reason"), "Times its caches were lost.",
           "restart without a deployment: it crashes.", _counted("resets")),
    Metric("tidegate_plugin_used", "gauge", ("replica", "reason"),
           "1 if the engine's plugin is told of sessions, 0 with the reason why not.",
           "protocol, off_in_engine, unauthorized: see docs/vllm-plugin.md; absent: it is not installed there.",
           lambda s: (((url, view.reason), float(view.used)) for url, view in s.plugins.items())),
    Metric("tidegate_plugin_sessions_total", "counter", ("replica", "hint"),
           "Sessions that an engine's plugin was told of: release, demote, protect.", "-", _tallied("sessions")),
    Metric("tidegate_plugin_moved_blocks_total", "counter", ("replica", "hint"),
           "Cached KV blocks whose turn to be evicted this changed.",
           "0 while sessions are released: the engine knows them by another id, or not at all.",
           _tallied("moved_blocks")),
    Metric("tidegate_plugin_failures_total", "counter", ("replica", "reason"),
           "Sessions that an engine's plugin should have been told of: unanswered, status_<code>, queue_full.",
           "Rising: its steps take longer than engines.plugin_timeout_s, or it is overloaded.", _tallied("failures")),
    # --- the gate itself
    Metric("tidegate_record_written_total", "counter", (), "Lines of the decision log.", "-", _recorder("written")),
    Metric("tidegate_record_dropped_total", "counter", (), "Lines that the disk was too slow for.",
           "Above 0: the log has gaps and replays exactly only up to the first; use a faster disk.",
           _recorder("dropped")),
    Metric("tidegate_record_waiting", "gauge", (), "Lines that wait for the disk.", "-", _recorder("waiting")),
    Metric("tidegate_internal_faults_total", "counter", (),
           "Exceptions in the gate's own code that were contained.", "Above 0: a bug; its traceback is in the log.",
           _one(lambda s: float(s.counters.faults))),
)  # fmt: skip


class GateCollector(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Any]:
        return ()  # do not collect at registration: the pool does not exist yet

    def collect(self) -> Iterator[Any]:
        snapshot = self._snapshot()
        for metric in METRICS:
            yield _family(metric, metric.read(snapshot))


def _family(metric: Metric, samples: Iterable[Sample]) -> Any:
    if metric.kind == "histogram":
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, value in samples:
            if isinstance(value, Histogram):
                family.add_metric(labels, _buckets(value), sum_value=value.total)
        return family
    plain = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
        metric.name, metric.help, labels=metric.labels
    )
    for labels, value in samples:
        if value is not None and not isinstance(value, Histogram):
            plain.add_metric(labels, value)
    return plain


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets


def registry(snapshot: Callable[[], Snapshot]) -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(GateCollector(snapshot))
    ProcessCollector(registry=made)
    PlatformCollector(registry=made)
    GCCollector(registry=made)
    return made


def exposition(made: CollectorRegistry) -> bytes:
    return generate_latest(made)
