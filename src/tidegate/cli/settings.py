"""The flags that every setting has, for commands that load the configuration.

argparse's habit is kept, since vllm-router's users have it: `--worker-urls a b c` is the same as `--worker-urls a,b,c`
and as the flag three times.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_origin

import click

from tidegate.config.flags import COMPAT, HARMLESS, REFUSED, WITHOUT_EFFECT, Flag, flags, short_flags
from tidegate.config.load import FlagValue, Loaded, load
from tidegate.config.schema import constraints, sections, type_name, union_members
from tidegate.errors import ConfigError


class SettingsCommand(click.Command):
    """A command whose options are the settings. `--help` shows the short names, `--help-all` everything."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [
            click.Option(["--config", "config_file"], type=click.Path(path_type=Path), help="A TOML file of settings."),
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_help_all,
                help="All settings.",
            ),
        ]
        known = flags()
        self.params += [_option(flag, known) for flag in known.values()]
        self.params += [_foreign(name) for name in (*WITHOUT_EFFECT, *REFUSED)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        lists = {name for name, flag in flags().items() if _is_list(flag)} | _FOREIGN_LISTS
        return super().parse_args(ctx, _expand(args, lists))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        everything = bool(ctx.meta.get(_HELP_ALL))
        groups: dict[str, list[tuple[str, str]]] = {}
        for flag in (flags() if everything else short_flags()).values():
            groups.setdefault(flag.group, []).append((_usage(flag), _help(flag)))
        for group, rows in groups.items():
            about = sections().get(group, "")
            with formatter.section(f"{group}: {about}" if about else group):
                formatter.write_dl(rows)
        own = [param.get_help_record(ctx) for param in self.get_params(ctx) if isinstance(param, click.Option)]
        with formatter.section("Other"):
            formatter.write_dl([row for row in own if row is not None])
        if not everything:
            formatter.write_paragraph()
            formatter.write_text(
                "Every setting of docs/configuration.md is a flag as well: --http-max-connections for "
                "http.max_connections; --help-all lists them. Each can stand in a TOML file and in the environment too "
                "(TIDEGATE_HTTP_MAX_CONNECTIONS). Flags win over the environment, which wins over the file."
            )


_HELP_ALL = "tidegate.help_all"
_FOREIGN_LISTS = {"--prefill", "--selector", "--prefill-selector", "--decode-selector", "--cors-allowed-origins"}


def _help_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _expand(args: Sequence[str], lists: Iterable[str]) -> list[str]:
    """`--flag a b` to `--flag a --flag b`, for flags that take lists."""
    known, expanded, current = set(lists), [], ""
    for arg in args:
        if arg.startswith("-"):
            current = arg if arg in known else ""
            if not current:
                expanded.append(arg)
        elif current:
            expanded += [current, arg]
        else:
            expanded.append(arg)
    return expanded


def _is_list(flag: Flag) -> bool:
    return any(get_origin(member) in (tuple, list) for member in union_members(flag.leaf.type))


def _parameter(name: str) -> str:
    return name.strip("-").replace("-", "_")


def _option(flag: Flag, known: dict[str, Flag]) -> click.Option:
    parameter = _parameter(flag.name)
    if flag.fixed is not None:
        return click.Option([flag.name, parameter], is_flag=True, hidden=True, default=None)
    return click.Option([flag.name, parameter], type=str, multiple=_is_list(flag), hidden=True, default=None)


def _foreign(name: str) -> click.Option:
    """vllm-router's: with or without values, none of which matter."""
    return click.Option(
        [name, _parameter(name)], is_flag=False, flag_value="", multiple=True, hidden=True, default=None
    )


def _usage(flag: Flag) -> str:
    if flag.fixed is not None:
        return flag.name
    return f"{flag.name} {type_name(flag.leaf.type).upper().replace(' OR ', '|').replace('LIST OF TEXT', 'TEXT...')}"


def _help(flag: Flag) -> str:
    leaf = flag.leaf
    if flag.group == COMPAT:
        return f"Sets {flag.path}. {flag.note}".strip()
    default = ",".join(leaf.default) if isinstance(leaf.default, tuple) else leaf.default
    shown = "" if default in ("", None, {}) else f" [{default}]"
    limits = constraints(leaf.type)
    return " ".join(part for part in (leaf.description, flag.note, f"({limits})" if limits else "") if part) + shown


def load_settings(config_file: Path | None, given: dict[str, Any]) -> Loaded:
    """From what click parsed. Raises ConfigError."""
    _judge_foreign(given)
    values: dict[str, FlagValue] = {}
    for name, flag in flags().items():
        value = given.get(_parameter(name))
        if not value:
            continue
        text = flag.fixed if flag.fixed is not None else ",".join(value) if isinstance(value, tuple) else value
        before = values.get(flag.path)
        if before is not None and before.value != text:
            raise ConfigError(f"flags {before.flag} and {name} both set {flag.path}, to {before.value} and {text}")
        values[flag.path] = FlagValue(name, text)
    return load(config_file, os.environ, values)


def _judge_foreign(given: dict[str, Any]) -> None:
    for name, why in REFUSED.items():
        values = given.get(_parameter(name))
        if values and any(value != HARMLESS.get(name) for value in values):
            raise ConfigError(f"flag {name}: {why}")
    for name, why in WITHOUT_EFFECT.items():
        if given.get(_parameter(name)):
            click.echo(f"tidegate: {name} has no effect: {why}", err=True)


def fail(exc: ConfigError) -> None:
    click.echo(f"tidegate: {exc.message}", err=True)
    sys.exit(2)
