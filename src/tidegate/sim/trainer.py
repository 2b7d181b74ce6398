"""Trainers: who starts which rollout when.

asynchronous   `in_flight` sessions at all times; whenever one ends, the next is released, of the class that the mixture
               rho asks for. All start at once, as a trainer's do.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tidegate.sim.clients import Clients
from tidegate.sim.rollout import Rollout
from tidegate.sim.workload import DeficitRelease, SessionStream, Workload


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    mode: Literal["asynchronous"] = "asynchronous"
    in_flight: int = 16


class Asynchronous:
    def __init__(self, clients: Clients, workload: Workload, in_flight: int) -> None:
        self._clients = clients
        self._stream = SessionStream(workload, DeficitRelease(workload.shares))
        self._in_flight = in_flight
        clients.over = self._over

    def start(self) -> None:
        for _ in range(self._in_flight):
            self._clients.start(self._stream.next_session())

    def _over(self, rollout: Rollout) -> None:
        self._clients.start(self._stream.next_session())
