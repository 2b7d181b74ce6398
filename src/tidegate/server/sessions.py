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
from tidegate.proxy.identity import SESSION_HEADERS, check_label
from tidegate.server.answers import answer, count_field, read_fields, text_field
from tidegate.types import AnyEvent, SessionFinished, SessionId, SessionOpened


class SessionsApi:
    def __init__(self, handle: Callable[[AnyEvent], None], knows: Callable[[SessionId], bool], clock: Clock) -> None:
        self._handle = handle
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
        session = _session_id(request, text_field(fields, "session_id", "id"))
        workload = text_field(fields, "workload", "workload_class", "class") or request.headers.get("x-workload-class")
        group = text_field(fields, "group", "group_id") or request.headers.get("x-group-id")
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
        session = _session_id(request, text_field(fields, "session_id", "program_id"))
        known = self._knows(session)
        self._handle(SessionFinished(at_s=self._clock.now_s(), session=session))
        return answer({"status": "ok", "session_id": session, "known": known})


def _session_id(request: Request, given: str | None) -> SessionId:
    headers = (request.headers.get(name.decode()) for name in SESSION_HEADERS)
    session = given or next((value.strip() for value in headers if value and value.strip()), None)
    if session is None:
        raise RequestError("no session id: give session_id, or the header X-Session-ID", reason="missing_session_id")
    check_label("session id", session)
    return session
