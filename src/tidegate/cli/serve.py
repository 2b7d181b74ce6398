"""`tidegate serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tidegate.cli.settings import SettingsCommand, load_settings


@click.command(
    cls=SettingsCommand,
    epilog="Example: tidegate serve --worker-urls http://replica-0:8000 http://replica-1:8000 --port 8080",
)
def serve(config_file: Path | None, **given: Any) -> None:
    """Start the gate in front of a pool of replicas."""
    loaded = load_settings(config_file, given)
    import uvloop

    from tidegate.observe.logs import configure
    from tidegate.server.run import run

    configure(loaded.config.log)
    uvloop.run(run(loaded.config))
