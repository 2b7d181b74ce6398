"""The simulator against the engines that it stands for: the same sessions under the same policy, live and simulated.

Two figures are compared, both from the engines' own counters over the window:
- throughput: generated tokens per second, simulated / live. The best sampled of all rates: a window holds thousands
  of tokens and, where memory is short, hardly a session;
- hit rate: cached / prompt tokens, simulated - live, in percentage points.

A cell is one policy at one concurrency, its repeats are runs with a seed of their own. Live run and simulated run of
one repeat have the same seed, so the same sessions; they are compared in pairs. The limits hold for the mean over
repeats; least and greatest are shown, since two or three repeats carry no interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec
from rich import box
from rich.table import Table

THROUGHPUT_LIMIT = 0.15  # |ratio - 1|
HIT_LIMIT_POINTS = 5.0


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """One run's window."""

    generated_tokens_per_s: float
    hit_rate: float | None  # None: no prompt was answered
    sessions_per_min: float
    preemptions: int | None = None


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    concurrency: int
    repeat: int
    seed: int
    live: Observed
    simulated: Observed
    load_before: float = 0.0  # the machine's load average when the live run began, engines idle
    driver_cpu_share: float = 0.0
    errors: dict[str, int] = {}


class Spread(msgspec.Struct, frozen=True):
    """Over repeats."""

    mean: float
    least: float
    greatest: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    concurrency: int
    repeats: int
    live_tokens_per_s: float
    throughput_ratio: Spread | None  # simulated / live; None: nothing was generated live
    live_hit_rate: float | None
    hit_difference_points: Spread | None  # simulated - live; None: a rate is unknown
    throughput_within: bool
    hit_within: bool


def verdicts(pairs: Sequence[Pair]) -> list[Verdict]:
    """One for each cell, in the order in which cells first appear."""
    cells: dict[tuple[str, int], list[Pair]] = {}
    for pair in pairs:
        cells.setdefault((pair.policy, pair.concurrency), []).append(pair)
    return [_verdict(cell) for cell in cells.values()]


def _verdict(cell: Sequence[Pair]) -> Verdict:
    ratio = _ratio(cell)
    difference = _difference(cell)
    hits = [pair.live.hit_rate for pair in cell if pair.live.hit_rate is not None]
    return Verdict(
        policy=cell[0].policy,
        concurrency=cell[0].concurrency,
        repeats=len(cell),
        live_tokens_per_s=fmean(pair.live.generated_tokens_per_s for pair in cell),
        throughput_ratio=ratio,
        live_hit_rate=fmean(hits) if hits else None,
        hit_difference_points=difference,
        throughput_within=ratio is not None and abs(ratio.mean - 1.0) <= THROUGHPUT_LIMIT,
        hit_within=difference is not None and abs(difference.mean) <= HIT_LIMIT_POINTS,
    )


def _ratio(cell: Sequence[Pair]) -> Spread | None:
    """The mean is the ratio of sums: a slow repeat must not count more than a fast one."""
    live = [pair.live.generated_tokens_per_s for pair in cell]
    simulated = [pair.simulated.generated_tokens_per_s for pair in cell]
    if min(live) <= 0.0:
        return None
    each = [ours / theirs for ours, theirs in zip(simulated, live, strict=True)]
    return Spread(sum(simulated) / sum(live), min(each), max(each))


def _difference(cell: Sequence[Pair]) -> Spread | None:
    each = [
        100.0 * (pair.simulated.hit_rate - pair.live.hit_rate)
        for pair in cell
        if pair.simulated.hit_rate is not None and pair.live.hit_rate is not None
    ]
    return Spread(fmean(each), min(each), max(each)) if len(each) == len(cell) else None


def validity_table(found: Sequence[Verdict]) -> Table:
    table = Table(
        title="simulated against live (mean, least..greatest over repeats)", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("policy", no_wrap=True)
    table.add_column("in flight", justify="right")
    table.add_column("repeats", justify="right")
    table.add_column("live tokens/s", justify="right")
    table.add_column("throughput ratio", justify="right", no_wrap=True)
    table.add_column(f"within {100 * THROUGHPUT_LIMIT:.0f} %")
    table.add_column("live hit %", justify="right")
    table.add_column("hit difference, points", justify="right", no_wrap=True)
    table.add_column(f"within {HIT_LIMIT_POINTS:.0f}")
    for each in found:
        table.add_row(
            each.policy,
            str(each.concurrency),
            str(each.repeats),
            f"{each.live_tokens_per_s:.1f}",
            _spread(each.throughput_ratio, ".2f"),
            _word(each.throughput_within),
            "-" if each.live_hit_rate is None else f"{100 * each.live_hit_rate:.0f}",
            _spread(each.hit_difference_points, "+.1f"),
            _word(each.hit_within),
        )
    return table


def _spread(spread: Spread | None, form: str) -> str:
    return "-" if spread is None else f"{spread.mean:{form}} ({spread.least:{form}}..{spread.greatest:{form}})"


def _word(within: bool) -> str:
    return "yes" if within else "[bold]no[/]"
