"""Control calls to replicas: one call, or one call to many at once with a report for each.

A slow replica costs its own timeout and holds back no other's call. A call is never repeated: a pause or a weight
update that failed half-way is the caller's to judge, from the report.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from tidegate.config.engines import EnginesConfig
from tidegate.engines.base import UNREADABLE, ControlCall
from tidegate.types import ReplicaId

# Between us and our client, or set by our own client library.
_NOT_FORWARDED = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_MAX_REPORT_BYTES = 1_048_576  # of a replica's answer
_MAX_CONNECTIONS = 4096  # replicas are hundreds; each has a scrape, a probe and a control call under way
_MAX_CONNECTIONS_PER_REPLICA = 64


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica answered. `ok`: 2xx, and no `"success": false` in it."""

    url: ReplicaId
    status: int | None  # None: no answer
    ok: bool
    called: str = ""  # method and path, in the replica's own dialect
    body: Any = None  # decoded JSON, or text
    error: str | None = None
    elapsed_s: float = 0.0


def control_session(config: EnginesConfig, headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """The session that probes, scrapes and control calls share, all of them with `headers`. It must be made inside the
    event loop."""
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(
            limit=_MAX_CONNECTIONS,
            limit_per_host=_MAX_CONNECTIONS_PER_REPLICA,
            keepalive_timeout=config.keep_alive_s,
            ttl_dns_cache=10,  # replicas move behind their names
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=2**18,
    )


async def fan_out(
    session: aiohttp.ClientSession,
    calls: Mapping[ReplicaId, Sequence[ControlCall]],
    *,
    headers: Sequence[tuple[str, str]] = (),
    timeout_s: float,
) -> list[Result]:
    """To all replicas at once, each its own calls one after the other; results in their order."""
    return await asyncio.gather(
        *(in_turn(session, url, wanted, headers=headers, timeout_s=timeout_s) for url, wanted in calls.items())
    )


async def in_turn(
    session: aiohttp.ClientSession,
    url: ReplicaId,
    calls: Sequence[ControlCall],
    *,
    headers: Sequence[tuple[str, str]] = (),
    timeout_s: float,
) -> Result:
    """Until one fails, whose result it is; else the last one's."""
    result = Result(url=url, status=None, ok=False, error="this engine has no such call")
    called: list[str] = []
    for wanted in calls:
        result = await call(
            session,
            url,
            wanted.method,
            wanted.path,
            query=wanted.query,
            headers=headers,
            body=wanted.body,
            timeout_s=timeout_s,
        )
        called.append(f"{wanted.method} {wanted.path}")
        if not result.ok:
            break
    return msgspec.structs.replace(result, called=", ".join(called))


async def call(
    session: aiohttp.ClientSession,
    url: ReplicaId,
    method: str,
    path: str,
    *,
    query: str = "",
    headers: Sequence[tuple[str, str]] = (),
    body: bytes | None = None,
    timeout_s: float,
) -> Result:
    """Never raises for what a replica does: a failure is a Result."""
    started_s = time.perf_counter()
    target = URL(f"{url}{path}?{query}" if query else f"{url}{path}", encoded=True)
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.request(
                method, target, headers=_forwarded(headers, body), data=body, allow_redirects=False
            ) as response,
        ):
            text = await read_up_to(response, _MAX_REPORT_BYTES)
            status = response.status
    except TimeoutError:
        return _failure(url, started_s, f"no answer within {timeout_s:g} s")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return _failure(url, started_s, describe(error))
    answer = _decoded(text)
    refused = isinstance(answer, dict) and answer.get("success") is False
    ok = 200 <= status < 300 and not refused
    return Result(
        url=url,
        status=status,
        ok=ok,
        body=answer,
        error=None if ok else f"status {status}" + (", success is false" if refused else ""),
        elapsed_s=time.perf_counter() - started_s,
    )


def describe(error: BaseException) -> str:
    """An error in one line, its type first where the message is empty."""
    return str(error) or type(error).__name__


def _failure(url: ReplicaId, started_s: float, error: str) -> Result:
    return Result(url=url, status=None, ok=False, error=error, elapsed_s=time.perf_counter() - started_s)


def _forwarded(headers: Sequence[tuple[str, str]], body: bytes | None) -> CIMultiDict[str]:
    forwarded = CIMultiDict((name, value) for name, value in headers if name.lower() not in _NOT_FORWARDED)
    if body is not None:
        forwarded.setdefault("content-type", "application/json")
    return forwarded


async def read_up_to(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > limit_bytes:
            break
    return b"".join(chunks)[:limit_bytes]


def _decoded(text: bytes) -> Any:
    if not text:
        return None
    try:
        return msgspec.json.decode(text)
    except UNREADABLE:
        return text.decode(errors="replace")
