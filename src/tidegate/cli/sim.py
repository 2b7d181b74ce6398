"""`tidegate sim`: the production scheduler on a simulated cluster."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from rich import box
from rich.table import Table

from tidegate.cli.sim_options import (
    Bar,
    Chosen,
    html_option,
    json_option,
    processes_option,
    recorded,
    scenario_options,
    seeds_option,
    set_option,
    show_rows,
    wide_console,
    write_html,
    write_json,
)
from tidegate.errors import ConfigError
from tidegate.sim.advice import Advice, advise, populations
from tidegate.sim.compare import Comparison, compare
from tidegate.sim.fit import Fit, fit
from tidegate.sim.formats import read_sessions, write_sessions
from tidegate.sim.gate import Recorder as Record
from tidegate.sim.measure import measure
from tidegate.sim.overrides import PolicyChoice, policy_choice
from tidegate.sim.scenario import Scenario
from tidegate.sim.score import Interval
from tidegate.sim.tables import number

ADVISED = "sticky_least_loaded,misa_t,working_set"
DEFAULT_POLICIES = "consistent_hash,sticky_least_loaded,misa_t,working_set"


@click.group()
def sim() -> None:
    """Policies on a simulated cluster: before you burn GPU hours, how many rollouts to run, and under which policy.

    A discrete-event simulation runs the scheduler of `tidegate serve`, unchanged, over replicas that page, cache, batch
    and preempt as vLLM does. Same seed, same result.
    """


@sim.command("compare")
@scenario_options
@click.option(
    "--policies", default=DEFAULT_POLICIES, show_default=True, metavar="P[,P]", help="NAME or NAME:PARAM=VALUE."
)
@seeds_option
@set_option
@processes_option
@json_option
@html_option
def compare_command(
    policies: str,
    seeds: int,
    settings: tuple[str, ...],
    processes: int | None,
    json_path: str | None,
    html_path: str | None,
    **given: Any,
) -> None:
    """Policies x scenarios x seeds. The best contract rate stands in bold; raw sessions per minute never rank."""
    choices = [policy_choice(text, settings) for text in policies.split(",")]
    _compare(_scenarios(given), choices, range(seeds), processes, json_path, html_path)


@sim.command("run")
@scenario_options
@click.option("--policy", default="working_set", show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--record", "record_path", type=click.Path(dir_okay=False, path_type=Path), help="Write its decision log here."
)
@set_option
@json_option
@html_option
def run_command(
    policy: str,
    seed: int,
    record_path: Path | None,
    settings: tuple[str, ...],
    json_path: str | None,
    html_path: str | None,
    **given: Any,
) -> None:
    """One run, with everything that is known of it in the JSON.

    Its decision log is as a gate writes it: `tidegate replay` derives it again, `sim convert` makes a trace of it.
    """
    scenarios, choice = _scenarios(given), policy_choice(policy, settings)
    if record_path is None:
        comparison = _compare(scenarios, [choice], [seed], 1, None, html_path)
    else:
        if len(scenarios) != 1:
            raise ConfigError("a decision log is of one run: give one scenario", reason="invalid_setting")
        with recorded(record_path, choice, seed) as recorder:
            comparison = _compare(scenarios, [choice], [seed], 1, None, html_path, recorder)
    write_json(json_path, comparison.runs)


@sim.command("sweep")
@scenario_options
@click.option("--policy", default="static_cap", show_default=True)
@click.option("--param", default="static_cap.cap", show_default=True, metavar="POLICY.PARAM")
@click.option("--values", required=True, metavar="V,V[,V]", help="What the parameter is set to.")
@seeds_option
@set_option
@processes_option
@json_option
@html_option
def sweep_command(
    policy: str,
    param: str,
    values: str,
    seeds: int,
    settings: tuple[str, ...],
    processes: int | None,
    json_path: str | None,
    html_path: str | None,
    **given: Any,
) -> None:
    """One policy over the values of one of its parameters."""
    own = param.removeprefix(f"{policy}.")
    choices = [policy_choice(f"{policy}:{own}={value.strip()}", settings) for value in values.split(",")]
    _compare(_scenarios(given), choices, range(seeds), processes, json_path, html_path)


@sim.command("advise")
@scenario_options
@click.option("--policies", default=ADVISED, show_default=True, metavar="P[,P]", help="To choose from.")
@seeds_option
@set_option
@processes_option
@json_option
def advise_command(
    policies: str, seeds: int, settings: tuple[str, ...], processes: int | None, json_path: str | None, **given: Any
) -> None:
    """How many sessions to keep in flight under which policy, and what it gains, with its uncertainty.

    The scenario's number is varied from a quarter to twice; give --in-flight for another middle.
    """
    choices = [policy_choice(text, settings) for text in policies.split(",")]
    scenarios = _scenarios(given)
    if len(scenarios) != 1:
        raise ConfigError("advice is for one scenario", reason="invalid_setting")
    with Bar("runs") as show:
        comparison = compare(populations(scenarios[0]), choices, range(seeds), processes=processes, progress=show)
    advice = advise(comparison.rows)
    wide_console().print(_advice_table(scenarios[0], advice, seeds))
    write_json(json_path, {"advice": advice, "rows": comparison.rows})


@sim.command("fit")
@click.option(
    "--url",
    required=True,
    metavar="URL[,URL]",
    help="An idle engine, without /v1; those that share a host, to be measured at once.",
)
@click.option("--model", help="Default: the first of GET /v1/models.")
@click.option(
    "--longest-prompt", default=4096, show_default=True, type=click.IntRange(128), help="Tokens to measure to."
)
@click.option(
    "--batched-tokens", default=2048, show_default=True, type=click.IntRange(1), help="max_num_batched_tokens."
)
@click.option("--vocab-size", default=2048, show_default=True, type=click.IntRange(32), help="Token ids stay below.")
@click.option("--seed", default=0, show_default=True, help="Of the prompts; a new one, or they are cached already.")
@json_option
def fit_command(
    url: str,
    model: str | None,
    longest_prompt: int,
    batched_tokens: int,
    vocab_size: int,
    seed: int,
    json_path: str | None,
) -> None:
    """Measure live engines and fit the latency model to them; give the JSON to --latency."""
    urls = [each.strip() for each in url.split(",")]
    with Bar("measurements") as show:
        seen = asyncio.run(
            measure(
                urls,
                model=model,
                longest_prompt=longest_prompt,
                budget_tokens=batched_tokens,
                vocab_size=vocab_size,
                seed=seed,
                progress=show,
            )
        )
    found = fit(seen, budget_tokens=batched_tokens, engines=len(urls))
    wide_console().print(_fit_table(found))
    write_json(json_path, found)


@sim.command("convert")
@click.argument("source", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--skip-bad", is_flag=True, help="Leave bad lines out, and say which.")
@click.option("--json", "as_json", is_flag=True, help="What was written and left out, as JSON.")
def convert_command(source: Path, target: Path, skip_bad: bool, as_json: bool) -> None:
    """Sessions of another format to ours: rollout lengths, Mooncake, Azure CSV, or a gate's decision log."""
    trace = read_sessions(source, skip_bad=skip_bad)
    write_sessions(trace.sessions, target)
    turns = sum(len(session.turns) for session in trace.sessions)
    if as_json:
        found = {"sessions": len(trace.sessions), "turns": turns, "skipped": trace.skipped, "target": str(target)}
        click.echo(json.dumps(found))
        return
    click.echo(f"{len(trace.sessions)} sessions, {turns} turns, {len(trace.skipped)} bad lines left out: {target}")
    for message in trace.skipped[:20]:
        click.echo(f"left out: {message}", err=True)


def _scenarios(given: dict[str, Any]) -> list[Scenario]:
    return msgspec.convert(given, Chosen).scenarios()


def _compare(
    scenarios: list[Scenario],
    choices: list[PolicyChoice],
    seeds: range | list[int],
    processes: int | None,
    json_path: str | None,
    html_path: str | None,
    recorder: Record | None = None,
) -> Comparison:
    with Bar("runs") as show:
        comparison = compare(
            scenarios,
            choices,
            seeds,
            processes=processes,
            progress=show,
            observe=html_path is not None,
            recorder=recorder,
        )
    show_rows(comparison.rows)
    write_json(json_path, comparison.rows)
    write_html(html_path, "tidegate sim", comparison, " ".join(["tidegate", *sys.argv[1:]]))
    return comparison


def _advice_table(scenario: Scenario, advice: list[Advice], seeds: int) -> Table:
    table = Table(title=f"{scenario.name}: {scenario.about}; {seeds} seeds", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("policy", no_wrap=True)
    for name in ("sessions in flight", "contract /min", "efficiency", "gain of the best over it"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in advice:
        gain = "best" if each.gain is None else f"x {_interval(each.gain, '.2f')}"
        rate = _interval(each.contract_per_min, ".1f")
        table.add_row(each.policy, str(each.in_flight), rate, number(each.efficiency, ".2f"), gain)
    return table


def _interval(interval: Interval, form: str) -> str:
    return f"{interval.mean:{form}} ({interval.low:{form}}..{interval.high:{form}})"


def _fit_table(found: Fit) -> Table:
    table = Table(title="latency model", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("constant")
    table.add_column("seconds", justify="right")
    for name, value in msgspec.structs.asdict(found.latency).items():
        table.add_row(name, f"{value:.3g}")
    table.add_row("a request, outside of steps", f"{found.request_s:.3g}")
    errors = {"prefill": found.prefill_error, "prompts together": found.joined_error, "decode": found.decode_error}
    table.caption = "relative error: " + ", ".join(f"{name} {100 * error:.0f} %" for name, error in errors.items())
    table.caption_justify = "left"
    return table
