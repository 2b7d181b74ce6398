"""Flags of `tidegate serve`: short names for the settings that matter most, vllm-router's names where they mean the
same, and every other setting under its own path (`--http-max-body-bytes`).

vllm-router's other flags are either taken without effect, because what they tune does not exist here, or refused with
the reason: a flag must never be swallowed that changes what its user expects to happen.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.config.schema import Leaf, leaves


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    path: str
    group: str
    note: str = ""  # what differs from the setting's own description
    fixed: str | None = None  # a flag without a value: this is what it sets

    @property
    def leaf(self) -> Leaf:
        return leaves()[self.path]


SERVER, ADMISSION, IDENTITY, OBSERVE, COMPAT = (
    "Server",
    "Admission",
    "Identity",
    "Observability",
    "vllm-router's names",
)

_SHORT = (
    Flag("--worker-urls", "server.worker_urls", SERVER),
    Flag("--policy", "policy", SERVER),
    Flag("--seed", "seed", SERVER),
    Flag("--host", "server.host", SERVER),
    Flag("--port", "server.port", SERVER),
    Flag("--max-attempts", "server.max_attempts", SERVER),
    Flag("--drain-timeout", "server.drain_timeout_s", SERVER),
    Flag("--hold-timeout", "core.admission.hold_timeout_s", ADMISSION),
    Flag("--overload", "core.admission.overload", ADMISSION),
    Flag("--kv-capacity-tokens", "engines.kv_capacity_tokens", ADMISSION),
    Flag("--request-id-headers", "identity.session_headers", IDENTITY, "x-request-id among them is ignored."),
    Flag("--infer-sessions", "identity.infer_sessions", IDENTITY, fixed="true"),
    Flag("--prometheus-port", "server.prometheus_port", OBSERVE),
    Flag("--prometheus-host", "server.prometheus_host", OBSERVE),
    Flag("--record", "record.path", OBSERVE),
    Flag("--log-level", "log.level", OBSERVE),
    Flag("--log-format", "log.format", OBSERVE),
    Flag("--max-payload-size", "http.max_body_bytes", COMPAT),
    Flag("--request-timeout-secs", "http.response_timeout_s", COMPAT, "Counts from the last byte, not over all."),
    Flag("--max-concurrent-requests", "http.max_connections", COMPAT, "Counts connections."),
    Flag("--queue-size", "core.admission.max_waiting", COMPAT),
    Flag("--queue-timeout-secs", "core.admission.hold_timeout_s", COMPAT),
    Flag("--retry-max-retries", "server.max_attempts", COMPAT),
    Flag("--disable-retries", "server.max_attempts", COMPAT, "One attempt only.", fixed="1"),
    Flag("--health-check-interval-secs", "engines.health_period_s", COMPAT),
    Flag("--health-check-timeout-secs", "engines.health_timeout_s", COMPAT),
    Flag("--health-failure-threshold", "engines.unhealthy_after", COMPAT),
    Flag("--cb-failure-threshold", "engines.eject_after", COMPAT),
    Flag("--cb-timeout-duration-secs", "engines.eject_s", COMPAT),
    Flag("--cache-threshold", "core.cache_aware.match_share", COMPAT),
    Flag("--balance-abs-threshold", "core.cache_aware.balance_requests", COMPAT),
    Flag("--balance-rel-threshold", "core.cache_aware.balance_ratio", COMPAT),
)

WITHOUT_EFFECT: dict[str, str] = {
    "--worker-startup-timeout-secs": "replicas that do not answer are waited for without a limit",
    "--worker-startup-check-interval": "replicas are probed every engines.health_period_s from the start",
    "--retry-initial-backoff-ms": "another try goes to another replica, at once",
    "--retry-max-backoff-ms": "another try goes to another replica, at once",
    "--retry-backoff-multiplier": "another try goes to another replica, at once",
    "--retry-jitter-factor": "another try goes to another replica, at once",
    "--health-success-threshold": "one good probe is enough",
    "--cb-success-threshold": "one good answer closes an ejection",
    "--cb-window-duration-secs": "failures in a row are counted, without a window",
    "--eviction-interval-secs": "the prefix tree is bounded as it grows",
    "--max-tree-size": "the prefix tree is bounded as it grows",
    "--kv-event-block-size": "read from the events",
    "--kv-event-model": "sessions are told apart by their ids",
}

_PD = "prefill/decode disaggregation is not supported: each replica serves whole requests"
_KUBERNETES = "Kubernetes discovery is not supported: list replicas with --worker-urls or POST /workers"
_WASM = "middleware is not supported"
_KV_AWARE = "there is no kv_aware policy: see --policy"

REFUSED: dict[str, str] = {
    "--intra-node-data-parallel-size": "list each data-parallel rank's own URL in --worker-urls",
    "--enable-program-scheduling": "program scheduling is a policy here: see --policy",
    "--program-scheduling-config-json": "program scheduling is a policy here: see --policy",
    "--vllm-pd-disaggregation": _PD,
    "--prefill": _PD,
    "--decode": _PD,
    "--prefill-policy": _PD,
    "--decode-policy": _PD,
    "--kv-connector": _PD,
    "--pd-kv-events": _PD,
    "--vllm-discovery-address": _PD,
    "--mini-lb": _PD,
    "--router-temperature": _KV_AWARE,
    "--kv-penalty-host": _KV_AWARE,
    "--kv-penalty-external": _KV_AWARE,
    "--kv-penalty-disk": _KV_AWARE,
    "--kv-aware-session-affinity-ttl-secs": _KV_AWARE,
    "--kv-event-source": "publishers are found by themselves; else set engines.kv_event_endpoints",
    "--kv-event-replay-source": "publishers are found by themselves; else set engines.kv_event_endpoints",
    "--enable-igw": "one model per gate",
    "--service-discovery": _KUBERNETES,
    "--selector": _KUBERNETES,
    "--service-discovery-port": _KUBERNETES,
    "--service-discovery-namespace": _KUBERNETES,
    "--prefill-selector": _KUBERNETES,
    "--decode-selector": _KUBERNETES,
    "--wasm-middleware": _WASM,
    "--wasm-middleware-sha256": _WASM,
    "--wasm-middleware-route": _WASM,
    "--disable-circuit-breaker": "a replica that cannot be reached is always left: see engines.eject_after",
    "--api-key": "clients' own Authorization headers pass to the replicas",
    "--log-dir": "logs go to stderr: redirect it",
    "--health-check-endpoint": "the engine's own health path is used",
    "--rate-limit-tokens-per-second": "admission is by KV, not by rate: see core.admission",
    "--cors-allowed-origins": "the gate is not for browsers",
}

# Refused flags are let through with the value that means "off".
HARMLESS: dict[str, str] = {"--intra-node-data-parallel-size": "1", "--health-check-endpoint": "/health"}


def short_flags() -> dict[str, Flag]:
    """The first screen of --help. Names of settings that do not exist are left out."""
    return {flag.name: flag for flag in _SHORT if flag.path in leaves()}


def flags() -> dict[str, Flag]:
    """All that set something, by name: the short ones first."""
    known = short_flags()
    for leaf in leaves().values():
        known.setdefault(leaf.flag, Flag(leaf.flag, leaf.path, leaf.section or "Server"))
    return known
