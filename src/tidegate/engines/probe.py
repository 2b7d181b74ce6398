"""One GET of a replica, with its failure sorted by what it says about the replica.

connect   refused, unreachable, no such host, or the connection broke: nothing serves there
hang      it took the connection and did not answer in time: busy, or stuck
status    it answered something that is not HTTP
None      no file was left for a connection, here: it says nothing of the replica
"""

from __future__ import annotations

import asyncio

import aiohttp
from msgspec import Struct
from yarl import URL

from tidegate.engines.control import describe, read_up_to
from tidegate.engines.health import ProbeFailure
from tidegate.open_files import out_of_files

# A scrape is compressed only at the cost of the engine's own event loop, and replicas are near.
_HEADERS = {"accept-encoding": "identity"}


class Answer(Struct, frozen=True):
    status: int
    body: bytes


class Unanswered(Struct, frozen=True):
    kind: ProbeFailure | None
    error: str


async def get(
    session: aiohttp.ClientSession, url: str, *, timeout_s: float, connect_timeout_s: float, limit_bytes: int
) -> Answer | Unanswered:
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.get(
                URL(url, encoded=True),
                headers=_HEADERS,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            ) as response,
        ):
            return Answer(response.status, await read_up_to(response, limit_bytes))
    except aiohttp.ConnectionTimeoutError as error:
        return Unanswered("connect", describe(error))
    except TimeoutError:
        return Unanswered("hang", f"no answer within {timeout_s:g} s")
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        ours = isinstance(cause, OSError) and out_of_files(cause)
        return Unanswered(None if ours else "connect", describe(error))
    except (aiohttp.ClientError, ValueError) as error:
        return Unanswered("status", describe(error))
