"""Scores as one table: a row for each policy or run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from tidegate.bench.driver import LoadResult
from tidegate.sim.score import Score

UNKNOWN = "-"


def score_table(results: Mapping[str, LoadResult], classes: Sequence[str], *, title: str, first: str) -> Table:
    table = Table(title=title, caption=_caption(results), box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.header_style = "dim"
    table.title_justify = table.caption_justify = "left"
    table.add_column(first, no_wrap=True)
    table.add_column("contract\n/min", justify="right", style="bold", no_wrap=True)
    for workload in classes:
        table.add_column(f"{workload}\n/min", justify="right", no_wrap=True)
    for name in ("TV\npp", "hit\n%", "recom-\nputed", "pre-\nempt", "hold s\np50/p95"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, result in results.items():
        table.add_row(name, *_cells(result.score, classes))
    return table


def _cells(score: Score, classes: Sequence[str]) -> list[str]:
    hold = UNKNOWN if score.hold_p50_s is None else f"{score.hold_p50_s:.0f}/{_number(score.hold_p95_s, '.0f')}"
    return [
        f"{score.contract_per_min:.1f}",
        *(f"{score.sessions_per_min.get(workload, 0.0):.1f}" for workload in classes),
        _number(score.tv_pp, ".1f"),
        UNKNOWN if score.hit_rate is None else f"{100 * score.hit_rate:.0f}",
        UNKNOWN if score.recomputed_prompt_tokens is None else _short(score.recomputed_prompt_tokens),
        _number(score.preemptions, ",d"),
        hold,
    ]


def _short(tokens: int) -> str:
    if tokens < 10_000:
        return f"{tokens:,}"
    return f"{tokens / 1000:,.0f}k" if tokens < 10_000_000 else f"{tokens / 1e6:,.1f}M"


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def _caption(results: Mapping[str, LoadResult]) -> str:
    """What a reader needs to judge the figures: how long, in whose time, and whether the driver was in the way."""
    parts = []
    lengths = [r.score.window_s for r in results.values()]
    if lengths:
        parts.append(f"window {min(lengths):.0f} s")
    residencies = [r.score.window_residencies for r in results.values() if r.score.window_residencies]
    if residencies:
        parts.append(f"{min(residencies):.1f} or more mean session residencies")
    scales = {r.time_scale for r in results.values()}
    if scales - {1.0}:
        parts.append(f"model time, {'/'.join(f'{s:g}' for s in sorted(scales))} x wall time")
    failed = sum(r.score.failed for r in results.values())
    if failed:
        parts.append(f"{failed} sessions FAILED")
    if results:
        parts.append(f"driver CPU at most {100 * max(r.driver_cpu_share for r in results.values()):.0f} %")
    return ", ".join(parts)
