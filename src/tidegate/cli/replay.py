"""`tidegate replay LOG...`: 0 if every decision is derived again as it was recorded, else 1."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import msgspec

from tidegate.observe.replay import Report
from tidegate.observe.replay import replay as run_replay


@click.command()
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def replay(logs: tuple[Path, ...], as_json: bool) -> None:
    """Derive the decisions of a decision log again and compare, byte for byte.

    Of a log that was rotated give all parts, the oldest first.
    """
    report = run_replay(*logs)
    click.echo(json.dumps(msgspec.to_builtins(report), indent=2) if as_json else text(report))
    sys.exit(0 if report.same else 1)


def text(report: Report) -> str:
    lines = [f"{report.events} events, {report.decisions} decisions, policy {report.policy}, by {report.version}"]
    if report.truncated:
        lines.append("the last line is not whole: its writer was killed")
    if report.gaps:
        lines.append(f"{report.gaps} lines are missing (the disk was too slow): not exact after the first gap")
    difference = report.first_difference
    if difference is None:
        lines.append("every decision is the same")
    else:
        lines += [
            f"{difference.log}:{difference.line} is the first that differs",
            f"  event     {json.dumps(difference.event)}",
            f"  recorded  {json.dumps(difference.recorded)}",
            f"  derived   {json.dumps(difference.derived)}",
        ]
    return "\n".join(lines)
