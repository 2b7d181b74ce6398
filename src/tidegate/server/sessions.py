"""The sessions API: a client says that a rollout begins, and that it is over.

    POST   /start_session               session_id, workload (or class), group, expected_tokens; query or JSON
    POST   /finish_session              session_id; query (prime-rl, SkyRL) or JSON
    DELETE /v1/router/session           header X-Session-ID, or session_id (verifiers' and prime-rl's forks)
    POST   /programs/release            program_id (ThunderAgent)
    POST   /close_session               session_id (SGLang)

All are idempotent, and an unknown id is no error: `known` tells. A client that retries must not fail for it.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.clock import Clock
from tidegate.errors import RequestError
from tidegate.proxy.identity import Identifier, Identity, check_label
from tidegate.proxy.seam import RequestHead
from tidegate.server.answers import answer, count_field, read_fields, text_field
from tidegate.types import AnyEvent, SessionFinished, SessionId, SessionOpened


class SessionsApi:
    def __init__(
        self,
        handle: Callable[[AnyEvent], None],
        knows: Callable[[SessionId], bool],
        identifier: Identifier,
        clock: Clock,
    ) -> None:
        """`identifier`: headers name a session here as they do in its requests."""
        self._handle = handle
        self._identifier = identifier
        self._knows = knows
        self._clock = clock

    def routes(self) -> list[Route]:
        return [
            Route("/start_session", self.start, methods=["POST"]),
            Route("/finish_session", self.finish, methods=["POST"]),
            Route("/close_session", self.finish, methods=["POST"]),
            Route("/programs/release", self.finish, methods=["POST"]),
            Route("/v1/router/session", self.finish, methods=["DELETE"]),
        ]

    async def start(self, request: Request) -> Response:
        fields = await read_fields(request)
        named = self._headers(request)
        session = _session_id(text_field(fields, "session_id", "id") or named.session)
        workload = text_field(fields, "workload", "workload_class", "class") or named.workload
        group = text_field(fields, "group", "group_id") or named.group
        if workload is not None:
            check_label("workload class", workload)
        if group is not None:
            check_label("group id", group)
        known = self._knows(session)
        self._handle(
            SessionOpened(
                at_s=self._clock.now_s(),
                session=session,
                workload=workload,
                group=group,
                expected_tokens=count_field(fields, "expected_tokens"),
            )
        )
        return answer({"status": "ok", "session_id": session, "known": known})

    async def finish(self, request: Request) -> Response:
        fields = await read_fields(request)
        session = _session_id(text_field(fields, "session_id", "program_id") or self._headers(request).session)
        known = self._knows(session)
        self._handle(SessionFinished(at_s=self._clock.now_s(), session=session))
        return answer({"status": "ok", "session_id": session, "known": known})

    def _headers(self, request: Request) -> Identity:
        return self._identifier.of_headers(RequestHead(request.method, b"/", request.headers.raw, None))


def _session_id(session: str | None) -> SessionId:
    if session is None:
        raise RequestError("no session id: give session_id, or the header X-Session-ID", reason="missing_session_id")
    check_label("session id", session)
    return session
