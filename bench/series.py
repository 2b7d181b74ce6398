"""Simulated runs in a file, a row a line: what the file has is not run again, so an interrupted series goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import msgspec

from tidegate.sim.compare import Row

C = TypeVar("C")


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Row) for line in path.read_bytes().splitlines()]


def run_all(path: Path, cases: Sequence[C], run_case: Callable[[C], Row], processes: int) -> Iterator[Row]:
    """Rows in the order in which they end; each is in the file when it is given out. `run_case` is a module's
    function: the processes are spawned."""
    if not cases:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for number, future in enumerate(as_completed([pool.submit(run_case, case) for case in cases]), start=1):
            row = future.result()
            with path.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
            print(f"{number}/{len(cases)} {describe(row)}", flush=True)
            yield row


def describe(row: Row) -> str:
    return (
        f"{row.scenario} {row.policy} at {row.in_flight}, seed {row.seed}: {row.total_per_min:.1f} sessions/min, "
        f"contract {row.contract_per_min:.1f}/min, hit {100 * (row.hit_rate or 0):.1f} %, {row.wall_s:.0f} s"
    )


def between_markers(text: str, begin: str, end: str, tables: str) -> str:
    before, begin, rest = text.partition(begin)
    _, end, after = rest.partition(end)
    if not begin or not end:
        raise SystemExit("the file has no markers to write between")
    return f"{before}{begin}\n{tables}\n{end}{after}"
