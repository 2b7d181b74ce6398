"""Decisions per second of the core at (8, 64, 256) replicas x (1k, 10k, 100k) live sessions, and memory per session.

    python bench/scheduler.py [--policy misa_t] [--json FILE] [--quick] [--bytecodes]

Two operations, each with the control steps that fall into it left out and timed on their own:

- turn: a continuation arrives and ends (two events);
- admit: a new session's request arrives and ends, and the session is finished (three events).

Figures are of CPU time of this one thread: the median over interleaved repeats, and their spread (min-max). With more
sessions than a cache holds, most of the growth is its misses. `--bytecodes` counts what the interpreter executes, the
same on every machine and under any load: what grows there grows by the algorithm. (Not on a compiled build.)
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from time import process_time
from types import FrameType

from rich.console import Console
from rich.table import Table

from tidegate.policy import policies
from tidegate.policy.scheduler import Scheduler
from tidegate.types import (
    Place,
    ReplicaAdded,
    ReplicaSample,
    RequestArrived,
    RequestEnded,
    SessionFinished,
    Tick,
)

REPLICAS = (8, 64, 256)
SESSIONS = (1_000, 10_000, 100_000)
CLASSES = ("agentic", "rlvr", "rlhf")
PROMPT_TOKENS = 2_000
TURN_TOKENS = 50


class Loaded:
    """A scheduler with live sessions, far from its limits, and room for more."""

    def __init__(self, policy: str, replicas: int, sessions: int) -> None:
        self.scheduler = Scheduler(policy)
        self.urls = [f"http://replica-{i}:8000" for i in range(replicas)]
        self.sessions = sessions
        self.request = 0
        self.now_s = 0.0
        self.new = 0
        capacity = max(50_000_000, 20 * PROMPT_TOKENS * sessions // replicas)
        for url in self.urls:
            self.scheduler.handle(ReplicaAdded(at_s=0.0, replica=url, kv_capacity_tokens=capacity))
        self.step()
        self.teach()
        for i in range(sessions):
            self.turn(i, 0)
            if i % 5_000 == 0:
                self.step()
        self.step()

    def teach(self) -> None:
        """Some sessions of each class that ended: what it is like is known."""
        for _ in range(60):
            self.admit()
            self.step()

    def step(self) -> None:
        self.now_s += 1.0
        for url in self.urls:
            self.scheduler.handle(ReplicaSample(at_s=self.now_s, replica=url, waiting=0))
        self.scheduler.handle(Tick(at_s=self.now_s))

    def turn(self, session: int, turns: int) -> None:
        self.request += 1
        tokens = PROMPT_TOKENS + turns * TURN_TOKENS
        handle = self.scheduler.handle
        decisions = handle(
            RequestArrived(
                at_s=self.now_s,
                request=self.request,
                session=f"session-{session}",
                workload=CLASSES[session % 3],
                prompt_tokens=tokens,
            )
        )
        if not isinstance(decisions[-1], Place):
            raise RuntimeError(f"not placed: {decisions[-1]}")
        handle(
            RequestEnded(
                at_s=self.now_s, request=self.request, outcome="ok", prompt_tokens=tokens, completion_tokens=TURN_TOKENS
            )
        )

    def admit(self) -> None:
        self.new += 1
        self.turn(-self.new, 0)
        self.scheduler.handle(SessionFinished(at_s=self.now_s, session=f"session-{-self.new}"))

    def time_turns_us(self, count: int) -> float:
        stride = max(1, self.sessions // count)
        started = process_time()
        for i in range(count):
            self.turn(i * stride % self.sessions, 1)
        return (process_time() - started) / count * 1e6

    def time_admits_us(self, count: int) -> float:
        started = process_time()
        for _ in range(count):
            self.admit()
        return (process_time() - started) / count * 1e6

    def time_step_ms(self) -> float:
        self.now_s += 1.0
        started = process_time()
        self.scheduler.handle(Tick(at_s=self.now_s))
        return (process_time() - started) * 1e3


def bytecodes(operation: Callable[[], object]) -> int:
    """Executed by the interpreter during the operation."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(before)
    return count


def show_bytecodes(policy: str, count: int = 200) -> None:
    table = Table(title=f"Scheduler, policy {policy}: bytecodes")
    for name in ("replicas", "live sessions", "a turn", "an admission and finish"):
        table.add_column(name, justify="right")
    for replicas in (REPLICAS[0], REPLICAS[-1]):
        for sessions in (SESSIONS[0], SESSIONS[-1]):
            pool = Loaded(policy, replicas, sessions)
            turn = bytecodes(lambda pool=pool: pool.time_turns_us(count)) / count  # type: ignore[misc]
            admit = bytecodes(lambda pool=pool: pool.time_admits_us(count)) / count  # type: ignore[misc]
            table.add_row(str(replicas), f"{sessions:,}", f"{turn:,.0f}", f"{admit:,.0f}")
    Console(width=130).print(table)


def bytes_per_session(policy: str, sessions: int) -> float:
    gc.collect()
    tracemalloc.start()
    small = Loaded(policy, 8, 1_000)
    before = tracemalloc.get_traced_memory()[0]
    for i in range(1_000, 1_000 + sessions):
        small.turn(i, 0)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return grown / sessions


def measure(policy: str, replicas: tuple[int, ...], sessions: tuple[int, ...], count: int, repeats: int) -> list[dict]:
    loaded = {(r, s): Loaded(policy, r, s) for r in replicas for s in sessions}
    gc.collect()
    gc.freeze()
    found: dict[tuple[int, int], dict[str, list[float]]] = {
        key: {"turn_us": [], "admit_us": [], "step_ms": []} for key in loaded
    }
    for _ in range(repeats):
        for key, pool in loaded.items():
            found[key]["turn_us"].append(pool.time_turns_us(count))
            found[key]["admit_us"].append(pool.time_admits_us(count))
            found[key]["step_ms"].append(pool.time_step_ms())
    gc.unfreeze()
    return [
        {"replicas": r, "sessions": s}
        | {name: {"median": statistics.median(v), "min": min(v), "max": max(v)} for name, v in figures.items()}
        for (r, s), figures in found.items()
    ]


def show(policy: str, rows: list[dict], memory_bytes: float) -> None:
    table = Table(title=f"Scheduler, policy {policy}: median (min-max); {memory_bytes:.0f} bytes per live session")
    for name in ("replicas", "live sessions", "turn us", "turns/s", "admit + finish us", "admits/s", "control step ms"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [
            f"{row[name]['median']:.1f} ({row[name]['min']:.1f}-{row[name]['max']:.1f})"
            for name in ("turn_us", "admit_us", "step_ms")
        ]
        rates = [f"{1e6 / row[name]['median']:,.0f}" for name in ("turn_us", "admit_us")]
        table.add_row(str(row["replicas"]), f"{row['sessions']:,}", cells[0], rates[0], cells[1], rates[1], cells[2])
    Console(width=130).print(table)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="misa_t", choices=list(policies()))
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--quick", action="store_true", help="two small sizes, to see that it works")
    parser.add_argument("--bytecodes", action="store_true", help="count bytecodes instead of time")
    arguments = parser.parse_args(argv)
    if arguments.bytecodes:
        show_bytecodes(arguments.policy)
        return
    replicas, sessions = (REPLICAS[:2], SESSIONS[:2]) if arguments.quick else (REPLICAS, SESSIONS)
    rows = measure(arguments.policy, replicas, sessions, count=500 if arguments.quick else 3_000, repeats=5)
    memory_bytes = bytes_per_session(arguments.policy, 2_000 if arguments.quick else 20_000)
    show(arguments.policy, rows, memory_bytes)
    if arguments.json:
        result = {"policy": arguments.policy, "bytes_per_session": memory_bytes, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
