"""`tidegate config show`: what `serve` with the same flags would run with, and where each value comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import msgspec

from tidegate.cli.settings import SettingsCommand, load_settings
from tidegate.config.load import Loaded
from tidegate.config.schema import leaves


@click.group()
def config() -> None:
    """Show the configuration, each value with its origin."""


@config.command(cls=SettingsCommand, params=[click.Option(["--json", "as_json"], is_flag=True, help="As JSON.")])
def show(config_file: Path | None, as_json: bool, **given: Any) -> None:
    """Each setting, its value and its origin. Takes the flags of `tidegate serve`."""
    loaded = load_settings(config_file, given)
    rows = {path: {"value": value_of(loaded, path), "origin": loaded.origins[path]} for path in leaves()}
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    width = max(map(len, rows))
    for path, row in rows.items():
        click.echo(f"{path:<{width}}  {json.dumps(row['value'])}  ({row['origin']})")


def value_of(loaded: Loaded, path: str) -> Any:
    node: Any = loaded.config
    for name in path.split("."):
        node = getattr(node, name)
    return msgspec.to_builtins(node)
