"""Trainers: who starts which rollout when.

asynchronous   `in_flight` sessions at all times; whenever one ends, the next is released, of the class that the mixture
               rho asks for. All start at once, as a trainer's do.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tidegate.sim.clients import Clients
from tidegate.sim.kernel import Kernel
from tidegate.sim.rollout import Rollout
from tidegate.sim.workload import DeficitRelease, SessionStream, Workload

# A trainer's clients start one after the other: a loop that opens a connection and sends a prompt.
START_SPACING_S = 0.001


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    mode: Literal["asynchronous"] = "asynchronous"
    in_flight: int = 16


class Asynchronous:
    def __init__(self, kernel: Kernel, clients: Clients, workload: Workload, in_flight: int) -> None:
        self._kernel = kernel
        self._clients = clients
        self._stream = SessionStream(workload, DeficitRelease(workload.shares))
        self._in_flight = in_flight
        clients.over = self._over

    def start(self) -> None:
        for number in range(self._in_flight):
            self._kernel.after(number * START_SPACING_S, self._release)

    def _over(self, rollout: Rollout) -> None:
        self._release()

    def _release(self) -> None:
        self._clients.start(self._stream.next_session())
