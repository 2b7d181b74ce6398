"""Flags: each sets a setting, is taken without effect, or is refused; none is swallowed."""

from __future__ import annotations

import pytest

from tidegate.config.flags import HARMLESS, REFUSED, WITHOUT_EFFECT, flags
from tidegate.config.schema import leaves

# `vllm-router --help` of 0.1.17, less --help.
_NAMES = """
host port worker-urls enable-program-scheduling program-scheduling-config-json policy prefill-policy decode-policy
router-temperature kv-penalty-host kv-penalty-external kv-penalty-disk kv-aware-session-affinity-ttl-secs
kv-event-source kv-event-replay-source kv-event-block-size kv-event-model pd-kv-events mini-lb vllm-pd-disaggregation
prefill decode worker-startup-timeout-secs worker-startup-check-interval cache-threshold balance-abs-threshold
balance-rel-threshold eviction-interval-secs max-tree-size max-payload-size wasm-middleware wasm-middleware-sha256
wasm-middleware-route intra-node-data-parallel-size enable-igw api-key log-dir log-level service-discovery selector
service-discovery-port service-discovery-namespace prefill-selector decode-selector vllm-discovery-address kv-connector
prometheus-port prometheus-host request-id-headers request-timeout-secs retry-max-retries retry-initial-backoff-ms
retry-max-backoff-ms retry-backoff-multiplier retry-jitter-factor disable-retries cb-failure-threshold
cb-success-threshold cb-timeout-duration-secs cb-window-duration-secs disable-circuit-breaker
health-failure-threshold health-success-threshold health-check-timeout-secs health-check-interval-secs
health-check-endpoint max-concurrent-requests queue-size queue-timeout-secs rate-limit-tokens-per-second
cors-allowed-origins
"""
VLLM_ROUTER = _NAMES.split()


@pytest.mark.parametrize("name", VLLM_ROUTER)
def test_every_flag_of_vllm_router_is_known(name: str) -> None:
    flag = f"--{name}"
    assert sum(flag in known for known in (flags(), WITHOUT_EFFECT, REFUSED)) == 1


def test_every_setting_has_a_flag_of_its_own_path() -> None:
    known = flags()
    for leaf in leaves().values():
        assert known[leaf.flag].path == leaf.path


def test_harmless_values_belong_to_refused_flags() -> None:
    assert set(HARMLESS) <= set(REFUSED)
