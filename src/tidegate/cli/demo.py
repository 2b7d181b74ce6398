"""`tidegate demo`: two embedded engines, three policies in turn, one table."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tidegate.bench.demo import DemoSettings, PolicyRun, Sample, demo_classes, run_demo
from tidegate.bench.processes import ServerError, sigterm_ends
from tidegate.bench.report import score_table
from tidegate.cli.bench import write_json
from tidegate.errors import ConfigError

DEFAULTS = DemoSettings()


@click.command()
@click.option("--policies", default=",".join(DEFAULTS.policies), show_default=True, help="Run one after the other.")
@click.option("--concurrency", default=DEFAULTS.concurrency, show_default=True, type=click.IntRange(1))
@click.option(
    "--kv-tokens", default=DEFAULTS.kv_tokens, show_default=True, type=click.IntRange(32), help="An engine's."
)
@click.option("--time-scale", default=DEFAULTS.time_scale, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--warmup-s", default=DEFAULTS.warmup_s, show_default=True, type=click.FloatRange(0), help="Wall time.")
@click.option("--duration-s", default=DEFAULTS.duration_s, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--seed", default=DEFAULTS.seed, show_default=True)
@click.option("--out", default="out", show_default=True, type=click.Path(file_okay=False), help="demo.json, .svg, .png")
def demo(policies: str, out: str, **given: object) -> None:
    """Mixed rollouts on two embedded engines under several policies: which keeps the pool out of thrashing?

    The same agentic, RLVR and RLHF sessions are offered to each policy, two to three times as many as the KV caches
    hold. Prints one table and writes the runs and a plot.
    """
    settings = msgspec.convert({**given, "policies": policies.split(",")}, DemoSettings)
    console = Console()
    folder = Path(out)
    try:
        with sigterm_ends():
            runs = _run(settings, folder, console)
    except (ConfigError, ServerError) as error:
        raise click.ClickException(str(error)) from error
    title = (
        f"{settings.concurrency} sessions in flight on {settings.engines} engines of {settings.kv_tokens:,} KV tokens"
    )
    table = score_table({r.policy: r.result for r in runs}, demo_classes(settings), title=title, first="policy")
    console.print(table)
    _warn_if_busy(runs, console)
    write_json(folder / "demo.json", {"settings": settings, "runs": runs})
    console.print(f"{folder / 'demo.json'}{_plotted(runs, folder)}; logs in {folder / 'logs'}", highlight=False)


def _run(settings: DemoSettings, folder: Path, console: Console) -> list[PolicyRun]:
    each_s = settings.warmup_s + settings.duration_s
    columns = (TextColumn("{task.description:<64}"), BarColumn(bar_width=None), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=each_s * len(settings.policies))

        def show(policy: str, done_s: float, sample: Sample | None) -> None:
            before_s = settings.policies.index(policy) * each_s
            progress.update(task, completed=before_s + min(done_s, each_s), description=_moment(policy, sample))

        return asyncio.run(run_demo(settings, folder / "logs", show))


def _warn_if_busy(runs: list[PolicyRun], console: Console) -> None:
    """Engines that do not get their CPU time fall behind their model time: every rate is then too low."""
    busy, cores = runs[0].load_before, os.cpu_count() or 1
    if busy > cores / 2:
        console.print(f"The machine was busy before the demo (load {busy:.1f} on {cores} cores): rates are too low.")


def _moment(policy: str, sample: Sample | None) -> str:
    if sample is None:
        return policy
    hit = 100 * sample.cached_tokens / max(1, sample.prompt_tokens)
    kv = 100 * sample.kv_used_tokens / max(1, sample.kv_capacity_tokens)
    return f"{policy}: {sample.live} live, {sample.held} held, KV {kv:.0f} %, hit {hit:.0f} %, {sample.ended} done"


def _plotted(runs: list[PolicyRun], folder: Path) -> str:
    if importlib.util.find_spec("matplotlib") is None:
        return " (no plot: matplotlib is not installed, see the `plot` extra)"
    from tidegate.bench.plot import plot

    plot(runs, folder / "demo.svg", folder / "demo.png")
    return f", {folder / 'demo.svg'}, {folder / 'demo.png'}"
