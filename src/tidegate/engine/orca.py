"""ORCA load reports: with the request header `endpoint-load-metrics-format: TEXT|JSON`, the response carries
`endpoint-load-metrics`, a snapshot of load without a scrape. vLLM sends it on chat and completions."""

from __future__ import annotations

import msgspec

from tidegate.engine.core import EngineCore
from tidegate.engine.http import Call, ExtraHeaders


def load_header(core: EngineCore, call: Call) -> ExtraHeaders:
    wanted = call.headers.get(b"endpoint-load-metrics-format")
    if wanted is None:
        return ()
    metrics = {"kv_cache_usage_perc": core.replica.pool.usage, "num_requests_waiting": float(core.waiting)}
    match wanted.lower():
        case b"text":
            report = "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
        case b"json":
            report = "JSON " + msgspec.json.encode({"named_metrics": metrics}).decode()
        case _:
            return ()
    return ((b"endpoint-load-metrics", report.encode()),)
