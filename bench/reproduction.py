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
from pathlib import Path

import msgspec
from series import between_markers, read, run_all

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
    rows += run_all(arguments.out, missing, run_case, arguments.processes)
    tables = "\n".join(text for plan in plans if (text := markdown(plan, rows)))
    print(tables)
    if arguments.into:
        arguments.into.write_text(between_markers(arguments.into.read_text(), BEGIN, END, tables))


def run_case(case_and_seed: tuple[Case, int]) -> Row:
    case, seed = case_and_seed
    found = row(run_job(case.job(seed)), None)
    return msgspec.structs.replace(found, policy=case.policy) if case.policy == UNBOUNDED else found


if __name__ == "__main__":
    main()
