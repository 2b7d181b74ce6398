"""`tidegate top`: a running gate's /state as tables, refreshed in place."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text


@click.command()
@click.argument("url", default="http://127.0.0.1:30000")
@click.option("--period", "period_s", default=1.0, type=click.FloatRange(min=0.1), help="Seconds between readings.")
@click.option("--once", is_flag=True, help="Show it once and end.")
@click.option("--json", "as_json", is_flag=True, help="Each reading as one line of JSON: the gate's /state.")
def top(url: str, period_s: float, once: bool, as_json: bool) -> None:
    """Watch a running gate in the terminal."""
    if as_json:
        print_lines(url, period_s, once)
        return
    console = Console()
    if once:
        console.print(screen(read_state(url)))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                shown: Any = screen(read_state(url))
            except click.ClickException as exc:
                shown = Text(exc.message, style="bold red")  # it may come back
            live.update(shown, refresh=True)
            try:
                time.sleep(period_s)
            except KeyboardInterrupt:
                return


def print_lines(url: str, period_s: float, once: bool) -> None:
    """For scripts: an unreachable gate ends it."""
    while True:
        click.echo(json.dumps(read_state(url)))
        if once:
            return
        try:
            time.sleep(period_s)
        except KeyboardInterrupt:
            return


def read_state(url: str) -> dict[str, Any]:
    base = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
    try:
        with urllib.request.urlopen(f"{base}/state", timeout=5) as reply:
            state = json.load(reply)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as exc:
        raise click.ClickException(f"no gate answers at {url}: {exc}") from exc
    if not isinstance(state, dict) or "replicas" not in state:
        raise click.ClickException(f"what answers at {url} is not a gate")
    return state


def screen(state: dict[str, Any]) -> Group:
    parts: list[Any] = [headline(state), replicas(state), classes(state)]
    parts += [Text(f"! {alarm}", style="yellow") for alarm in state["alarms"]]
    if state["holds"]:
        parts.append(holds(state))
    return Group(*parts)


def headline(state: dict[str, Any]) -> Text:
    sessions, requests = state["sessions"], state["requests"]
    text = Text(
        f"tidegate {state['version']}  {state['policy']}  epoch {state['epoch']}  up {clock(state['uptime_s'])}\n"
    )
    text.append(
        f"sessions {sessions['live']} live, {sessions['held']} held, {sessions['paused']} paused   "
        f"requests {requests['in_flight']} in flight, {requests['waiting']} waiting   "
        f"advised {state['advice']['sessions']} sessions ({state['advice']['reason']})"
    )
    if state["paused"]:
        text.append("   PAUSED", style="bold yellow")
    return text


def replicas(state: dict[str, Any]) -> Table:
    table = Table(
        "replica", "state", "sessions", "requests", "KV", "", "hit rate", "pressure", box=None, pad_edge=False
    )
    for replica in [*state["replicas"], *state["leaving"]]:
        health = replica.get("health", {})
        used, capacity = replica["kv_used_tokens"], replica["kv_capacity_tokens"]
        style = "" if replica["ready"] else "red"
        table.add_row(
            replica["url"],
            Text(str(health.get("state", replica["reason"])) + (" stale" if replica["stale"] else ""), style=style),
            str(replica["sessions"]),
            str(replica["requests"]),
            f"{tokens(used)} / {tokens(capacity) if capacity else '?'}",
            bar(used / capacity if capacity else 0.0),
            "-" if replica["hit_rate"] is None else f"{replica['hit_rate']:.2f}",
            f"{replica['pressure']:.2f}",
        )
    return table


def classes(state: dict[str, Any]) -> Table:
    table = Table(
        "class", "live", "cap", "held", "advised", "completed", "share", "footprint", "residency",
        box=None, pad_edge=False,
    )  # fmt: skip
    advised = state["advice"]["classes"]
    for name, klass in sorted(state["classes"].items()):
        table.add_row(
            name,
            str(klass["live"]),
            "-" if klass["cap"] is None else str(klass["cap"]),
            str(klass["held"]),
            str(advised[name]["sessions"]) if name in advised else "-",
            str(klass["completed"]),
            f"{klass['share']:.2f}",
            tokens(klass["footprint_tokens"]),
            clock(klass["residency_s"]),
        )
    return table


def holds(state: dict[str, Any]) -> Table:
    table = Table("longest held", "class", "reason", "for", box=None, pad_edge=False)
    for hold in state["holds"][:10]:
        table.add_row(hold["session"] or "-", hold["workload"], hold["reason"], clock(hold["waited_s"]))
    return table


def tokens(count: float) -> str:
    for unit in ("", "k", "M"):
        if count < 1000:
            return f"{count:.0f}{unit}" if unit == "" or count >= 100 else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}G"


def clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def bar(share: float, width: int = 16) -> Text:
    full = round(min(share, 1.0) * width)
    style = "red" if share > 1 else "yellow" if share > 0.9 else "green"
    return Text("█" * full, style=style) + Text("░" * (width - full), style="dim")
