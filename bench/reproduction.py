#!/usr/bin/env python3
"""The paper's table of rollout scheduling, simulated: every policy and the reference's sweep, for both models.

A run is a file's line as soon as it has ended; runs that the file has are not done again, so an interrupted series
goes on where it was. Prints the tables of docs/reproduction.md.

    .venv/bin/python bench/reproduction.py --seeds 5                       # hours on one core
    .venv/bin/python bench/reproduction.py --seeds 0                       # the tables of what there is
    .venv/bin/python bench/reproduction.py --seeds 0 --into docs/reproduction.md
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import msgspec

from tidegate.bench.reproduction import PLANS, UNBOUNDED, Case, cases, markdown
from tidegate.sim.compare import Row, row, run_job

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", default=",".join(plan.scenario for plan in PLANS))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, seeds 0 to N-1")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "out/reproduction.jsonl", help="rows, one a line")
    parser.add_argument("--into", type=Path, help="write the tables into this file, between its markers")
    arguments = parser.parse_args()
    plans = [plan for plan in PLANS if plan.scenario in arguments.scenarios.split(",")]
    rows = read(arguments.out)
    done = {(each.scenario, each.policy, each.in_flight, each.seed) for each in rows}
    missing = [
        (case, seed)
        for seed in range(arguments.seeds)
        for plan in plans
        for case in cases(plan)
        if (case.scenario, case.policy, case.in_flight, seed) not in done
    ]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run_case, case, seed) for case, seed in missing]):
            rows.append(future.result())
            with arguments.out.open("ab") as file:
                file.write(msgspec.json.encode(rows[-1]) + b"\n")
            print(f"{len(rows) - len(done)}/{len(missing)} {describe(rows[-1])}", flush=True)
    tables = "\n".join(text for plan in plans if (text := markdown(plan, rows)))
    print(tables)
    if arguments.into:
        arguments.into.write_text(between_markers(arguments.into.read_text(), tables))


def run_case(case: Case, seed: int) -> Row:
    found = row(run_job(case.job(seed)), None)
    return msgspec.structs.replace(found, policy=case.policy) if case.policy == UNBOUNDED else found


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Row) for line in path.read_bytes().splitlines()]


def between_markers(text: str, tables: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"no {BEGIN.strip()} and {END.strip()} to write between")
    return f"{before}{begin}\n{tables}\n{end}{after}"


def describe(each: Row) -> str:
    return (
        f"{each.scenario} {each.policy} at {each.in_flight}, seed {each.seed}: {each.total_per_min:.1f} sessions/min, "
        f"contract {each.contract_per_min:.1f}/min, hit {100 * (each.hit_rate or 0):.1f} %, {each.wall_s:.0f} s"
    )


if __name__ == "__main__":
    main()
