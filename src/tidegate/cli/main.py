"""The command line: one module per command, imported when it is called, so that `tidegate --help` is quick and a
command whose optional dependency is missing breaks nothing else."""

from __future__ import annotations

import importlib
import sys

import click

from tidegate import __version__
from tidegate.config.nearest import suggestion
from tidegate.errors import TidegateError

# command -> module, attribute, one line of help (here, so that listing them imports none)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "serve": ("tidegate.cli.serve", "serve", "Start the gate in front of a pool of replicas."),
    "engine": ("tidegate.cli.engine", "engine", "Start an embedded engine: a stand-in that behaves as vLLM does."),
    "demo": ("tidegate.cli.demo", "demo", "Mixed rollouts on two embedded engines under three policies, compared."),
    "bench": ("tidegate.cli.bench", "bench", "Drive rollouts against a running endpoint and score them."),
    "sim": ("tidegate.cli.sim", "sim", "Compare policies on a simulated cluster."),
    "top": ("tidegate.cli.top", "top", "Watch a running gate in the terminal."),
    "doctor": ("tidegate.cli.doctor", "doctor", "Check a running gate and its engines."),
    "replay": ("tidegate.cli.replay", "replay", "Derive a decision log's decisions again and compare."),
    "config": ("tidegate.cli.config", "config", "Show the configuration, each value with its origin."),
}


class Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[name]
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ImportError as exc:
            raise click.ClickException(f"the command {name!r} is not available: {exc}") from exc
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"no such command {args[0]!r}{suggestion(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="tidegate")
def cli() -> None:
    """Session-aware router and admission controller for RL rollouts on vLLM and SGLang."""


def main() -> None:
    try:
        cli()
    except TidegateError as exc:
        click.echo(f"tidegate: {exc.message}", err=True)
        sys.exit(2)
