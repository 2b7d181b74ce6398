"""GET /state: the whole gate in one JSON document, for operators, `tidegate top` and tests. Keys carry their units.

`sessions`, `requests`, `policy`, `epoch`, `replicas` and `classes` keep their shape; more keys may come.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidegate import __version__
from tidegate.engines.plugin import SWITCHED_OFF
from tidegate.observe.metrics import Snapshot
from tidegate.types import PoolView

HOLDS_SHOWN = 50  # of the longest; the counts are complete
FAILED_TICKS = 3  # in a row: not one bad event, which the next tick gets over


def document(snapshot: Snapshot, estimates: dict[str, Any], holds: list[dict[str, Any]]) -> dict[str, Any]:
    view, replicas = snapshot.view, _replicas(snapshot)
    return {
        "version": __version__,
        "uptime_s": round(snapshot.uptime_s, 3),
        "policy": view.policy,
        "epoch": view.epoch,
        "paused": view.paused,
        "sessions": {"live": view.live, "held": view.held, "paused": view.paused_sessions},
        "requests": {
            "in_flight": view.in_flight,
            "waiting": view.waiting,
            "passing": snapshot.passing,
            "connections": snapshot.listener.connections,
        },
        "replicas": [replica for replica in replicas if "health" in replica],
        "leaving": [replica for replica in replicas if "health" not in replica],  # removed; their sessions are not over
        "classes": {name: msgspec.to_builtins(klass) for name, klass in view.classes.items()},
        "advice": msgspec.to_builtins(snapshot.advice),
        "alarms": list(snapshot.alarms),
        "estimates": estimates,
        "holds": sorted(holds, key=lambda hold: -hold["waited_s"])[:HOLDS_SHOWN],
        "inferred": snapshot.inferred and msgspec.to_builtins(snapshot.inferred),
        "record": _record(snapshot),
    }


def _replicas(snapshot: Snapshot) -> list[dict[str, Any]]:
    monitors = {monitor.url: monitor for monitor in snapshot.monitors}
    replicas = []
    for view in snapshot.view.replicas:
        replica: dict[str, Any] = msgspec.to_builtins(view)
        monitor = monitors.get(view.url)
        if monitor is not None:
            health = msgspec.to_builtins(monitor)
            replica["health"] = {
                key: health[key]
                for key in ("state", "reason", "since_s", "last_error", "engine", "engine_paused", "sample_age_s")
            }
            replica["plugin"] = msgspec.to_builtins(snapshot.plugins.get(view.url, SWITCHED_OFF))
        replicas.append(replica)
    return replicas


def _record(snapshot: Snapshot) -> dict[str, int] | None:
    recorder = snapshot.recorder
    if recorder is None:
        return None
    return {"written": recorder.written, "dropped": recorder.dropped, "waiting": recorder.waiting}


def readiness(view: PoolView, failed_ticks: int = 0) -> dict[str, Any]:
    """Whether any replica may take requests, in vllm-router's shape, with the reasons of those that may not. A gate
    whose ticks fail is not ready whatever its replicas are: it may let nobody in, and should be started anew."""
    listed = [replica for replica in view.replicas if replica.reason != "removed"]
    ready = [replica for replica in listed if replica.ready]
    return {
        "status": "ready" if ready and failed_ticks < FAILED_TICKS else "not_ready",
        "healthy_workers": len(ready),
        "total_workers": len(listed),
        "reasons": {replica.url: replica.reason for replica in listed if not replica.ready}
        | ({"gate": "failed_ticks"} if failed_ticks >= FAILED_TICKS else {}),
    }
