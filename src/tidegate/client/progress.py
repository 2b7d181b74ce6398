"""A line a class in the terminal: completed, in flight, waiting. It needs rich, and says so where there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tidegate.client.stats import Stats

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger("tidegate.client")


class ProgressBar:
    def __init__(self, stats: Callable[[], Stats], console: Any = None) -> None:
        """`console`: a rich Console; None: its default, on stderr."""
        self._stats = stats
        self._console = console
        self._progress: Progress | None = None
        self._rows: dict[str, Any] = {}
        self.total: int | None = None  # sessions to come in all; None: nobody knows

    def start(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            log.warning("no progress bar: rich is not installed")
            return
        console = self._console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[flight]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._progress.start()

    def update(self) -> None:
        """Never raises: it is called while slots change hands."""
        if self._progress is None:
            return
        try:
            self._draw(self._progress)
        except Exception:
            log.exception("the progress bar failed; there is none from here")
            self._progress = None

    def _draw(self, progress: Progress) -> None:
        stats = self._stats()
        for workload, one in stats.classes.items():
            limit = "" if one.limit is None else f"/{one.limit}"
            flight = f"{one.in_flight}{limit} in flight, {one.waiting} waiting"
            flight += f", {one.failed} failed" if one.failed else ""
            self._show(progress, workload or "unlabelled", one.completed, None, flight)
        if self.total is not None:
            pool = f"{stats.in_flight}/{stats.limit} in flight" + (", paused" if stats.paused else "")
            self._show(progress, "all", stats.completed, self.total, pool)

    def _show(self, progress: Progress, name: str, done: int, total: int | None, flight: str) -> None:
        if name not in self._rows:
            self._rows[name] = progress.add_task(name, total=total, flight=flight)
        progress.update(self._rows[name], completed=done, total=total, flight=flight)

    def stop(self) -> None:
        if self._progress is not None:
            self.update()
            self._progress.stop()
            self._progress = None
