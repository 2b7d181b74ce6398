"""The load report that a replica adds to a response: ORCA's `endpoint-load-metrics` header.

    request   endpoint-load-metrics-format: TEXT
    response  endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=2.0
              endpoint-load-metrics: JSON {"named_metrics": {"kv_cache_usage_perc": 0.4, ...}}

A snapshot with each completion, without a scrape. The replica answers it only to requests that ask, so asking adds a
header to relayed requests, and is off unless configured.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from tidegate.engines.base import UNREADABLE
from tidegate.types import ReplicaId, ReplicaSample

RESPONSE_HEADER = b"endpoint-load-metrics"

_KV_USED = ("kv_cache_usage_perc", "kv_cache_utilization")
_WAITING = ("num_requests_waiting",)
_MAX_HEADER_BYTES = 8192  # a report has two to a dozen numbers


class _Report(msgspec.Struct):
    named_metrics: dict[str, float] = {}


def request_header(mode: Literal["off", "text", "json"]) -> tuple[bytes, bytes] | None:
    """What to add to a relayed request."""
    return None if mode == "off" else (b"endpoint-load-metrics-format", mode.upper().encode())


def sample(replica: ReplicaId, at_s: float, value: bytes) -> ReplicaSample | None:
    """The report as a partial sample; None when it tells nothing we know."""
    metrics = _parse(value)
    used = next((metrics[name] for name in _KV_USED if name in metrics), None)
    waiting = next((metrics[name] for name in _WAITING if name in metrics), None)
    if used is None and waiting is None:
        return None
    return ReplicaSample(
        at_s=at_s,
        replica=replica,
        kv_used_fraction=used,
        waiting=None if waiting is None else round(waiting),
    )


def _parse(value: bytes) -> dict[str, float]:
    if len(value) > _MAX_HEADER_BYTES:
        return {}
    form, _, report = value.strip().partition(b" ")
    match form.upper():
        case b"TEXT":
            metrics = _parse_text(report)
        case b"JSON":
            metrics = _parse_json(report)
        case _:
            return {}
    return {name: number for name, number in metrics.items() if math.isfinite(number) and number >= 0}


def _parse_text(report: bytes) -> dict[str, float]:
    metrics = {}
    for pair in report.decode("latin-1").split(","):
        name, _, number = pair.strip().partition("=")
        try:
            metrics[name.removeprefix("named_metrics.")] = float(number)
        except ValueError:
            continue
    return metrics


def _parse_json(report: bytes) -> dict[str, float]:
    try:
        return msgspec.json.decode(report, type=_Report).named_metrics
    except UNREADABLE:
        return {}
