"""The workload of recorded sessions: each class as recorded, in the mixture in which it was recorded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tidegate.sim.formats import read_sessions
from tidegate.sim.traces import Trace, TraceSession
from tidegate.sim.workload import SessionSource, Workload, normalised
from tidegate.sim.workload_names import WorkloadOptions
from tidegate.sim.workload_sources import TraceReplay, TraceScale, linear_map
from tidegate.types import WorkloadClass


def recorded_workload(options: WorkloadOptions) -> Workload:
    """Lengths and gaps as they stand; a session is cut where it would pass `options.context_tokens`."""
    trace = read_sessions(Path(options.trace), skip_bad=options.skip_bad)
    scale = TraceScale(prompt=linear_map(1.0), output=linear_map(1.0), limit_tokens=options.context_tokens)
    by_class: dict[WorkloadClass, list[TraceSession]] = {}
    for session in trace.sessions:
        by_class.setdefault(session.workload, []).append(session)
    sources: dict[WorkloadClass, SessionSource] = {
        workload: TraceReplay(workload, sessions, scale, seed=options.seed) for workload, sessions in by_class.items()
    }
    counts = Counter(session.workload for session in trace.sessions)
    shares = options.shares or normalised(counts)
    return Workload(name=Path(options.trace).name, shares=normalised(shares), sources=sources, skipped=trace.skipped)


def longest_context(trace: Trace) -> int:
    return max(turn.prompt_tokens + turn.output_tokens for session in trace.sessions for turn in session.turns)
