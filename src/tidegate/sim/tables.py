"""Comparisons as terminal tables: a row for each policy, the best contract rate of a scenario in bold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

from tidegate.sim.compare import Row, Summary, summaries

UNKNOWN = "-"


def comparison_tables(rows: Iterable[Row]) -> list[Table]:
    groups: dict[tuple[str, int], list[Summary]] = {}
    for summary in summaries(rows):
        groups.setdefault((summary.scenario, summary.in_flight), []).append(summary)
    return [_table(*key, group) for key, group in groups.items()]


def _table(scenario: str, in_flight: int, group: Sequence[Summary]) -> Table:
    table = Table(
        title=f"{scenario}, {in_flight} sessions in flight, {group[0].seeds} seeds (mean, 95 % interval)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("policy", no_wrap=True)
    for name in ("contract\n/min", "interval", "effi-\nciency", "hit\n%", "recom-\nputed %", "TV\npp", "pre-\nempt"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("hold\np95 s", justify="right", no_wrap=True)
    table.add_column("raw\n/min", justify="right", no_wrap=True, style="dim")
    best = max(summary.contract_per_min.mean for summary in group)
    for summary in group:
        style = "bold" if summary.contract_per_min.mean == best else None
        table.add_row(summary.policy, *_cells(summary), style=style)
    return table


def _cells(summary: Summary) -> list[str]:
    rate = summary.contract_per_min
    return [
        f"{rate.mean:.1f}",
        f"{rate.low:.1f}..{rate.high:.1f}",
        number(summary.efficiency, ".2f"),
        percent(summary.hit_rate),
        percent(summary.recomputed_prompt_share),
        number(summary.tv_pp, ".1f"),
        number(summary.preemptions, ".0f"),
        number(summary.hold_p95_s, ".1f"),
        f"{summary.total_per_min:.1f}",
    ]


def number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f}"
