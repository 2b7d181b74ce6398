"""Telling the gate of sessions, never in a rollout's way: what is announced, and what is over.

An announcement is tried once: without it the gate learns of a session by its first request. The end is told in the
background until the gate has heard it: one that is away is tried for a while, at growing intervals, since it may be
restarting; after that the session is left to its idle time. Finish calls are idempotent, and a gate that does not know
the session (any more) does not mind. The end of a session is never told before its announcement is through.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from tidegate.client.errors import GateError
from tidegate.client.gate_api import GateApi, transient

log = logging.getLogger("tidegate.client")

AT_ONCE = 16  # finish calls; each takes a round trip
FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
GIVE_UP_S = 300.0  # a gate that restarts is back by then


class Courier:
    def __init__(self, gate: GateApi) -> None:
        self._gate = gate
        self._announcing: dict[str, asyncio.Task[None]] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._closed = False

    @property
    def unfinished(self) -> int:
        """Ends that the gate has not been told yet."""
        return len(self._finishing)

    def announce(self, id: str, **fields: str | int | None) -> asyncio.Task[None] | None:
        """Under way when this returns; the task never raises. Not awaiting it is fine. None: it is too late."""
        if self._closed:
            return None
        task = self._announcing[id] = asyncio.create_task(self._announce(id, fields), name=f"announce {id}")
        task.add_done_callback(partial(self._announced, id))
        return task

    def _announced(self, id: str, task: asyncio.Task[None]) -> None:
        if self._announcing.get(id) is task:
            del self._announcing[id]

    async def _announce(self, id: str, fields: dict[str, str | int | None]) -> None:
        try:
            await self._gate.start_session(id, **fields)
        except GateError as error:
            log.debug("session %s was not announced: %s", id, error)

    def finish(self, id: str) -> None:
        """Returns at once."""
        if self._closed:
            log.warning("session %s outlived its scheduler; the gate's idle time ends it", id)
            return
        task = asyncio.create_task(self._finish(id), name=f"finish {id}")
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _finish(self, id: str) -> None:
        announcing = self._announcing.get(id)
        if announcing is not None:
            await asyncio.wait({announcing})
        now_s = asyncio.get_running_loop().time
        give_up_s, wait_s = now_s() + GIVE_UP_S, FIRST_RETRY_S
        while True:
            try:
                async with self._turns:
                    await self._gate.finish_session(id)
                return
            except GateError as error:
                if not transient(error) or now_s() + wait_s > give_up_s:
                    log.warning("the gate was not told that session %s is over, its idle time ends it: %s", id, error)
                    return
            await asyncio.sleep(wait_s)
            wait_s = min(2.0 * wait_s, LONGEST_RETRY_S)

    async def settle(self, within_s: float) -> None:
        """What is under way gets so much more time; nothing is told after."""
        self._closed = True
        under_way = {*self._announcing.values(), *self._finishing}
        if under_way:
            _, left = await asyncio.wait(under_way, timeout=within_s)
            for task in left:
                task.cancel()
            if left:
                log.warning("the gate was not told of the end of %d sessions; its idle time ends them", len(left))
                await asyncio.gather(*left, return_exceptions=True)
