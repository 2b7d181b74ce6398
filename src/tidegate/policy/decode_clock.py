"""How much running requests have generated that nobody has told us yet: a clock that ticks in tokens.

An engine with continuous batching gives every running sequence one token a step. So there is one number per replica,

    V(t) = integral of (generation rate of the replica / running sequences) dt

and a request placed when the clock showed V0 has generated about V - V0 tokens. The sum over a replica's requests is
(number of them) V - (sum of their V0): growth without a report and without a visit to any session. V comes from the
samples' generation_tokens_total and running; between samples, and when they are late, it goes on at its last rate.
Without those totals the rate is that of requests that ended: completion tokens over seconds.
"""

from __future__ import annotations

from typing import Final

from tidegate.types import ReplicaSample

HALF_LIFE_S: Final = 60.0  # of the rate learned from ended requests: several of them, and the batch as it is now


class DecodeClock:
    __slots__ = ("_at_s", "_counted", "_faded_s", "_running", "_seconds", "_tokens", "_total", "_value", "rate")

    def __init__(self, now_s: float) -> None:
        self._value = 0.0
        self._at_s = now_s
        self.rate = 0.0  # tokens/s of one sequence
        self._total: int | None = None
        self._running = 0
        self._counted = False  # samples tell the total
        self._tokens = self._seconds = 0.0  # of ended requests, fading
        self._faded_s = now_s

    def at(self, now_s: float) -> float:
        """V; it may fall a little when a sample corrects it."""
        return self._value + self.rate * (now_s - self._at_s)

    def sampled(self, sample: ReplicaSample) -> None:
        total, running = sample.generation_tokens_total, sample.running
        if total is None or running is None:
            return
        before, self._total = self._total, total
        was, self._running = self._running, running
        if before is None or total < before:  # the first sample, or a restart: at its last rate up to here
            self._move(sample.at_s, self.at(sample.at_s))
            return
        dt_s = sample.at_s - self._at_s
        if self._counted and dt_s > 0.0:
            step = (total - before) / max(1.0, (running + was) / 2.0)
            self._move(sample.at_s, self._value + step)
            self.rate = step / dt_s
        elif not self._counted:
            self._counted = True
            self._move(sample.at_s, self.at(sample.at_s))

    def _move(self, at_s: float, value: float) -> None:
        self._at_s = at_s
        self._value = value

    def answered(self, completion_tokens: int, seconds: float, now_s: float) -> None:
        """A request ended; it counts only where samples do not tell."""
        if self._counted:
            return
        keep = 0.5 ** ((now_s - self._faded_s) / HALF_LIFE_S)
        self._faded_s = now_s
        self._tokens = self._tokens * keep + completion_tokens
        self._seconds = self._seconds * keep + seconds
        self._move(now_s, self.at(now_s))
        self.rate = self._tokens / self._seconds if self._seconds > 0.0 else 0.0
