"""Trainers: who starts which rollout when, and when the weights change.

asynchronous  `in_flight` sessions at all times; whenever one ends, the next is released, of the class that the mixture
              rho asks for. With a `batch`, every so many completed sessions bring new weights, under way.
synchronous   iterations: `batch` sessions, at most `in_flight` at once; when the last has ended, a training step of
              `train_s`, new weights, and the next iteration.
staleness     as asynchronous, but a session may start only while at most (`staleness` + 1) batches have been started
              beyond what was trained on: nobody learns from weights older than that.
partial       `in_flight` sessions are started; when `batch` have ended, the others are interrupted, and go on after the
              training step from where they were: their context is computed anew, under new weights.
populations   a fixed number of sessions of each class (`populations`); one that ends is followed by one of its class.
              The mixture then is what the pool makes of it.

With `advice_poll_s` the number in flight is what the gate advises, asked for so often, and `in_flight` at most; the
gate is told the mixture. A session is never called off: one that is too many is not followed by another.

New weights: the pool is paused for `sync_s`, all caches are emptied, and running requests are computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Annotated, Literal, Protocol

import msgspec

from tidegate.sim.clients import Clients
from tidegate.sim.kernel import Kernel
from tidegate.sim.rollout import Rollout
from tidegate.sim.workload import DeficitRelease, SessionPlan, Workload, normalised
from tidegate.types import WorkloadClass

# A trainer's clients start one after the other, a loop that opens a connection and sends a prompt; a trainer with very
# many has many such loops, and is done within a second.
START_SPACING_S = 0.001
STARTED_WITHIN_S = 1.0


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    mode: Literal["asynchronous", "synchronous", "staleness", "partial", "populations"] = "asynchronous"
    in_flight: int = 16
    batch: int = 0  # sessions of one training step; 0: the weights never change
    train_s: float = 0.0
    sync_s: float = 10.0
    staleness: int = 1
    populations: dict[WorkloadClass, int] = {}
    advice_poll_s: Annotated[float, msgspec.Meta(gt=0)] | None = None

    def __post_init__(self) -> None:
        if self.mode in ("synchronous", "staleness", "partial") and self.batch < 1:
            raise ValueError(f"a {self.mode} trainer needs a batch")
        if self.mode == "partial" and self.batch > self.in_flight:
            raise ValueError(f"a batch of {self.batch} never completes with {self.in_flight} sessions in flight")
        if self.advice_poll_s is not None and self.mode in ("partial", "populations"):
            raise ValueError(f"a {self.mode} trainer's number of sessions is fixed: it takes no advice")


class Sessions:
    """The sessions of a workload in the order in which they are started; the mixture may change."""

    def __init__(self, workload: Workload) -> None:
        self._sources = workload.sources
        self._started: dict[WorkloadClass, int] = dict.fromkeys(workload.sources, 0)
        self.release = DeficitRelease(workload.shares)

    def next(self) -> SessionPlan:
        return self.next_of(self.release.next_class())

    def next_of(self, workload: WorkloadClass) -> SessionPlan:
        index = self._started[workload]
        self._started[workload] = index + 1
        return self._sources[workload].session(index)


class Trainer(Protocol):
    def start(self) -> None: ...
    def set_mixture(self, shares: dict[WorkloadClass, float]) -> None: ...


Sync = Callable[[float, Callable[[], None]], None]
"""sync(seconds, then): pause the pool, change its weights, resume it, and call back."""


class _Base:
    def __init__(self, kernel: Kernel, clients: Clients, workload: Workload, spec: TrainerSpec, sync: Sync) -> None:
        self.version = 0
        self.trained = 0  # sessions
        self._kernel = kernel
        self._clients = clients
        self._sessions = Sessions(workload)
        self._spec = spec
        self._sync = sync
        self._starting = 0  # released, not yet sent
        self._limit = spec.in_flight
        clients.over = self._over
        if spec.advice_poll_s is not None:
            self._limit = 0
            self._tell(workload.shares)
            kernel.every(spec.advice_poll_s, self._follow)

    def set_mixture(self, shares: dict[WorkloadClass, float]) -> None:
        self._sessions.release = DeficitRelease(shares)
        if self._spec.advice_poll_s is not None:
            self._tell(shares)

    def _tell(self, shares: dict[WorkloadClass, float]) -> None:
        self._clients.gate.set_mixture(normalised(shares))

    def _follow(self) -> None:
        advised = self._clients.gate.advisor.look().sessions
        more, self._limit = advised > self._limit, min(self._spec.in_flight, advised)
        if more:
            self._fill()

    def start(self) -> None:
        self._fill()

    @property
    def _open(self) -> int:
        return len(self._clients.live) + self._starting

    def _room(self) -> int:
        """Sessions that may start now."""
        return self._limit - self._open

    def _fill(self) -> None:
        room = self._room()
        for number in range(room):
            self._starting += 1
            self._kernel.after(number * min(START_SPACING_S, STARTED_WITHIN_S / room), self._release)

    def _release(self) -> None:
        self._starting -= 1
        self._clients.start(self._sessions.next(), self.version)

    def _over(self, rollout: Rollout) -> None:
        raise NotImplementedError

    def _new_weights(self, then: Callable[[], None]) -> None:
        self.version += 1
        self._sync(self._spec.sync_s, then)


class Asynchronous(_Base):
    def _over(self, rollout: Rollout) -> None:
        self._fill()
        self.trained += rollout.completed
        if self._spec.batch and self.trained >= self._spec.batch * (self.version + 1):
            self._new_weights(lambda: None)


class Synchronous(_Base):
    _left = 0  # sessions of this iteration that have not started

    def start(self) -> None:
        self._left = self._spec.batch
        self._fill()

    def _room(self) -> int:
        return min(self._left - self._starting, super()._room())

    def _release(self) -> None:
        self._left -= 1
        super()._release()

    def _over(self, rollout: Rollout) -> None:
        self._fill()
        if not self._open:
            self.trained += self._spec.batch
            self._kernel.after(self._spec.train_s, self._new_weights, self.start)


class Staleness(_Base):
    _started = 0
    _completed = 0
    _training = False

    def _room(self) -> int:
        ahead = (self._spec.staleness + 1) * self._spec.batch
        return min(super()._room(), self.trained + ahead - self._started - self._starting)

    def _release(self) -> None:
        self._started += 1
        super()._release()

    def _over(self, rollout: Rollout) -> None:
        self._completed += 1
        self._fill()
        self._train()

    def _train(self) -> None:
        if not self._training and self._completed - self.trained >= self._spec.batch:
            self._training = True
            self._kernel.after(self._spec.train_s, self._new_weights, self._trained)

    def _trained(self) -> None:
        self._training = False
        self.trained += self._spec.batch
        self._fill()
        self._train()


class Partial(_Base):
    _completed = 0
    _training = False

    def __init__(self, kernel: Kernel, clients: Clients, workload: Workload, spec: TrainerSpec, sync: Sync) -> None:
        super().__init__(kernel, clients, workload, spec, sync)
        self._interrupted: deque[Rollout] = deque()

    def _room(self) -> int:
        return 0 if self._training else super()._room()

    def _over(self, rollout: Rollout) -> None:
        self._completed += 1
        if not self._training and self._completed >= self._spec.batch:
            self._training = True
            self._interrupted.extend(self._clients.live.values())
            for each in self._interrupted:
                self._clients.interrupt(each)
            self._kernel.after(self._spec.train_s, self._new_weights, self._go_on)
        self._fill()

    def _go_on(self) -> None:
        self.trained += self._completed
        self._completed = 0
        self._training = False
        while self._interrupted:
            self._clients.resume(self._interrupted.popleft())
        self._fill()


class Populations(_Base):
    def start(self) -> None:
        number = 0
        for workload, sessions in self._spec.populations.items():
            for _ in range(sessions):
                self._kernel.after(number * START_SPACING_S, self._start_one, workload)
                number += 1

    def _start_one(self, workload: WorkloadClass) -> None:
        self._clients.start(self._sessions.next_of(workload), self.version)

    def _over(self, rollout: Rollout) -> None:
        self._start_one(rollout.plan.workload)


_MODES: dict[str, type[_Base]] = {
    "asynchronous": Asynchronous,
    "synchronous": Synchronous,
    "staleness": Staleness,
    "partial": Partial,
    "populations": Populations,
}


def trainer(kernel: Kernel, clients: Clients, workload: Workload, spec: TrainerSpec, sync: Sync) -> Trainer:
    return _MODES[spec.mode](kernel, clients, workload, spec, sync)
