#!/usr/bin/env python3
"""Which policy should be the default: working_set and misa_t in every scenario, beside the best cap of hindsight.

The cap is swept with the seeds of `--sweep-seeds`; the best one by mean contract rate and its two neighbours then run
with all seeds, and the best of these is what the policies are held against, seed by seed on the same sessions. A run
is a file's line as soon as it has ended; runs that the file has are not done again.

    .venv/bin/python bench/default_policy.py --seeds 5 --processes 2    # some 26 min on two cores, compiled
    .venv/bin/python bench/default_policy.py --seeds 0                  # the table of what there is
    .venv/bin/python bench/default_policy.py --seeds 0 --into docs/default-policy.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from series import between_markers, read, run_all

from tidegate.sim.compare import Job, Row, row, run_job
from tidegate.sim.overrides import policy_choice
from tidegate.sim.run import UNBOUNDED_POLICY, unbounded
from tidegate.sim.scenarios import SCENARIOS, scenario
from tidegate.sim.score import Interval, ratio_interval

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
UNBOUNDED = "unbounded KV"
POLICIES = ("misa_t", "working_set")
CAPS = (8, 12, 16, 20, 24, 28, 32, 40, 48, 64)  # live sessions a replica
CAPS_OF: dict[str, tuple[int, ...]] = {
    "small-kv": (2, 3, 4, 6, 8, 11, 14, 16),
    "heterogeneous": (8, 12, 16, 20, 24, 32, 40, 48, 64),
    "paper-qwen": (38, 48, 64, 80, 96, 112, 128, 160),
    "paper-step": (91, 128, 160, 192, 224, 256, 320),
    "vllm-cpu": (2, 3, 4, 5, 6, 7, 8, 10),
}


class Case(msgspec.Struct, frozen=True):
    scenario: str
    policy: str
    seed: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--seeds", type=int, default=5, help="runs of each, seeds 0 to N-1")
    parser.add_argument("--sweep-seeds", type=int, default=2, help="of them, for every cap")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "out/default_policy.jsonl", help="rows, one a line")
    parser.add_argument("--into", type=Path, help="write the table into this file, between its markers")
    arguments = parser.parse_args()
    names = arguments.scenarios.split(",")
    rows = read(arguments.out)
    if arguments.seeds:
        sweep = range(min(arguments.seeds, arguments.sweep_seeds))
        rows += run_all(arguments.out, missing(rows, swept(names, sweep)), run_case, arguments.processes)
        wanted = list(compared(rows, names, range(arguments.seeds)))
        rows += run_all(arguments.out, missing(rows, wanted), run_case, arguments.processes)
    table = markdown(rows, names)
    print(table)
    if arguments.into:
        arguments.into.write_text(between_markers(arguments.into.read_text(), BEGIN, END, table))


def missing(rows: Sequence[Row], cases: Sequence[Case] | Iterator[Case]) -> list[Case]:
    done = {(row.scenario, row.policy, row.seed) for row in rows}
    return [case for case in cases if (case.scenario, case.policy, case.seed) not in done]


def swept(names: Sequence[str], seeds: range) -> Iterator[Case]:
    for name in names:
        for cap in CAPS_OF.get(name, CAPS):
            for seed in seeds:
                yield Case(name, cap_policy(cap), seed)


def compared(rows: Sequence[Row], names: Sequence[str], seeds: range) -> Iterator[Case]:
    for name in names:
        caps = CAPS_OF.get(name, CAPS)
        rates = [mean_rate(rows, name, cap_policy(cap)) for cap in caps]
        best = rates.index(max(rates))
        near = [cap_policy(cap) for cap in caps[max(0, best - 1) : best + 2]]
        for policy in (*near, *POLICIES, UNBOUNDED):
            for seed in seeds:
                yield Case(name, policy, seed)


def cap_policy(cap: int) -> str:
    return f"static_cap:cap={cap}"


def run_case(case: Case) -> Row:
    base = scenario(case.scenario)
    if case.policy == UNBOUNDED:
        job = Job(unbounded(base), policy_choice(UNBOUNDED_POLICY), case.seed, unbounded=True)
    else:
        job = Job(base, policy_choice(case.policy), case.seed)
    return msgspec.structs.replace(row(run_job(job), None), scenario=case.scenario, policy=case.policy)


# --- the table ----------------------------------------------------------------------------------------------------
def of(rows: Sequence[Row], name: str, policy: str) -> list[Row]:
    return sorted((r for r in rows if (r.scenario, r.policy) == (name, policy)), key=lambda r: r.seed)


def mean_rate(rows: Sequence[Row], name: str, policy: str) -> float:
    found = of(rows, name, policy)
    return fmean(r.contract_per_min for r in found) if found else 0.0


def markdown(rows: Sequence[Row], names: Sequence[str]) -> str:
    columns = [
        *("scenario", "seeds", "best cap", "working_set to it", "working_set to misa_t"),
        *(f"{each}: cap / misa_t / working_set" for each in ("efficiency", "recomputed", "TV [pp]")),
        "working_set: p95 of held calls [s]",
    ]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [line for name in names if (line := table_line(rows, name))]
    return "\n".join(lines) + "\n"


def table_line(rows: Sequence[Row], name: str) -> str:
    ours = of(rows, name, "working_set")
    if not ours:
        return ""
    caps = [cap_policy(cap) for cap in CAPS_OF.get(name, CAPS)]
    complete = [policy for policy in caps if len(of(rows, name, policy)) >= len(ours)]
    best = max(complete, key=lambda policy: mean_rate(rows, name, policy))
    cap = int(best.rpartition("=")[2])
    every = cap * ours[0].replicas >= ours[0].in_flight
    edge = " (all sessions)" if every else " (edge of the sweep)" if best in (caps[0], caps[-1]) else ""
    trio = [of(rows, name, best), of(rows, name, "misa_t"), ours]
    limits = of(rows, name, UNBOUNDED)
    efficiency = " / ".join(f"{ratio(each, limits).mean:.2f}" if limits else "-" for each in trio)
    recomputed = " / ".join(f"{100 * fmean(r.recomputed_prompt_share or 0.0 for r in each):.1f} %" for each in trio)
    distance = " / ".join(f"{fmean(r.tv_pp or 0.0 for r in each):.1f}" for each in trio)
    classes = sorted({workload for r in ours for workload in r.hold_p95_by_class_s})
    holds = (
        ", ".join(f"{c} {fmean(r.hold_p95_by_class_s.get(c, 0.0) for r in ours):.0f}" for c in classes) or "none held"
    )
    cells = [name, str(len(ours)), f"{cap}{edge}", interval(ratio(ours, trio[0]))]
    cells += [interval(ratio(ours, trio[1])), efficiency, recomputed, distance, holds]
    return f"| {' | '.join(cells)} |"


def ratio(ours: Sequence[Row], theirs: Sequence[Row]) -> Interval:
    other = {r.seed: r.contract_per_min for r in theirs}
    pairs = [(r.contract_per_min, other[r.seed]) for r in ours if r.seed in other]
    return ratio_interval([pair[0] for pair in pairs], [pair[1] for pair in pairs])


def interval(found: Interval) -> str:
    return f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"


if __name__ == "__main__":
    main()
