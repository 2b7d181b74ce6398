"""Telling engines what the scheduler's decisions mean for the KV that they hold.

    session ends (finished, expired, evicted)    release, on every replica that it was placed on
    continuation is paused for want of room      demote
    it goes on after that                        protect
    it goes on elsewhere                         demote where it was

Engines without tidegate's plugin are told nothing, and everything else works as it does with it. See engines.plugin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp
import structlog

from tidegate.config.engines import EnginesConfig
from tidegate.engines.plugin import NOT_ASKED, SWITCHED_OFF, Hint, Plugin, PluginView, Tally
from tidegate.errors import ConfigError
from tidegate.types import (
    AnyDecision,
    AnyEvent,
    Ended,
    EpochStarted,
    Hold,
    Place,
    ReplicaAdded,
    ReplicaHealth,
    ReplicaId,
    ReplicaRemoved,
    ReplicaReset,
    SessionId,
)

log: structlog.stdlib.BoundLogger = structlog.get_logger("tidegate.retention")

PAUSES = frozenset({"not_resident", "paused"})  # reasons to hold a continuation that say: its KV may go
SINGLE_REQUEST = "request:"  # ids that the scheduler makes for requests without a session: engines do not know them


class Retention:
    def __init__(self, config: EnginesConfig, client: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self.tally = Tally()
        self._on = config.plugin == "auto"
        self._config = config
        self._client = client
        self._headers = headers
        self._plugins: dict[ReplicaId, Plugin] = {}
        self._tasks: dict[ReplicaId, asyncio.Task[None]] = {}
        self._homes: dict[SessionId, list[ReplicaId]] = {}  # the last one is where it is
        self._demoted: set[SessionId] = set()

    def told(self, event: AnyEvent, decisions: Sequence[AnyDecision]) -> None:
        """What the scheduler was told and what it decided."""
        self._observe(event)
        for decision in decisions:
            match decision:
                case Place():
                    self._placed(decision)
                case Hold():
                    self._held(decision)
                case Ended():
                    self._ended(decision)

    # --- decisions ------------------------------------------------------------------------------------------------
    def _placed(self, decision: Place) -> None:
        if not self._on:
            return
        session, replica = decision.session, decision.replica
        homes = self._homes.setdefault(session, [])
        if not homes:
            homes.append(replica)
            self._untell(replica, session)
        elif homes[-1] != replica:
            self._tell(homes[-1], "demote", session)
            if replica in homes:
                homes.remove(replica)
            homes.append(replica)
        if self._demoted and session in self._demoted:
            self._demoted.discard(session)
            self._tell(replica, "protect", session)

    def _held(self, decision: Hold) -> None:
        if decision.reason in PAUSES and (homes := self._homes.get(decision.session)):
            self._demoted.add(decision.session)
            self._tell(homes[-1], "demote", decision.session)

    def _ended(self, decision: Ended) -> None:
        self._demoted.discard(decision.session)
        homes = self._homes.pop(decision.session, ())
        if not decision.session.startswith(SINGLE_REQUEST):
            for replica in homes:
                self._tell(replica, "release", decision.session)

    # --- replicas -------------------------------------------------------------------------------------------------
    def _observe(self, event: AnyEvent) -> None:
        match event:
            case ReplicaAdded(replica=url) if self._on and url not in self._plugins:
                self._start(url)
            case ReplicaRemoved(replica=url):
                self._stop(url)
            case ReplicaHealth(replica=url, usable=True) if url in self._plugins:
                self._plugins[url].doubt()
            case ReplicaReset(replica=url, reason=reason) if url in self._plugins:
                self._plugins[url].forget()
                if reason == "restart":
                    self._plugins[url].doubt()
            case EpochStarted():
                for plugin in self._plugins.values():
                    plugin.forget()

    def view(self, url: ReplicaId) -> PluginView:
        plugin = self._plugins.get(url)
        if plugin is not None:
            return plugin.view
        return NOT_ASKED if self._on else SWITCHED_OFF

    def views(self) -> dict[ReplicaId, PluginView]:
        return {url: plugin.view for url, plugin in self._plugins.items()}

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for url in list(self._tasks):
            self._stop(url)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, url: ReplicaId) -> None:
        plugin = Plugin(url, self._client, self.tally, timeout_s=self._config.plugin_timeout_s, headers=self._headers)
        self._plugins[url] = plugin
        task = asyncio.get_running_loop().create_task(plugin.run(), name=f"plugin {url}")
        task.add_done_callback(_report)
        self._tasks[url] = task

    def _stop(self, url: ReplicaId) -> None:
        self._plugins.pop(url, None)
        task = self._tasks.pop(url, None)
        if task is not None:
            task.cancel()

    def _tell(self, url: ReplicaId, hint: Hint, session: SessionId) -> None:
        plugin = self._plugins.get(url)
        if plugin is not None:
            plugin.tell(hint, session)

    def _untell(self, url: ReplicaId, session: SessionId) -> None:
        """The id is in use again: a release of its former life that has not gone out must not."""
        plugin = self._plugins.get(url)
        if plugin is not None:
            plugin.untell("release", session)


def plugin_headers(config: EnginesConfig) -> dict[str, str]:
    """With the engines' API key. Raises ConfigError."""
    if config.plugin_key_file is None:
        return {}
    try:
        key = Path(config.plugin_key_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engines.plugin_key_file {config.plugin_key_file!r} cannot be read: {error}") from error
    if not key.isascii() or not key.isprintable() or not key:
        raise ConfigError(f"engines.plugin_key_file {config.plugin_key_file!r} holds no key: one line of ASCII text")
    return {"Authorization": f"Bearer {key}"}


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("plugin task stopped", task=task.get_name(), exc_info=error)
