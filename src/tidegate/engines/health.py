"""Whether a replica may take requests: a pure state machine of facts, with their times.

Facts are kept, and the state follows from them in a fixed order of precedence, the first that holds:

    state        when                                                              ends when
    starting     no probe was answered well yet: engines say 503 while they load   one is, or unreachable
    unreachable  `unhealthy_after` probes in a row were refused or timed out       a probe is answered
                 while connecting
    sleeping     the engine says that it sleeps                                    the engine says that it woke
    paused       the engine says that generation is paused                         the engine says that it runs
    draining     it answered a new request with an empty abort                     `drain_s`, then half_open
    ejected      `eject_after` requests in a row could not connect                 the back-off, then half_open
    unhealthy    probes answered 5xx; or requests wait, none runs, nothing moves   a good probe; something moves
                 (livelock); or health hangs and nothing moves (stalled)
    half_open    an ejection or a drain is over: requests may try it               a good answer, or three good probes
    healthy      otherwise

Only half_open and healthy replicas take requests. A slow replica is never left for being slow: a probe that connects
and then hangs counts only together with counters that stand still, and never against the last usable replica. An
answer of any status from a request, 4xx and a shed 429 or 503 too, shows that the replica lives.

A replica can lose requests without breaking their connections: vLLM that was told to shut down accepts some that nobody
will answer, and then does not end because of them. `lost_before_s` tells of such requests, by when they were sent.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidegate.config.engines import EnginesConfig

ProbeFailure: TypeAlias = Literal["connect", "hang", "status"]

_HALF_OPEN_PROBES = 3  # without requests to try it, this many good probes close the matter


class State(enum.StrEnum):
    STARTING = "starting"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    EJECTED = "ejected"
    HALF_OPEN = "half_open"
    DRAINING = "draining"
    PAUSED = "paused"
    SLEEPING = "sleeping"
    UNREACHABLE = "unreachable"

    @property
    def usable(self) -> bool:
        return self in (State.HEALTHY, State.HALF_OPEN)


_REASONS = {
    State.HEALTHY: "ok",
    State.UNREACHABLE: "connect_failed",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    state: State
    reason: str  # of a ReplicaHealth event

    @property
    def usable(self) -> bool:
        return self.state.usable


class Health:
    def __init__(self, config: EnginesConfig) -> None:
        self._config = config
        self.last_error: str | None = None
        self._answered = False
        self._failures: dict[ProbeFailure, int] = {"connect": 0, "hang": 0, "status": 0}
        self._hanging_since_s: float | None = None
        self._refusing_since_s: float | None = None  # the first of the probes in a row that could not connect
        self._idle_since_s: float | None = None  # nothing runs, nothing waits
        self._sampled_at_s = 0.0
        self._connects_failed = 0
        self._left_until_s: float | None = None  # the end of an ejection or a drain
        self._left_state = State.EJECTED
        self._times_left = 0
        self._trial_probes_left = 0
        self._paused = False
        self._sleeping = False
        self._progress: tuple[int | None, ...] | None = None
        self._progress_at_s: float | None = None
        self._stuck_since_s: float | None = None  # waiting and none running

    # --- facts -------------------------------------------------------------------------------------------------
    def probe_ok(self) -> None:
        self._answered = True
        self._hanging_since_s = self._refusing_since_s = None
        for kind in self._failures:
            self._failures[kind] = 0
        if self._trial_probes_left:
            self._trial_probes_left -= 1
            if not self._trial_probes_left:
                self._trusted()

    def probe_failed(self, at_s: float, kind: ProbeFailure, error: str) -> None:
        self.last_error = error
        self._failures[kind] += 1
        if kind == "hang":
            if self._hanging_since_s is None:
                self._hanging_since_s = at_s
        else:
            self._hanging_since_s = None
        if kind == "connect":
            if self._refusing_since_s is None:
                self._refusing_since_s = at_s
        else:
            self._refusing_since_s = None
            if kind == "status" and self._failures["connect"] >= self._config.unhealthy_after:
                self._answered = False  # what answers now is another process, and not ready
            self._failures["connect"] = 0

    def connect_failed(self, at_s: float, error: str) -> None:
        """A request found no connection, or its connection broke before a byte of the answer."""
        self.last_error = error
        self._connects_failed += 1
        trying = bool(self._trial_probes_left)
        if trying or self._connects_failed >= self._config.eject_after:
            self._leave(at_s, State.EJECTED, self._config.eject_s)

    def response_ok(self) -> None:
        """A request was answered, with any status."""
        self._connects_failed = 0
        if self._trial_probes_left:
            self._trusted()

    def empty_abort(self, at_s: float) -> None:
        self.last_error = "answered a new request with an empty abort"
        if self._left_until_s is None:
            self._leave(at_s, State.DRAINING, self._config.drain_s)

    def paused(self, paused: bool) -> None:
        if paused != self._paused:
            self._paused, self._idle_since_s = paused, None

    def sleeping(self, sleeping: bool) -> None:
        if sleeping != self._sleeping:
            self._sleeping, self._idle_since_s = sleeping, None

    def sampled(self, at_s: float, running: int | None, waiting: int | None, totals: tuple[int | None, ...]) -> None:
        """A reading of the replica's numbers; `totals` are the counters that move when it works."""
        if totals != self._progress:
            self._progress, self._progress_at_s = totals, at_s
            self._stuck_since_s = None
        self._sampled_at_s = at_s
        if running != 0 or waiting != 0 or self._paused or self._sleeping:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = at_s
        if not waiting or running is None or running > 0:
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = at_s

    def restarted(self) -> None:
        """A new process answers: what was held against the old one is void."""
        self._left_until_s = None
        self._trial_probes_left = self._times_left = self._connects_failed = 0
        self._stuck_since_s = self._hanging_since_s = self._idle_since_s = None

    def lost_before_s(self, now_s: float) -> float | None:
        """Requests sent before this that have no answer yet will not get one. None: none is known to be lost.

        vLLM's gauges stand still during a step, and the first steps compile: only idleness that outlasts that counts.
        """
        if _longer(self._refusing_since_s, now_s, self._config.lost_after_s):
            return self._refusing_since_s
        if _longer(self._idle_since_s, self._sampled_at_s, self._config.stalled_after_s):
            return self._idle_since_s
        return None

    # --- the state ---------------------------------------------------------------------------------------------
    def verdict(self, now_s: float, last_usable: Callable[[], bool] = lambda: False) -> Verdict:
        """`last_usable` says whether no other replica may take requests; it is asked only where that matters."""
        state = self._state_without_trouble(now_s)
        if state is not State.HEALTHY and state is not State.HALF_OPEN:
            return Verdict(state, _REASONS.get(state, str(state)))
        if self._failures["status"] >= self._config.unhealthy_after:
            return Verdict(State.UNHEALTHY, "health_failed")
        if _longer(self._stuck_since_s, now_s, self._config.livelock_after_s):
            return Verdict(State.UNHEALTHY, "livelock")
        if self._stalled(now_s) and not last_usable():
            return Verdict(State.UNHEALTHY, "stalled")
        return Verdict(state, _REASONS.get(state, str(state)))

    def _state_without_trouble(self, now_s: float) -> State:
        if self._failures["connect"] >= self._config.unhealthy_after:
            return State.UNREACHABLE
        if not self._answered:
            return State.STARTING
        if self._sleeping:
            return State.SLEEPING
        if self._paused:
            return State.PAUSED
        if self._left_until_s is not None:
            if now_s < self._left_until_s or self._failures["connect"] or self._failures["status"]:
                return self._left_state
            self._left_until_s = None
            self._trial_probes_left = _HALF_OPEN_PROBES
        return State.HALF_OPEN if self._trial_probes_left else State.HEALTHY

    def _stalled(self, now_s: float) -> bool:
        limit_s = self._config.stalled_after_s
        return _longer(self._hanging_since_s, now_s, limit_s) and (
            self._progress_at_s is None or _longer(self._progress_at_s, now_s, limit_s)
        )

    def _leave(self, at_s: float, state: State, first_s: float) -> None:
        length_s = min(first_s * 2**self._times_left, max(self._config.eject_max_s, first_s))
        self._times_left = min(self._times_left + 1, 32)
        self._left_until_s, self._left_state = at_s + length_s, state
        self._trial_probes_left = self._connects_failed = 0

    def _trusted(self) -> None:
        self._trial_probes_left = self._times_left = 0


def _longer(since_s: float | None, now_s: float, limit_s: float) -> bool:
    return since_s is not None and now_s - since_s >= limit_s
