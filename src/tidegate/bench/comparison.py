"""Routers compared over repeats: means with spread, and ratios to the best rival.

Runs are interleaved: repeat i of every router saw the machine at about the same time, so ratios are taken in pairs.
The best rival is the one with the best mean in the same runs, which favours it a little: the largest of several noisy
means is too large on average.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich import box
from rich.table import Table

from tidegate.bench.driver import LoadResult
from tidegate.sim.score import Interval, mean_interval, ratio_interval


class Run(msgspec.Struct, frozen=True, kw_only=True):
    router: str  # "vllm-router" or "tidegate"
    policy: str
    concurrency: int
    repeat: int
    seed: int
    result: LoadResult
    load_before: float = 0.0  # the machine's load average when the run began, replicas idle

    @property
    def name(self) -> str:
        return f"{self.router}:{self.policy}"


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Of one of our policies at one concurrency to a rival's best."""

    policy: str
    concurrency: int
    at_that_concurrency: Interval | None
    rival_there: str
    at_any_concurrency: Interval | None
    rival_anywhere: str


class Comparison:
    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self.names = list(dict.fromkeys(run.name for run in runs))
        self.concurrencies = sorted({run.concurrency for run in runs})

    def contracts(self, name: str, concurrency: int) -> list[float]:
        """Contract rates per minute by repeat."""
        runs = [run for run in self._runs if run.name == name and run.concurrency == concurrency]
        return [run.result.score.contract_per_min for run in sorted(runs, key=lambda run: run.repeat)]

    def ratios(self, ours: str, rivals: str) -> list[Ratio]:
        """Every policy of router `ours` against the best one of router `rivals`."""
        theirs = [
            (name, k)
            for name in self.names
            if name.startswith(f"{rivals}:")
            for k in self.concurrencies
            if self.contracts(name, k)
        ]
        return [
            self._ratio(name, k, theirs)
            for name in self.names
            if name.startswith(f"{ours}:")
            for k in self.concurrencies
            if self.contracts(name, k)
        ]

    def _ratio(self, name: str, concurrency: int, rivals: list[tuple[str, int]]) -> Ratio:
        there = self._best([rival for rival in rivals if rival[1] == concurrency])
        anywhere = self._best(rivals)
        return Ratio(
            policy=name,
            concurrency=concurrency,
            at_that_concurrency=self._against(name, concurrency, there),
            rival_there=there[0] if there else "",
            at_any_concurrency=self._against(name, concurrency, anywhere),
            rival_anywhere=f"{anywhere[0]} at {anywhere[1]}" if anywhere else "",
        )

    def _best(self, rivals: list[tuple[str, int]]) -> tuple[str, int] | None:
        return max(rivals, key=lambda rival: mean_interval(self.contracts(*rival)).mean, default=None)

    def _against(self, name: str, concurrency: int, rival: tuple[str, int] | None) -> Interval | None:
        if rival is None:
            return None
        mine, theirs = self.contracts(name, concurrency), self.contracts(*rival)
        both = min(len(mine), len(theirs))  # an interrupted sweep has pairs only so far
        return ratio_interval(mine[:both], theirs[:both])

    def rates_table(self) -> Table:
        table = Table(title="contract rate /min (lowest..highest), hit rate %", title_justify="left", box=box.SIMPLE)
        table.add_column("router:policy", no_wrap=True)
        for concurrency in self.concurrencies:
            table.add_column(f"{concurrency} in flight", justify="right", no_wrap=True)
        for name in self.names:
            table.add_row(name, *(self._cell(name, concurrency) for concurrency in self.concurrencies))
        return table

    def _cell(self, name: str, concurrency: int) -> str:
        rates = self.contracts(name, concurrency)
        if not rates:
            return ""
        hits = [
            run.result.engine_hit_rate
            for run in self._runs
            if run.name == name and run.concurrency == concurrency and run.result.engine_hit_rate is not None
        ]
        hit = f"{100 * sum(hits) / len(hits):.0f}" if hits else "-"
        spread = f" ({min(rates):.0f}..{max(rates):.0f})" if len(rates) > 1 else ""
        return f"{sum(rates) / len(rates):.1f}{spread} {hit}"

    def ratios_table(self, ours: str, rivals: str) -> Table:
        table = Table(
            title=f"contract rate of {ours} / best of {rivals} (95 % bootstrap interval)",
            title_justify="left",
            box=box.SIMPLE,
        )
        for name in ("policy", "in flight", "best at that concurrency", "ratio", "best at any", "ratio"):
            table.add_column(name, justify="right" if name in ("in flight", "ratio") else "left", no_wrap=True)
        for ratio in self.ratios(ours, rivals):
            table.add_row(
                ratio.policy,
                str(ratio.concurrency),
                ratio.rival_there,
                _interval(ratio.at_that_concurrency),
                ratio.rival_anywhere,
                _interval(ratio.at_any_concurrency),
            )
        return table


def _interval(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.mean:.2f} ({interval.low:.2f}..{interval.high:.2f})"
