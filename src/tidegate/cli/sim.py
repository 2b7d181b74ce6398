"""`tidegate sim`: the production scheduler on a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tidegate.cli.bench import write_json
from tidegate.errors import ConfigError
from tidegate.sim.compare import Row, compare, row, run_all
from tidegate.sim.compare import jobs as planned_jobs
from tidegate.sim.overrides import policy_choice
from tidegate.sim.scenario import Scenario
from tidegate.sim.scenarios import SCENARIOS, from_trace, scenario
from tidegate.sim.tables import comparison_tables

TABLE_COLUMNS = 110  # a table in a pipe must not be cut
DEFAULT_POLICIES = "consistent_hash,sticky_least_loaded,misa_t"


@click.group()
def sim() -> None:
    """Policies on a simulated cluster: before you burn GPU hours, how many rollouts to run, and under which policy.

    A discrete-event simulation runs the scheduler of `tidegate serve`, unchanged, over replicas that page, cache, batch
    and preempt as vLLM does. Same seed, same result.
    """


def _scenario_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--skip-bad", is_flag=True, help="Leave bad lines of the trace out, and say which."),
        click.option("--duration-s", type=click.FloatRange(0, min_open=True), help="Measured time, in model seconds."),
        click.option("--warmup-s", type=click.FloatRange(0), help="Before the measured time."),
        click.option("--replicas", type=click.IntRange(1), help="How many, of the scenario's first kind."),
        click.option("--in-flight", metavar="N[,N]", help="Sessions that the trainer keeps open."),
        click.option(
            "--trace", type=click.Path(dir_okay=False), help="Recorded sessions, on the replicas of `steady`."
        ),
        click.option("--scenario", "names", metavar="NAME[,NAME]", help=f"Of {', '.join(SCENARIOS)}. [steady]"),
    ):
        command = option(command)
    return command


_json_option = click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the rows here.")
_set_option = click.option("--set", "settings", multiple=True, metavar="POLICY.PARAM=VALUE", help="For all policies.")
_processes_option = click.option("--processes", type=click.IntRange(1), help="Default: one a core.")


@sim.command("compare")
@_scenario_options
@click.option(
    "--policies", default=DEFAULT_POLICIES, show_default=True, metavar="P[,P]", help="NAME or NAME:PARAM=VALUE."
)
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Runs of each, seeds 0 to N-1.")
@_set_option
@_processes_option
@_json_option
def compare_command(
    policies: str, seeds: int, settings: tuple[str, ...], processes: int | None, json_path: str | None, **given: Any
) -> None:
    """Policies x scenarios x seeds. The best contract rate stands in bold; raw sessions per minute never rank."""
    choices = [policy_choice(text, settings) for text in policies.split(",")]
    scenarios = _scenarios(**given)
    with _progress("runs") as show:
        rows = compare(scenarios, choices, seeds, processes=processes, progress=show)
    show_rows(rows)
    if json_path is not None:
        write_json(Path(json_path), rows)


@sim.command("run")
@_scenario_options
@click.option("--policy", default="misa_t", show_default=True)
@click.option("--seed", default=0, show_default=True)
@_set_option
@_json_option
def run_command(policy: str, seed: int, settings: tuple[str, ...], json_path: str | None, **given: Any) -> None:
    """One run."""
    choice = policy_choice(policy, settings)
    planned = [msgspec.structs.replace(job, seed=seed) for job in planned_jobs(_scenarios(**given), [choice], seeds=1)]
    with _progress("runs") as show:
        results = run_all(planned, 1, show)
    pairs = list(zip(results[::2], results[1::2], strict=True))  # the unbounded run comes before each
    show_rows([row(result, limit.score.contract_per_min) for limit, result in pairs])
    if json_path is not None:
        write_json(Path(json_path), [result for _, result in pairs])


def _scenarios(
    names: str | None,
    trace: str | None,
    in_flight: str | None,
    replicas: int | None,
    warmup_s: float | None,
    duration_s: float | None,
    skip_bad: bool,
) -> list[Scenario]:
    if names and trace:
        raise ConfigError("give --scenario or --trace, not both", reason="invalid_setting")
    named = (
        [from_trace(Path(trace), skip_bad=skip_bad)] if trace else [scenario(n) for n in (names or "steady").split(",")]
    )
    populations = [int(text) for text in in_flight.split(",")] if in_flight else [None]
    return [_changed(each, n, replicas, warmup_s, duration_s) for each in named for n in populations]


def _changed(
    base: Scenario, in_flight: int | None, replicas: int | None, warmup_s: float | None, duration_s: float | None
) -> Scenario:
    changed = base
    if in_flight is not None:
        changed = msgspec.structs.replace(changed, trainer=msgspec.structs.replace(base.trainer, in_flight=in_flight))
    if replicas is not None:
        spec = msgspec.structs.replace(base.replicas[0], count=replicas)
        changed = msgspec.structs.replace(changed, replicas=(spec,))
    if warmup_s is not None:
        changed = msgspec.structs.replace(changed, warmup_s=warmup_s)
    if duration_s is not None:
        changed = msgspec.structs.replace(changed, duration_s=duration_s)
    return changed


def show_rows(rows: list[Row]) -> None:
    console = Console(width=max(Console().width, TABLE_COLUMNS))
    for table in comparison_tables(rows):
        console.print(table)
    wall_s = sum(each.wall_s for each in rows)
    replica_s = sum(each.simulated_s * each.replicas for each in rows)
    console.print(f"{replica_s:,.0f} replica-seconds simulated in {wall_s:.1f} s of one core", style="dim")


class _progress:
    """A bar on standard error that knows its total when the first run is done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )

    def __enter__(self) -> Callable[[int, int], None]:
        self._progress.__enter__()
        task = self._progress.add_task(self._what, total=None)
        return lambda done, total: self._progress.update(task, completed=done, total=total)

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)
