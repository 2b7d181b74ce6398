"""The API server's side: routes under /tidegate, answered by the engine cores.

Calls take JSON, {"session_id": s} or {"session_ids": [s, ..]}, or ?session_id= in the query. An unknown session is no
error: it may have ended before its first request. Each data-parallel engine has tables of its own: a call goes to all
of them, and its numbers are sums. Errors have vLLM's shape, which is OpenAI's with the status as `code`.

vLLM asks for the API key on its own paths only (/v1 and the like), so the routes here ask by themselves, for the same
keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tidegate import __version__
from tidegate.integrations.vllm_plugin import NAME, compat
from tidegate.integrations.vllm_plugin.engine import METHOD
from tidegate.integrations.vllm_plugin.protocol import (
    FEATURES,
    MAX_SESSION_ID_BYTES,
    MAX_SESSIONS_PER_CALL,
    PROTOCOL,
)

ENGINE_TIMEOUT_S = 30.0  # a call waits for the step under way; the longest ones take seconds
MAX_BODY_BYTES = 2 * MAX_SESSIONS_PER_CALL * MAX_SESSION_ID_BYTES

_SUMS = ("known_sessions", "moved_blocks", "kept_blocks", "running_requests")


class Refused(Exception):
    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": kind, "param": param, "code": status}


class Endpoint:
    """vLLM's EndpointPlugin."""

    name = NAME
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._engine_version = ""
        self._keys: list[bytes] = []
        self._refusal: str | None = "the server has not started"
        self._instance = uuid.uuid4().hex  # another one after a restart

    # --- what vLLM calls ------------------------------------------------------------------------------------------
    def attach_router(self, app: Any) -> None:
        for name in ("release", "demote", "protect"):
            app.add_route(f"/tidegate/{name}", self._guarded(self._order(name)), methods=["POST"])
        app.add_route("/tidegate/sessions", self._guarded(self._sessions), methods=["GET"])
        app.add_route("/tidegate/info", self._guarded(self._info), methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        keys = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
        self._keys = [_digest(key) for key in ([keys] if isinstance(keys, str) else keys) if key]
        engine = getattr(engine_client, "engine_core", None)
        refusal = compat.refusal()
        if refusal is None and engine is None:
            refusal = "this server has no engine core"
        self.start(engine, compat.version(), refusal)

    def start(self, engine: Any, version: str, refusal: str | None = None) -> None:
        """`engine` has vLLM's call_utility_all_async, or its call_utility_async."""
        self._engine, self._engine_version, self._refusal = engine, version, refusal

    # --- routes -----------------------------------------------------------------------------------------------------
    def _guarded(self, answer: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            try:
                self._authenticate(request)
                return JSONResponse(await answer(request))
            except Refused as refused:
                return JSONResponse({"error": refused.error}, status_code=refused.status)

        return route

    def _order(self, name: str) -> Callable[[Request], Awaitable[dict[str, Any]]]:
        async def order(request: Request) -> dict[str, Any]:
            sessions = await _named_sessions(request)
            results = await self._call(name, sessions)
            sums = {key: sum(result.get(key, 0) for result in results) for key in _SUMS}
            # A session of several engines is one session.
            return {"sessions": len(sessions), **sums, "known_sessions": min(sums["known_sessions"], len(sessions))}

        return order

    async def _sessions(self, request: Request) -> dict[str, Any]:
        named = request.query_params.getlist("session_id")
        results = await self._call("sessions", [_checked(name) for name in named] or None)
        merged: dict[str, dict[str, Any]] = {}
        for result in results:
            for name, entry in result["sessions"].items():
                known = merged.setdefault(
                    name, {key: 0 if type(value) is int else value for key, value in entry.items()}
                )
                for key, value in entry.items():
                    known[key] = known[key] + value if type(value) is int else known[key] and value
        return {"sessions": merged}

    async def _info(self, request: Request) -> dict[str, Any]:
        """Answers, with what is known, also where the plugin is off."""
        off, engines = self._refusal, []
        if off is None:
            engines = await self._engines("info", None)
            reasons = [engine["off"] for engine in engines if engine.get("off")]
            off = reasons[0] if reasons else None
        return {
            "plugin": NAME,
            "version": __version__,
            "protocol": PROTOCOL,
            "features": list(FEATURES) if off is None else [],
            "off": off,
            "instance": self._instance,
            "engine_version": self._engine_version,
            "engines": engines,
        }

    # --- the engine cores -------------------------------------------------------------------------------------------
    async def _call(self, name: str, sessions: list[str] | None) -> list[dict[str, Any]]:
        if self._refusal is not None:
            raise Refused(503, "ServiceUnavailableError", f"the tidegate plugin is off: {self._refusal}")
        results = await self._engines(name, sessions)
        for result in results:
            if result.get("off"):
                raise Refused(503, "ServiceUnavailableError", f"the tidegate plugin is off: {result['off']}")
        return results

    async def _engines(self, name: str, sessions: list[str] | None) -> list[dict[str, Any]]:
        engine = self._engine
        to_all = getattr(engine, "call_utility_all_async", None)
        try:
            async with asyncio.timeout(ENGINE_TIMEOUT_S):
                if to_all is not None:
                    return list(await to_all(METHOD, name, sessions))
                return [await engine.call_utility_async(METHOD, name, sessions)]
        except TimeoutError:
            raise Refused(504, "TimeoutError", f"the engine did not answer within {ENGINE_TIMEOUT_S:g} s") from None
        except Exception as error:  # the engine is shutting down or dead, or has not loaded the plugin
            raise Refused(503, "ServiceUnavailableError", f"the engine refused: {error}") from error

    def _authenticate(self, request: Request) -> None:
        if not self._keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = _digest(key)
        # Every key is compared, so that the time says nothing about which one is close.
        right = [hmac.compare_digest(given, wanted) for wanted in self._keys]
        if scheme.lower() != "bearer" or not any(right):
            raise Refused(401, "AuthenticationError", "Unauthorized")


async def _named_sessions(request: Request) -> list[str]:
    named: Any = request.query_params.getlist("session_id")
    body = await _body(request)
    if body:
        given = _json_object(body)
        one, many = given.get("session_id"), given.get("session_ids")
        if many is not None and not isinstance(many, list):
            raise Refused(400, "BadRequestError", "session_ids is a list of strings", "session_ids")
        named = [*named, *([one] if one is not None else []), *(many or [])]
    if not named:
        raise Refused(400, "BadRequestError", "no session: give session_id or session_ids", "session_id")
    if len(named) > MAX_SESSIONS_PER_CALL:
        raise Refused(400, "BadRequestError", f"more than {MAX_SESSIONS_PER_CALL} sessions in one call", "session_ids")
    return list(dict.fromkeys(_checked(name) for name in named))


async def _body(request: Request) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise Refused(413, "BadRequestError", f"the body has more than {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "BadRequestError", "the body is not JSON") from None
    if not isinstance(given, dict):
        raise Refused(400, "BadRequestError", "the body is not a JSON object")
    return given


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise Refused(400, "BadRequestError", "a session id is a string that is not empty", "session_id")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise Refused(400, "BadRequestError", "a session id is valid Unicode", "session_id") from None
    if size > MAX_SESSION_ID_BYTES:
        raise Refused(
            400, "BadRequestError", f"a session id has at most {MAX_SESSION_ID_BYTES} bytes, not {size}", "session_id"
        )
    return name


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
