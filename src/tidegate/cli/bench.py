"""`tidegate bench`: closed-loop rollouts against a live router or engine, and their score."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast, get_args

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tidegate.bench.client import ClientOptions, Finish
from tidegate.bench.dialects import PATHS, Api
from tidegate.bench.driver import LoadDriver, LoadOptions, LoadResult, inspect_target
from tidegate.bench.report import score_table
from tidegate.errors import ConfigError
from tidegate.sim.workload import Workload
from tidegate.sim.workload_names import WORKLOADS, WorkloadOptions, build_workload

PROGRESS_PERIOD_S = 0.25


@click.command()
@click.option("--url", required=True, help="The router or engine, without /v1.")
@click.option("--workload", default="cpu-mixed", show_default=True, help=f"One of {', '.join(WORKLOADS)}.")
@click.option("--concurrency", default=16, show_default=True, type=click.IntRange(1), help="Sessions in flight.")
@click.option("--duration-s", default=60.0, show_default=True, type=click.FloatRange(0, min_open=True), help="Window.")
@click.option("--warmup-s", default=15.0, show_default=True, type=click.FloatRange(0), help="Before the window.")
@click.option("--sessions", type=click.IntRange(1), help="Run this many sessions to their ends, instead of a window.")
@click.option("--seed", default=0, show_default=True)
@click.option("--mixture", metavar="CLASS=SHARE,...", help="Instead of the workload's own.")
@click.option(
    "--group-size", default=1, show_default=True, type=click.IntRange(1), help="GRPO: rollouts of one prompt."
)
@click.option("--context-tokens", default=8192, show_default=True, type=click.IntRange(64), help="Longest context.")
@click.option("--merge-turns", default=1, show_default=True, type=click.IntRange(1), help="Recorded turns made one.")
@click.option("--trace", type=click.Path(dir_okay=False), help="Recorded sessions, instead of the ones that ship.")
@click.option("--skip-bad", is_flag=True, help="Leave bad lines of the trace out, and say which.")
@click.option("--api", default="completions", show_default=True, type=click.Choice(list(PATHS)))
@click.option("--stream", is_flag=True, help="Stream replies: time to first byte then is time to first token.")
@click.option("--model", help="Default: the first of GET /v1/models.")
@click.option("--vocab-size", default=2048, show_default=True, type=click.IntRange(32), help="Token ids stay below.")
@click.option(
    "--router-finish",
    default="auto",
    show_default=True,
    type=click.Choice(list(get_args(Finish))),
    help="How a session's end is told.",
)
@click.option("--programs", is_flag=True, help="Name sessions in vllm_xargs.agentic_context too, for vllm-router.")
@click.option("--retries", default=0, show_default=True, type=click.IntRange(0), help="Of 429, 503 and no connection.")
@click.option("--engine-urls", multiple=True, help="Replicas, for their /metrics; repeat it or separate by commas.")
@click.option("--time-scale", type=click.FloatRange(0, min_open=True), help="Default: what the engines say, or 1.")
@click.option("--policy-label", default="", help="Name of this run in the table and the JSON.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the result here.")
def bench(**given: object) -> None:
    """Drive rollouts of mixed classes against any OpenAI-compatible endpoint and score them.

    The trainer keeps --concurrency sessions in flight and releases the class that is most behind its share. The score
    is the contract rate, min over classes of completed sessions per minute / share, with hit rate, recomputed prompt
    tokens and the mixture's distance beside it.
    """
    flags = msgspec.convert(given, _Flags)
    console = Console(stderr=True)
    try:
        workload = build_workload(flags.workload, _workload_options(flags))
        result = asyncio.run(_run(workload, flags, console))
    except ConfigError as error:
        raise click.ClickException(error.message) from error
    label = flags.policy_label or flags.url
    for message in workload.skipped:
        console.print(f"left out: {message}", highlight=False)
    Console().print(score_table({label: result}, list(workload.shares), title=f"{workload.name}", first="run"))
    if result.errors or result.outputs_guessed:
        console.print({**result.errors, "outputs_guessed": result.outputs_guessed})
    if flags.json_path is not None:
        write_json(Path(flags.json_path), {"label": label, "flags": flags, "result": result})


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=1) + b"\n")


class _Flags(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    workload: str
    concurrency: int
    duration_s: float
    warmup_s: float
    sessions: int | None
    seed: int
    mixture: str | None
    group_size: int
    context_tokens: int
    merge_turns: int
    trace: str | None
    skip_bad: bool
    api: str
    stream: bool
    model: str | None
    vocab_size: int
    router_finish: str
    programs: bool
    retries: int
    engine_urls: tuple[str, ...]
    time_scale: float | None
    policy_label: str
    json_path: str | None


def parse_mixture(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in text.split(","):
        workload, _, share = part.partition("=")
        try:
            shares[workload.strip()] = float(share)
        except ValueError as error:
            raise ConfigError(f"--mixture: {part!r} is not CLASS=SHARE", reason="invalid_mixture") from error
    return shares


def _workload_options(flags: _Flags) -> WorkloadOptions:
    return WorkloadOptions(
        seed=flags.seed,
        context_tokens=flags.context_tokens,
        merge_turns=flags.merge_turns,
        group_size=flags.group_size,
        shares=parse_mixture(flags.mixture) if flags.mixture else None,
        trace=flags.trace or "",
        skip_bad=flags.skip_bad,
    )


async def _run(workload: Workload, flags: _Flags, console: Console) -> LoadResult:
    url = flags.url.rstrip("/").removesuffix("/v1")
    engines = tuple(url.rstrip("/") for part in flags.engine_urls for url in part.split(",") if url)
    target = await inspect_target(url, engines, flags.model)
    options = LoadOptions(
        client=ClientOptions(
            url=url,
            model=target.model,
            api=cast("Api", flags.api),
            stream=flags.stream,
            finish=cast("Finish", flags.router_finish),
            programs=flags.programs,
            retries=flags.retries,
            session_prefix=f"bench-{flags.seed}",
            time_scale=flags.time_scale or target.facts.time_scale,
            block_tokens=target.facts.block_tokens,
        ),
        concurrency=flags.concurrency,
        duration_s=flags.duration_s,
        warmup_s=flags.warmup_s,
        sessions=flags.sessions,
        engine_urls=engines,
        seed=flags.seed,
        vocab_size=flags.vocab_size,
    )
    driver = LoadDriver(workload, options)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[ended]} sessions"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        bar = asyncio.create_task(_show(progress, driver, flags))
        try:
            return await driver.run()
        finally:
            bar.cancel()


async def _show(progress: Progress, driver: LoadDriver, flags: _Flags) -> None:
    total = float(flags.sessions) if flags.sessions is not None else flags.warmup_s + flags.duration_s
    task = progress.add_task("rollouts", total=total, ended=0)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    while True:
        ended = len(driver.ended)
        done = ended if flags.sessions is not None else loop.time() - started_s
        progress.update(task, completed=done, ended=ended)
        await asyncio.sleep(PROGRESS_PERIOD_S)
