"""What the commands of `tidegate sim` have in common: options, scenarios from flags, a progress bar, files."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tidegate.errors import ConfigError
from tidegate.observe.recorder import Recorder, log_header
from tidegate.sim.compare import Comparison, Row
from tidegate.sim.gate import Recorder as Record
from tidegate.sim.hardware import PRESETS
from tidegate.sim.latency import LatencyModel
from tidegate.sim.overrides import PolicyChoice
from tidegate.sim.report import report
from tidegate.sim.scenario import ReplicaSpec, Scenario
from tidegate.sim.scenarios import SCENARIOS, from_trace, scenario
from tidegate.sim.tables import comparison_tables
from tidegate.sim.trainer import TrainerSpec

ADVICE_POLL_S = 5.0  # as often as RolloutScheduler asks
# A slip of the keyboard must not fill the memory, or run for ever.
MAX_MODEL_S = 30 * 86_400.0
MAX_KV_TOKENS = 1 << 40
MAX_REPLICAS = 100_000
MAX_SESSIONS = 10_000_000

TABLE_COLUMNS = 110  # a table in a pipe must not be cut

Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the rows here.")
html_option = click.option("--html", "html_path", type=click.Path(dir_okay=False), help="Write a report with plots.")
set_option = click.option("--set", "settings", multiple=True, metavar="POLICY.PARAM=VALUE", help="For all policies.")
processes_option = click.option("--processes", type=click.IntRange(1), help="Default: one a core.")
seeds_option = click.option(
    "--seeds", default=5, show_default=True, type=click.IntRange(1), help="Runs of each, seeds 0 to N-1."
)


def a_number(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is not a number of seconds", context, parameter)
    return value


def scenario_options(command: Command) -> Command:
    options = (
        click.option("--exact", is_flag=True, help="Replicas step by step, block by block: slower, the same results."),
        click.option(
            "--release", "releases", is_flag=True, help="Engines evict ended sessions first, as with the vLLM plugin."
        ),
        click.option("--skip-bad", is_flag=True, help="Leave bad lines of the trace out, and say which."),
        click.option(
            "--duration-s",
            type=click.FloatRange(0, MAX_MODEL_S, min_open=True),
            callback=a_number,
            help="Measured time, in model seconds.",
        ),
        click.option(
            "--warmup-s", type=click.FloatRange(0, MAX_MODEL_S), callback=a_number, help="Before the measured time."
        ),
        click.option("--latency", metavar="PRESET|FILE", help=f"Of {', '.join(PRESETS)}; or what `sim fit` wrote."),
        click.option("--kv-tokens", type=click.IntRange(1, MAX_KV_TOKENS), help="KV capacity of each replica."),
        click.option(
            "--replicas", type=click.IntRange(1, MAX_REPLICAS), help="How many, of the scenario's first kind."
        ),
        click.option("--advised", is_flag=True, help="The trainer follows the gate's advice, up to --in-flight."),
        click.option("--in-flight", metavar="N[,N]", help="Sessions that the trainer keeps open."),
        click.option("--trace", type=click.Path(dir_okay=False), help="Recorded sessions (see `sim convert`)."),
        click.option("--scenario", "names", metavar="NAME[,NAME]", help=f"Of {', '.join(SCENARIOS)}. [steady]"),
    )
    for option in options:
        command = option(command)
    return command


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `scenario_options`."""

    names: str | None
    trace: str | None
    in_flight: str | None
    advised: bool = False
    replicas: int | None
    kv_tokens: int | None
    latency: str | None
    warmup_s: float | None
    duration_s: float | None
    skip_bad: bool
    exact: bool
    releases: bool = False

    def scenarios(self) -> list[Scenario]:
        if self.names and self.trace:
            raise ConfigError("give --scenario or --trace, not both", reason="invalid_setting")
        try:
            return [self._changed(each, n) for each in self._named() for n in self._populations()]
        except ValueError as error:
            raise ConfigError(f"impossible scenario: {error}", reason="invalid_setting") from error

    def _named(self) -> list[Scenario]:
        if self.trace:
            return [from_trace(Path(self.trace), skip_bad=self.skip_bad)]
        return [scenario(name.strip()) for name in (self.names or "steady").split(",")]

    def _populations(self) -> list[int | None]:
        if not self.in_flight:
            return [None]
        numbers = whole_numbers(self.in_flight, "--in-flight")
        return list(numbers)

    def _changed(self, base: Scenario, in_flight: int | None) -> Scenario:
        changes: dict[str, Any] = {"replicas": tuple(self._specs(base)), "trainer": self._trainer(base, in_flight)}
        if self.latency is not None:
            changes["request_s"] = step_times(self.latency).request_s or base.request_s
        if self.warmup_s is not None:
            changes["warmup_s"] = self.warmup_s
        if self.duration_s is not None:
            changes["duration_s"] = self.duration_s
        if self.exact:
            changes["fidelity"] = "exact"
        if self.releases:
            changes["releases"] = True
        return msgspec.structs.replace(base, **changes)

    def _trainer(self, base: Scenario, in_flight: int | None) -> TrainerSpec:
        changes: dict[str, Any] = {} if in_flight is None else {"in_flight": in_flight}
        if self.advised:
            changes["advice_poll_s"] = ADVICE_POLL_S
        try:
            return msgspec.structs.replace(base.trainer, **changes)
        except ValueError as error:
            raise ConfigError(str(error), reason="invalid_setting") from error

    def _specs(self, base: Scenario) -> Iterable[ReplicaSpec]:
        specs = base.replicas
        if self.replicas is not None:
            specs = (msgspec.structs.replace(specs[0], count=self.replicas),)
        for spec in specs:
            config = spec.config
            if self.kv_tokens is not None:
                config = msgspec.structs.replace(config, num_blocks=self.kv_tokens // config.block_size)
            if self.latency is not None:
                config = msgspec.structs.replace(config, latency=step_times(self.latency).latency)
            yield msgspec.structs.replace(spec, config=config)


class StepTimes(msgspec.Struct, frozen=True):
    """Of a file that `sim fit` wrote, what a simulation takes."""

    latency: LatencyModel
    request_s: float | None = None


def step_times(text: str) -> StepTimes:
    """A preset's, or those from a file that `sim fit` wrote."""
    if text in PRESETS:
        return StepTimes(PRESETS[text])
    path = Path(text)
    if not path.exists():
        raise ConfigError(f"no latency preset {text!r}, known: {', '.join(PRESETS)}; and no such file")
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return msgspec.convert(found if "latency" in found else {"latency": found}, StepTimes)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: not a latency model: {error}", reason="invalid_setting") from error


def whole_numbers(text: str, flag: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {error}", reason="invalid_setting") from error
    if min(numbers) < 1 or max(numbers) > MAX_SESSIONS:
        raise ConfigError(f"{flag} {text!r}: at least 1 and at most {MAX_SESSIONS:,}", reason="invalid_setting")
    return numbers


def show_rows(rows: list[Row]) -> None:
    console = wide_console()
    for table in comparison_tables(rows):
        console.print(table)
    wall_s = sum(each.wall_s for each in rows)
    replica_s = sum(each.simulated_s * each.replicas for each in rows)
    console.print(f"{replica_s:,.0f} replica-seconds simulated in {wall_s:.1f} s of one core", style="dim")


def wide_console() -> Console:
    return Console(width=max(Console().width, TABLE_COLUMNS))


def write_json(path: str | None, value: object) -> None:
    if path is not None:
        _write(Path(path), msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


@contextmanager
def recorded(path: Path, choice: PolicyChoice, seed: int) -> Iterator[Record]:
    """The log of one run. Model time does not wait for the disk, so its lines queue without a bound."""
    try:
        log = Recorder(path, log_header(choice.name, seed, choice.params), queue_lines=sys.maxsize)
    except OSError as error:
        raise ConfigError(f"--record {path}: {error.strerror or error}", reason="invalid_setting") from error
    try:
        yield log.record
    finally:
        log.close()
    if log.dropped:
        raise ConfigError(f"--record {path}: {log.dropped} lines could not be written", reason="invalid_setting")


def write_html(path: str | None, title: str, comparison: Comparison, command: str) -> None:
    if path is not None:
        _write(Path(path), report(title, comparison.rows, comparison.runs, command).encode())


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


class Bar:
    """On standard error; its total is known when the first run is done."""

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
