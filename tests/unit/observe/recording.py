"""A decision log of some events, written by a real recorder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from tidegate.observe.recorder import FORMAT, Header, Recorder
from tidegate.policy.params import CoreParams
from tidegate.policy.scheduler import Scheduler
from tidegate.types import (
    AnyEvent,
    ReplicaAdded,
    ReplicaHealth,
    RequestArrived,
    RequestEnded,
    SessionFinished,
    Tick,
)


def header(**changes: Any) -> Header:
    values: dict[str, Any] = {
        "tidegate": "0",
        "format": FORMAT,
        "policy": "sticky_least_loaded",
        "seed": 3,
        "params": msgspec.to_builtins(CoreParams()),
    }
    return Header(**{**values, **changes})


def some_events() -> list[AnyEvent]:
    events: list[AnyEvent] = []
    for url in ("http://a", "http://b"):
        events += [
            ReplicaAdded(at_s=0.1, replica=url, kv_capacity_tokens=100_000),
            ReplicaHealth(at_s=0.1, replica=url, usable=True),
        ]
    for number in range(20):
        at_s, session = 0.1 + number / 3, f"s{number % 5}"
        events.append(RequestArrived(at_s=at_s, request=number, session=session, workload="a", prompt_tokens=10))
        events.append(
            RequestEnded(at_s=at_s + 0.05, request=number, outcome="ok", prompt_tokens=10, completion_tokens=number)
        )
        events.append(Tick(at_s=at_s + 0.1))
    return [*events, SessionFinished(at_s=10.0, session="s0")]


def record(path: Path, events: list[AnyEvent], **changes: Any) -> Recorder:
    recorder = Recorder(path, header(**changes), flush_s=0.01)
    scheduler = Scheduler("sticky_least_loaded", seed=3)
    for event in events:
        recorder.record(event, scheduler.handle(event))
    recorder.close()
    return recorder


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]
