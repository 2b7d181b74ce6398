"""The trainer's side of the gate: what a trainer imports. It loads nothing of the server.

RolloutScheduler (scheduler.py) and what it hands out. The parts: slots (whose turn it is; pure), limiter (waiting for a
slot), feed (the advice), courier (sessions told to the gate), pausing, driver (`run`), gate_api (HTTP), progress.
"""

from tidegate.client.driver import Outcome, Rollout
from tidegate.client.errors import ClientError, GateError, GateRefused, GateUnreachable, SchedulerClosed
from tidegate.client.scheduler import RolloutScheduler
from tidegate.client.session import Session
from tidegate.client.stats import ClassStats, Stats

__all__ = [
    "ClassStats",
    "ClientError",
    "GateError",
    "GateRefused",
    "GateUnreachable",
    "Outcome",
    "Rollout",
    "RolloutScheduler",
    "SchedulerClosed",
    "Session",
    "Stats",
]
