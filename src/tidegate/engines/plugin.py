"""What one replica can be told of sessions, and telling it.

                                                      tidegate's plugin (vLLM)   session radix cache (SGLang)
    release   it is over: its KV is evicted first     POST /tidegate/release     POST /close_session
    demote    it is paused: its KV is evicted next    POST /tidegate/demote      -
    protect   it goes on: its KV is evicted last      POST /tidegate/protect     -

Telling is a hint, never waited for: `tell` returns at once, what was told last of a session counts, and calls go out
one at a time, with all that was told meanwhile. A call that fails is counted and not repeated, since a lost hint costs
some cached tokens and a queue of them would cost the engine's time when it has the least of it.

The replica is asked what it has (`GET /tidegate/info`, else `GET /server_info`) each time it becomes usable or was
restarted, and every `LOOK_AGAIN_S` as long as it gives no answer. A plugin with another protocol than ours is not used.
SGLang's own cache keeps what open sessions refer to longer than the rest, if it was started with
--enable-session-radix-cache; it knows the sessions that requests name in their body.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Mapping
from itertools import islice
from typing import Any, Literal, TypeAlias

import aiohttp
import msgspec
import structlog

from tidegate.engines.control import Result, call
from tidegate.types import ReplicaId, SessionId

log: structlog.stdlib.BoundLogger = structlog.get_logger("tidegate.plugin")

Hint: TypeAlias = Literal["release", "demote", "protect"]

PROTOCOL = 1  # of tidegate.integrations.vllm_plugin.protocol; a test compares them
LOOK_AGAIN_S = 10.0
MAX_PENDING = 4096  # sessions: more than a replica holds; beyond it the oldest hint is dropped
BATCH = 256  # sessions in a call: it runs between two engine steps, and should not be felt
AT_ONCE = 8  # calls, where each is for one session


class PluginView(msgspec.Struct, frozen=True, kw_only=True):
    """For /state and the workers API."""

    used: bool
    reason: str  # why it is not used: absent, not_asked, unanswered, unauthorized, protocol, off_in_engine, ...
    detail: str = ""  # the reason in words, where there is more to say
    version: str | None = None
    protocol: int | None = None
    features: tuple[str, ...] = ()
    instance: str | None = None  # another one after a restart
    kind: Literal["plugin", "session_radix_cache"] | None = None


NOT_ASKED = PluginView(used=False, reason="not_asked")
SWITCHED_OFF = PluginView(used=False, reason="switched_off", detail="engines.plugin is off")


def understood(result: Result) -> PluginView:
    """What the answer to GET /tidegate/info says."""
    if result.status is None:
        return PluginView(used=False, reason="unanswered", detail=result.error or "")
    if result.status in (404, 405):
        return PluginView(used=False, reason="absent")
    if result.status in (401, 403):
        return PluginView(used=False, reason="unauthorized", detail="set engines.plugin_key_file")
    body = result.body
    if result.status != 200 or not isinstance(body, dict) or not isinstance(body.get("protocol"), int):
        return PluginView(used=False, reason="unanswered", detail=f"status {result.status}, and not what was expected")
    features, instance = body.get("features"), body.get("instance")
    told: dict[str, Any] = {
        "kind": "plugin",
        "version": str(body.get("version")),
        "protocol": body["protocol"],
        "features": tuple(str(name) for name in features) if isinstance(features, list) else (),
        "instance": instance if isinstance(instance, str) else None,
    }
    if body["protocol"] != PROTOCOL:
        newer = "newer" if body["protocol"] > PROTOCOL else "older"
        detail = f"it speaks protocol {body['protocol']}, {newer} than this gate's {PROTOCOL}"
        return PluginView(used=False, reason="protocol", detail=detail, **told)
    if body.get("off"):
        return PluginView(used=False, reason="off_in_engine", detail=str(body["off"]), **told)
    return PluginView(used=True, reason="ok", **told)


def understood_sglang(result: Result) -> PluginView | None:
    """What the answer to GET /server_info says; None: nothing of a cache that knows sessions."""
    body = result.body
    if result.status != 200 or not isinstance(body, dict) or body.get("enable_session_radix_cache") is not True:
        return None
    version = str(body["version"]) if "version" in body else None
    return PluginView(used=True, reason="ok", kind="session_radix_cache", version=version, features=("release",))


class Tally:
    """Of all replicas; keys are the labels of the metrics."""

    def __init__(self) -> None:
        self.sessions: collections.Counter[tuple[ReplicaId, str]] = collections.Counter()  # told of, by hint
        self.moved_blocks: collections.Counter[tuple[ReplicaId, str]] = collections.Counter()
        self.failures: collections.Counter[tuple[ReplicaId, str]] = collections.Counter()  # sessions, by reason


class Plugin:
    def __init__(
        self,
        url: ReplicaId,
        client: aiohttp.ClientSession,
        tally: Tally,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = url
        self.view = NOT_ASKED
        self._client = client
        self._tally = tally
        self._timeout_s = timeout_s
        self._headers = tuple((headers or {}).items())
        self._pending: dict[SessionId, Hint] = {}
        self._doubt = asyncio.Event()
        self._told = asyncio.Event()

    def doubt(self) -> None:
        """It may have come, gone, or changed: ask."""
        self._doubt.set()

    def forget(self) -> None:
        """The engine was restarted, or its cache is empty: it knows none of these sessions."""
        self._pending.clear()

    def tell(self, hint: Hint, session: SessionId) -> None:
        if not self.view.used or hint not in self.view.features:
            return
        self._pending.pop(session, None)
        if len(self._pending) >= MAX_PENDING:
            del self._pending[next(iter(self._pending))]
            self._tally.failures[self.url, "queue_full"] += 1
        self._pending[session] = hint
        self._told.set()

    def untell(self, hint: Hint, session: SessionId) -> bool:
        """Whether the hint had not gone out yet: it is taken back."""
        if self._pending.get(session) != hint:
            return False
        del self._pending[session]
        return True

    # --- the task ---------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_forever())
            tasks.create_task(self._send_forever())

    async def _look_forever(self) -> None:
        while True:
            patience_s = LOOK_AGAIN_S if self.view.reason == "unanswered" else None
            try:
                async with asyncio.timeout(patience_s):
                    await self._doubt.wait()
            except TimeoutError:
                pass
            self._doubt.clear()
            await self._look()

    async def _look(self) -> None:
        before, found = self.view, understood(await self._call("GET", "/tidegate/info"))
        if found.reason == "absent":
            found = understood_sglang(await self._call("GET", "/server_info")) or found
        self.view = found
        if not self.view.used:
            self._pending.clear()
        if (before.reason, before.protocol, before.version) != (
            self.view.reason,
            self.view.protocol,
            self.view.version,
        ):
            self._say()

    def _say(self) -> None:
        """Once for each thing that it can be."""
        view = self.view
        if view.used:
            log.info("engine plugin is used", replica=self.url, version=view.version, features=view.features)
        elif view.reason in ("absent", "unanswered"):
            log.debug("no engine plugin", replica=self.url, reason=view.reason, detail=view.detail)
        else:
            log.warning("engine plugin is not used", replica=self.url, reason=view.reason, detail=view.detail)

    async def _send_forever(self) -> None:
        while True:
            await self._told.wait()
            self._told.clear()
            while self._pending:
                await self._send()

    async def _send(self) -> None:
        hint = next(iter(self._pending.values()))
        same = (session for session, told in self._pending.items() if told == hint)
        sessions = list(islice(same, BATCH))
        for session in sessions:
            del self._pending[session]
        if self.view.kind == "session_radix_cache":
            await self._close_sessions(sessions)
            return
        result = await self._call("POST", f"/tidegate/{hint}", {"session_ids": sessions})
        if result.ok and isinstance(result.body, dict):
            self._tally.sessions[self.url, hint] += len(sessions)
            moved = result.body.get("moved_blocks")
            self._tally.moved_blocks[self.url, hint] += moved if isinstance(moved, int) else 0
            return
        self._failed(result, len(sessions))

    async def _close_sessions(self, sessions: list[SessionId]) -> None:
        """A session that SGLang does not know is no error to it."""
        for begin in range(0, len(sessions), AT_ONCE):
            some = sessions[begin : begin + AT_ONCE]
            results = await asyncio.gather(*(self._call("POST", "/close_session", {"session_id": s}) for s in some))
            self._tally.sessions[self.url, "release"] += sum(result.ok for result in results)
            failed = [result for result in results if not result.ok]
            if failed:
                self._failed(failed[0], len(failed))
                return

    async def _call(self, method: str, path: str, body: Any = None) -> Result:
        return await call(
            self._client,
            self.url,
            method,
            path,
            headers=self._headers,
            body=None if body is None else msgspec.json.encode(body),
            timeout_s=self._timeout_s,
        )

    def _failed(self, result: Result, sessions: int) -> None:
        """Whatever is left of it is seen by the next look."""
        reason = "unanswered" if result.status is None else f"status_{result.status}"
        self._tally.failures[self.url, reason] += sessions
        self.view = PluginView(used=False, reason="unanswered", detail=f"a call failed: {result.error}")
        self._tally.failures[self.url, reason] += len(self._pending)
        self._pending.clear()
        self._doubt.set()
