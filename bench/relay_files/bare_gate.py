"""The data path with the least handler: one replica, the session id read, nothing counted. Shows what the path costs.

python bench/relay_files/bare_gate.py PORT REPLICA_URL [SECONDS PROFILE_FILE]
"""

from __future__ import annotations

import asyncio
import cProfile
import sys

import uvloop

from tidegate.config.tree import HttpConfig
from tidegate.errors import TidegateError
from tidegate.proxy.relay import serve
from tidegate.proxy.seam import AsgiApp, Exchange, RequestHead
from tidegate.types import Outcome


class BareHandler:
    def __init__(self, replica: str) -> None:
        self.replica = replica

    def route(self, head: RequestHead) -> AsgiApp | None:
        return None

    def wants_body(self, head: RequestHead) -> bool:
        return head.get(b"x-session-id") is None and head.method == "POST"

    def opened(self, exchange: Exchange, body: bytes | None) -> None:
        exchange.place(self.replica)

    def returned(self, exchange: Exchange, replica: str, error: TidegateError) -> None:
        exchange.reject(error)

    def ended(self, exchange: Exchange, outcome: Outcome, error: TidegateError | None) -> None:
        pass


async def main(port: int, replica: str, seconds: float, profile: str) -> None:
    listener = await serve(BareHandler(replica), HttpConfig(), port=port)
    if not profile:
        await asyncio.Event().wait()
    profiler = cProfile.Profile()
    profiler.enable()
    await asyncio.sleep(seconds)
    profiler.disable()
    profiler.dump_stats(profile)
    await listener.close()


if __name__ == "__main__":
    seconds, profile = (float(sys.argv[3]), sys.argv[4]) if len(sys.argv) > 3 else (0.0, "")
    uvloop.run(main(int(sys.argv[1]), sys.argv[2], seconds, profile))
