"""Sessions that a client opens in SGLang itself, which keeps their context until it is told that they are over.

    POST /open_session    opened on every SGLang replica under one id, since the session may be placed on any of them;
                          one that nothing was asked in costs the engine an entry in a table
    its end               `/close_session` on all of them: however it ends, by a finish call, by idling, by eviction

Only what was opened through the gate is closed by it; other sessions of SGLang's clients need no such call. A replica
that is added or restarted later does not know the session, and says so itself.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.engines.base import ControlCall
from tidegate.engines.control import fan_out
from tidegate.errors import ReplicaError, RequestError
from tidegate.proxy.identity import check_label
from tidegate.server.answers import answer, read_fields, text_field
from tidegate.server.replicas import Replicas
from tidegate.types import AnyDecision, AnyEvent, Ended, ReplicaId, SessionFinished, SessionId

log: structlog.stdlib.BoundLogger = structlog.get_logger("tidegate.sessions")

MAX_OPEN = 65_536  # sessions that are remembered to be closed; at 0.3 KB each


class EngineSessions:
    def __init__(self, replicas: Replicas, headers: Mapping[str, str]) -> None:
        """`headers` go with the gate's own calls (an API key)."""
        self._replicas = replicas
        self._headers = tuple(headers.items())
        self._open: OrderedDict[SessionId, list[ReplicaId]] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    def routes(self) -> list[Route]:
        return [Route("/open_session", self.open, methods=["GET", "POST"])]

    async def open(self, request: Request) -> Response:
        """The id alone, as a JSON string: SGLang's answer."""
        fields = await read_fields(request)
        session = text_field(fields, "session_id") or uuid.uuid4().hex
        check_label("session id", session)
        urls = [m.url for m in self._replicas.monitors() if m.adapter is not None and m.adapter.keeps_sessions]
        if not urls:
            raise RequestError("no replica keeps sessions: only SGLang does", status=404, reason="not_found")
        call = ControlCall(
            method="POST", path="/open_session", body=msgspec.json.encode({**fields, "session_id": session})
        )
        results = await fan_out(
            self._replicas.client,
            dict.fromkeys(urls, (call,)),
            headers=request.headers.items(),
            timeout_s=self._replicas.config.control_timeout_s,
        )
        opened = [result.url for result in results if result.ok]
        if not opened:
            status = results[0].status
            raise ReplicaError(
                f"no replica opened the session: {results[0].body or results[0].error}",
                reason="control_failed",
                status=status if status is not None and status >= 400 else 502,
            )
        self._open[session] = opened
        if len(self._open) > MAX_OPEN:
            forgotten, _ = self._open.popitem(last=False)
            log.warning("too many open sessions: one will not be closed at its engines", session=forgotten)
        return answer(session)

    def told(self, event: AnyEvent, decisions: Sequence[AnyDecision]) -> None:
        """What the scheduler was told and what it decided."""
        if not self._open:
            return
        if isinstance(event, SessionFinished):
            self._close(event.session)
        for decision in decisions:
            if isinstance(decision, Ended):
                self._close(decision.session)

    def _close(self, session: SessionId) -> None:
        urls = self._open.pop(session, None)
        if urls:
            task = asyncio.get_running_loop().create_task(self._tell(session, urls), name=f"close session {session}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _tell(self, session: SessionId, urls: list[ReplicaId]) -> None:
        call = ControlCall(method="POST", path="/close_session", body=msgspec.json.encode({"session_id": session}))
        listed = [url for url in urls if url in self._replicas]
        results = await fan_out(
            self._replicas.client,
            dict.fromkeys(listed, (call,)),
            headers=self._headers,
            timeout_s=self._replicas.config.health_timeout_s,
        )
        failed = {result.url: result.error for result in results if not result.ok}
        if failed:  # a restarted replica has forgotten it anyway
            log.warning("session not closed at its engines", session=session, failed=failed)

    async def close(self) -> None:
        """Those that are open stay so: the gate may be back before their clients are done."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
