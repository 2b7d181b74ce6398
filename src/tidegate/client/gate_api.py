"""The gate's HTTP API, as far as a trainer needs it. Calls raise GateUnreachable or GateRefused, nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from tidegate.client.errors import GateError, GateRefused, GateUnreachable
from tidegate.client.slots import Label, Limits

CALL_TIMEOUT_S = 5.0  # of calls that the gate answers by itself, at once
CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Advice:
    """GET /advice, as far as it is used here."""

    limits: Limits
    paused: bool
    mixture_given: bool
    reason: str


class GateApi:
    def __init__(self, base_url: str, *, headers: Mapping[str, str] | None = None) -> None:
        """`base_url`: of the gate, with or without the /v1 that OpenAI clients want. `headers`: sent with each call."""
        root = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
        if not root.startswith(("http://", "https://")):
            raise ValueError(f"{base_url!r} is not an http or https URL")
        self.root = root
        self._headers = dict(headers or {})
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._http = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=32))

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    # --- what the scheduler asks -------------------------------------------------------------------------------
    async def advice(self) -> Advice:
        told = await self.call("GET", "/advice")
        try:
            classes: dict[Label, int] = {name: max(1, int(one["sessions"])) for name, one in told["classes"].items()}
            return Advice(
                limits=Limits(max(0, int(told["sessions"])), classes),
                paused=bool(told["paused"]),
                mixture_given=bool(told["mixture_given"]),
                reason=str(told["reason"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise GateRefused(f"what answers at {self.root} gives no advice", 200, None) from exc

    async def set_mixture(self, shares: Mapping[str, float]) -> None:
        await self.call("PUT", "/mixture", body={"shares": dict(shares)})

    async def start_session(self, session: str, **fields: str | int | None) -> None:
        body = {"session_id": session, **{name: value for name, value in fields.items() if value is not None}}
        await self.call("POST", "/start_session", body=body)

    async def finish_session(self, session: str) -> None:
        await self.call("POST", "/finish_session", body={"session_id": session})

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        timeout_s: float | None = CALL_TIMEOUT_S,
    ) -> Any:
        """The decoded JSON of a 200; `timeout_s` None: for as long as it takes."""
        http = self._http
        if http is None or http.closed:
            raise GateUnreachable("the scheduler is not open")
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with http.request(method, self.root + path, params=query, json=body, timeout=timeout) as reply:
                text = await reply.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise GateUnreachable(f"{self.root}{path}: {exc or type(exc).__name__}") from exc
        return _decoded(text, reply.status, f"{self.root}{path}")


def _decoded(text: str, status: int, what: str) -> Any:
    try:
        answer: Any = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if status != 200:
        error = answer.get("error") if isinstance(answer, dict) else None
        known = error if isinstance(error, dict) else {}
        raise GateRefused(f"{what}: {status} {known.get('message', text[:200])}", status, known.get("code"))
    if not isinstance(answer, dict):
        raise GateRefused(f"{what}: not a JSON object", status, None)
    return answer


def transient(error: GateError) -> bool:
    """Whether the same call may succeed later."""
    return not isinstance(error, GateRefused) or error.status == 429 or error.status >= 500
