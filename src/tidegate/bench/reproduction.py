"""The paper's table of rollout scheduling (arXiv 2608.11152), simulated: which runs it takes, and what they say.

The paper's reference is a cache-aware router whose concurrency was found by a sweep. Static concurrency is the
trainer's: so many sessions in flight per replica, as many as are open at any time. Policies that admit sessions get
`OFFERED` per scenario, more than memory holds.

Two rates: completed sessions per minute, which the paper reports, and the contract rate, which a policy cannot raise by
serving short sessions first. Both as a ratio to the reference of the same seed, so the same sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

import msgspec

from tidegate.sim.compare import Job, Row
from tidegate.sim.overrides import policy_choice
from tidegate.sim.run import UNBOUNDED_POLICY, unbounded
from tidegate.sim.scenarios import scenario
from tidegate.sim.score import Interval, ratio_interval

REFERENCE = "cache_aware"
OFFERED = 768  # sessions in flight
UNBOUNDED = "unbounded KV"  # the policy's name in rows of runs that never evict


class Published(msgspec.Struct, frozen=True):
    """Of one row: sessions per minute against the reference [%], and hit rate [%]."""

    rate_percent: float
    hit_percent: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    scenario: str
    safe_cap: int  # per replica: KV capacity / maximum context
    sweep: tuple[int, ...]  # sessions in flight per replica under the reference
    published: dict[str, Published]


PLANS = (
    Plan(
        scenario="paper-qwen",
        safe_cap=38,
        sweep=(32, 48, 64, 80, 96, 128),
        published={
            "static_cap": Published(-12.2, 95.9),
            REFERENCE: Published(0.0, 92.4),
            "session_admission": Published(19.3, 96.3),
            "misa": Published(30.9, 79.2),
            "misa_t": Published(43.6, 95.3),
            "high": Published(-55.2, 4.5),
        },
    ),
    Plan(
        scenario="paper-step",
        safe_cap=91,
        sweep=(128, 160, 192, 224, 256, 320),
        published={
            "static_cap": Published(-21.7, 97.1),
            REFERENCE: Published(0.0, 95.9),
            "session_admission": Published(11.7, 97.1),
            "misa": Published(23.3, 97.3),
            "misa_t": Published(53.3, 97.8),
        },
    ),
)
ADMITTING = ("session_admission", "misa", "misa_t", "working_set")
NAMES = {
    "static_cap": "static cap, KV capacity / maximum context",
    REFERENCE: "cache_aware, best of the sweep",
    "high": f"cache_aware, {OFFERED} in flight",
}


class Case(msgspec.Struct, frozen=True):
    """One cell of the table, without its seed."""

    scenario: str
    policy: str
    in_flight: int

    def job(self, seed: int) -> Job:
        base = scenario(self.scenario)
        offered = msgspec.structs.replace(base, trainer=msgspec.structs.replace(base.trainer, in_flight=self.in_flight))
        if self.policy == UNBOUNDED:
            return Job(unbounded(offered), policy_choice(UNBOUNDED_POLICY), seed, unbounded=True)
        return Job(offered, policy_choice(self.policy), seed)


def cases(plan: Plan) -> Iterator[Case]:
    for per_replica in plan.sweep:
        yield Case(plan.scenario, REFERENCE, per_replica * scenario(plan.scenario).replica_count)
    for policy in (REFERENCE, _static(plan), *ADMITTING, UNBOUNDED):
        yield Case(plan.scenario, policy, OFFERED)


def _static(plan: Plan) -> str:
    return f"static_cap:cap={plan.safe_cap}"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    seeds: int
    rate: Interval  # sessions per minute, ratio to the reference
    contract: Interval  # contract rate, ratio to the reference
    hit_rate: float
    recomputed_prompt_share: float
    tv_pp: float
    published: Published | None


def best_in_sweep(plan: Plan, rows: Sequence[Row]) -> int:
    """Sessions in flight, by the mean of sessions per minute, which is what the paper tuned for."""
    swept = {case.in_flight for case in cases(plan) if case.policy == REFERENCE and case.in_flight != OFFERED}
    rates = {n: [row.total_per_min for row in _of(rows, plan, REFERENCE, n)] for n in swept}
    return max((n for n in rates if rates[n]), key=lambda n: fmean(rates[n]))


def sweep_lines(plan: Plan, rows: Sequence[Row]) -> list[tuple[int, Line]]:
    """(Sessions in flight per replica, its line) for every point of the sweep."""
    replicas = scenario(plan.scenario).replica_count
    reference = _of(rows, plan, REFERENCE, best_in_sweep(plan, rows))
    return [
        (per_replica, line)
        for per_replica in plan.sweep
        if (line := _line(str(per_replica), _of(rows, plan, REFERENCE, per_replica * replicas), reference, None))
    ]


def table_lines(plan: Plan, rows: Sequence[Row]) -> list[Line]:
    best = best_in_sweep(plan, rows)
    reference = _of(rows, plan, REFERENCE, best)
    wanted = [
        ("static_cap", _static(plan), OFFERED),
        (REFERENCE, REFERENCE, best),
        *((policy, policy, OFFERED) for policy in ADMITTING),
        ("high", REFERENCE, OFFERED),
        (UNBOUNDED, UNBOUNDED, OFFERED),
    ]
    lines = [
        _line(NAMES.get(key, key), _of(rows, plan, policy, in_flight), reference, plan.published.get(key))
        for key, policy, in_flight in wanted
    ]
    return [line for line in lines if line is not None]


def _of(rows: Iterable[Row], plan: Plan, policy: str, in_flight: int) -> list[Row]:
    chosen = [row for row in rows if (row.scenario, row.policy, row.in_flight) == (plan.scenario, policy, in_flight)]
    return sorted(chosen, key=lambda row: row.seed)


def _line(name: str, rows: Sequence[Row], reference: Sequence[Row], published: Published | None) -> Line | None:
    """Over the seeds that both have."""
    seeds = {row.seed for row in rows} & {row.seed for row in reference}
    ours, theirs = ([row for row in part if row.seed in seeds] for part in (rows, reference))
    if not seeds:
        return None
    return Line(
        name=name,
        seeds=len(seeds),
        rate=ratio_interval([row.total_per_min for row in ours], [row.total_per_min for row in theirs]),
        contract=ratio_interval([row.contract_per_min for row in ours], [row.contract_per_min for row in theirs]),
        hit_rate=fmean(row.hit_rate or 0.0 for row in ours),
        recomputed_prompt_share=fmean(row.recomputed_prompt_share or 0.0 for row in ours),
        tv_pp=fmean(row.tv_pp or 0.0 for row in ours),
        published=published,
    )


def markdown(plan: Plan, rows: Sequence[Row]) -> str:
    """Both tables of one scenario; nothing where the sweep has not been run."""
    if not _has_sweep(plan, rows):
        return ""
    columns = (
        *("", "sessions/min, paper", "sessions/min, ours (95 % interval)", "contract rate, ours", "hit, paper"),
        *("hit, ours", "recomputed", "TV, pp", "seeds"),
    )
    parts = [f"### {plan.scenario}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for line in table_lines(plan, rows):
        published = line.published
        rate = "-" if published is None else f"{published.rate_percent:+.1f} %"
        hit = "-" if published is None else f"{published.hit_percent:.1f} %"
        recomputed = f"{100 * line.recomputed_prompt_share:.1f} %"
        parts.append(
            f"| {line.name} | {rate} | {_percent(line.rate)} | {_percent(line.contract)} | {hit} | "
            f"{100 * line.hit_rate:.1f} % | {recomputed} | {line.tv_pp:.1f} | {line.seeds} |"
        )
    parts += [
        "",
        "| in flight per replica | sessions/min | contract rate | hit | recomputed | seeds |",
        "|---|" + "---|" * 5,
    ]
    for per_replica, line in sweep_lines(plan, rows):
        parts.append(
            f"| {per_replica} | {_percent(line.rate)} | {_percent(line.contract)} | {100 * line.hit_rate:.1f} % | "
            f"{100 * line.recomputed_prompt_share:.1f} % | {line.seeds} |"
        )
    return "\n".join(parts) + "\n"


def _has_sweep(plan: Plan, rows: Sequence[Row]) -> bool:
    return any(row.scenario == plan.scenario and row.policy == REFERENCE and row.in_flight != OFFERED for row in rows)


def _percent(ratio: Interval) -> str:
    mean, low, high = (100 * (each - 1) for each in (ratio.mean, ratio.low, ratio.high))
    return f"{mean:+.1f} %" if low == high else f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"
