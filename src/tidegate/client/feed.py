"""The number of sessions in flight, as the gate advises it: asked for every few seconds.

    following   the gate answers: this scheduler's `part` of its advice, at most `max_sessions`
    fixed       there is no gate, it has not answered yet, or what answers gives no advice: the user's own numbers
    last        it answered before and does not now (a restart): its last advice, which is still the best guess

What changes is said once, in the log. A gate that comes back without a mixture (it has restarted) is told it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import floor
from typing import Literal, TypeAlias

from tidegate.client.errors import GateError
from tidegate.client.gate_api import Advice, GateApi
from tidegate.client.slots import Limits

log = logging.getLogger("tidegate.client")

Source: TypeAlias = Literal["following", "fixed", "last"]


class Feed:
    def __init__(
        self,
        gate: GateApi,
        fixed: Limits,
        *,
        part: float,
        max_sessions: int | None,
        poll_s: float,
        set_limits: Callable[[Limits], None],
        tell_mixture: Callable[[], Awaitable[bool]],
        observed_pause: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`tell_mixture` gives the gate the mixture, and says whether there is one."""
        self.source: Source = "fixed"
        self.reason = "no advice yet"
        self._gate = gate
        self._fixed = fixed
        self._part = part
        self._max_sessions = max_sessions
        self._poll_s = poll_s
        self._set_limits = set_limits
        self._tell_mixture = tell_mixture
        self._observed_pause = observed_pause
        self._said: Source | None = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self.poll()

    async def poll(self) -> None:
        """Ask once; never raises but for a cancellation."""
        try:
            advice = await self._gate.advice()
            if not advice.mixture_given and await self._tell_mixture():
                advice = await self._gate.advice()
        except GateError as error:
            self._lost(error)
            return
        self._heard(advice)
        await self._observed_pause(advice.paused)

    def _heard(self, advice: Advice) -> None:
        self.source, self.reason = "following", advice.reason
        sessions = self._own(advice.limits.sessions)
        if self._max_sessions is not None:
            sessions = min(sessions, self._max_sessions)
        self._set_limits(Limits(sessions, {name: self._own(number) for name, number in advice.limits.classes.items()}))
        self._say(f"following the advice of the gate at {self._gate.root}: {sessions} sessions ({advice.reason})")

    def _own(self, sessions: int) -> int:
        return max(1, floor(sessions * self._part + 1e-9))

    def _lost(self, error: GateError) -> None:
        self.reason = str(error)
        if self.source == "fixed":
            self._say(f"no advice, {self._fixed.sessions} sessions at most: {error}")
        else:
            self.source = "last"
            self._say(f"the gate does not answer, its last advice stands: {error}")

    def _say(self, what: str) -> None:
        if self._said != self.source:
            self._said = self.source
            log.log(logging.INFO if self.source == "following" else logging.WARNING, what)
