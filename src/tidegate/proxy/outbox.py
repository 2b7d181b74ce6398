"""Makes the writes of one turn of the event loop together, when all that has arrived in it is handled.

A send wakes its receiver if that sleeps, and then costs several times as much. Written one by one, each to a peer that
has gone back to sleep meanwhile, the sends of a busy gate take half of the kernel's time for it; written in a row, the
first one wakes the peer and the others find it awake. A lone write is delayed by nothing but the end of its turn. What
is much is written at once, so that a transport can say that it is full.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from tidegate.proxy.seam import Chunk

log = logging.getLogger("tidegate.proxy")


WAITING_MAX_BYTES: Final = 65_536  # of one turn; sends of this size cost more than any wake-up


class Outbox:
    __slots__ = ("_loop", "_size", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[tuple[asyncio.Transport, Chunk, Chunk]] = []
        self._size = 0

    def write(self, transport: asyncio.Transport, data: Chunk, more: Chunk = b"") -> None:
        """`more` goes with it in one system call, and is not copied."""
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append((transport, data, more))
        self._size += len(data) + len(more)
        if self._size >= WAITING_MAX_BYTES:
            self.flush()

    def flush(self) -> None:
        """To be called before a transport is closed whose last words are to go out."""
        waiting, self._waiting, self._size = self._waiting, [], 0
        for transport, data, more in waiting:
            if not transport.is_closing():
                try:
                    if more:
                        transport.writelines((data, more))
                    else:
                        transport.write(data)
                except Exception:  # one broken transport must not take the others' bytes
                    log.exception("fault while writing")
                    transport.abort()
