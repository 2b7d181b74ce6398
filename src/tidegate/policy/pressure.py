"""Overload pressure of a replica (Eqs 6-7) and the session cap that it contracts.

    G_w = max(0, h*_w - h_w)

h is the hit EFFICIENCY: cached prompt tokens over the prompt tokens that the ledger expected to be cached (footprints
of sessions that came back to their replica, prefixes of their groups). Taken so, neither a change of the mixture nor a
cold cache after a weight update reads as pressure; computed prompt tokens approaching prompt tokens is h going to 0.
It is learned, best first, from each request's own cached_tokens; from d(cached) / d(prompt) of the samples; and, where
KV events are read, from the resident part of the footprints of live sessions, which falls before any of them returns.
h* is the healthy reference: it follows h upwards at once, downwards slowly, and not at all under pressure.
kv_used_fraction is not used: it counts running requests only and reads half empty in total collapse.

A G above the threshold is confirmed when it has lasted (half as long with requests waiting in the engine, or while it
preempts) and h is not already rising. Then the cap contracts to a part of what is live, again after each settling time
while it stays confirmed; below half the threshold it recovers step by step until the base cap takes over.
"""

from __future__ import annotations

from math import exp

from tidegate.policy.params import PressureParams
from tidegate.types import ReplicaSample


class Signals:
    """What a replica shows, as fading sums over `window_s`."""

    __slots__ = (
        "_cached",
        "_cached_total",
        "_expected",
        "_faded_s",
        "_params",
        "_placed",
        "_placed_expected",
        "_preemptions_total",
        "_prompt",
        "_prompt_total",
        "_sampled_cached",
        "_sampled_prompt",
        "preempted_s",
        "resident_share",
        "waiting_since_s",
    )

    def __init__(self, params: PressureParams, now_s: float) -> None:
        self._params = params
        self._faded_s = now_s
        self.forget(now_s)

    def forget(self, now_s: float) -> None:
        """The caches were emptied: what was seen says nothing any more."""
        self._prompt = self._cached = self._expected = 0.0  # of ended requests that reported cached_tokens
        self._placed = self._placed_expected = 0.0  # of placed requests
        self._sampled_prompt = self._sampled_cached = 0.0
        self._prompt_total: int | None = None
        self._cached_total: int | None = None
        self._preemptions_total: int | None = None
        self.preempted_s = -1e18  # when it last did
        self.waiting_since_s: float | None = None
        self.resident_share: float | None = None  # of the footprints of its idle live sessions, by KV events

    def placed(self, prompt_tokens: int, expected_tokens: int) -> None:
        self._placed += prompt_tokens
        self._placed_expected += min(expected_tokens, prompt_tokens)

    def answered(self, prompt_tokens: int, cached_tokens: int, expected_tokens: int) -> None:
        expected = min(expected_tokens, prompt_tokens)
        self._prompt += prompt_tokens
        self._expected += expected
        self._cached += min(cached_tokens, expected)

    def sampled(self, sample: ReplicaSample) -> None:
        if sample.waiting is not None:
            if not sample.waiting:
                self.waiting_since_s = None
            elif self.waiting_since_s is None:
                self.waiting_since_s = sample.at_s
        if sample.preemptions_total is not None:
            before, self._preemptions_total = self._preemptions_total, sample.preemptions_total
            if before is not None and sample.preemptions_total > before:
                self.preempted_s = sample.at_s
        prompt, cached = sample.prompt_tokens_total, sample.cached_tokens_total
        if prompt is None or cached is None:
            return
        if self._prompt_total is not None and self._cached_total is not None and prompt >= self._prompt_total:
            self._sampled_prompt += prompt - self._prompt_total
            self._sampled_cached += max(0, cached - self._cached_total)
        self._prompt_total, self._cached_total = prompt, cached

    def fade(self, now_s: float) -> None:
        keep = exp(-(now_s - self._faded_s) / self._params.window_s)
        self._faded_s = now_s
        self._prompt *= keep
        self._cached *= keep
        self._expected *= keep
        self._placed *= keep
        self._placed_expected *= keep
        self._sampled_prompt *= keep
        self._sampled_cached *= keep

    @property
    def hit_rate(self) -> float | None:
        """Cached over prompt tokens, as everybody counts it."""
        if self._sampled_prompt >= 1.0:
            return min(1.0, self._sampled_cached / self._sampled_prompt)
        return self._cached / self._prompt if self._prompt >= 1.0 else None

    @property
    def efficiency(self) -> float | None:
        """h: the worse of what requests and KV events show. None: nothing was expected to be cached."""
        least = self._params.least_expected_tokens
        shown = self.resident_share
        if self._expected >= least:
            by_requests = self._cached / self._expected
        elif self._placed_expected >= least and self._sampled_prompt >= least:
            expected_rate = self._placed_expected / self._placed
            by_requests = min(1.0, self._sampled_cached / self._sampled_prompt / expected_rate)
        else:
            return shown
        return by_requests if shown is None else min(by_requests, shown)


class PressureCap:
    """The filters and the contracted cap of one replica. `step` once a control step."""

    __slots__ = (
        "_acted_s",
        "_calm_since_s",
        "_high_since_s",
        "_params",
        "_slow",
        "cap",
        "confirmed",
        "pressure",
        "reference",
    )

    def __init__(self, params: PressureParams) -> None:
        self._params = params
        self.reference: float | None = None  # h*
        self.pressure = 0.0  # G
        self.confirmed = False
        self.cap: int | None = None  # None: not contracted
        self._slow: float | None = None  # h a few seconds ago, for the slope
        self._high_since_s: float | None = None
        self._calm_since_s: float | None = None
        self._acted_s = -1e18

    def step(self, signals: Signals, live: int, base_cap: int, now_s: float, dt_s: float) -> None:
        params = self._params
        h = signals.efficiency
        preempting = now_s - signals.preempted_s < params.window_s
        if h is None:
            self.pressure = params.preempting_pressure if preempting else 0.0
            rising = False
        else:
            rising = self._slow is not None and h > self._slow + params.slope
            self._slow = h if self._slow is None else self._slow + (h - self._slow) * min(1.0, dt_s / params.confirm_s)
            self._refer(h, dt_s)
            self.pressure = max(0.0, (self.reference or 0.0) - h)
            if preempting:
                self.pressure = max(self.pressure, params.preempting_pressure)
        self._confirm(signals, preempting, rising, now_s)
        self._act(live, base_cap, now_s)

    def _refer(self, h: float, dt_s: float) -> None:
        params = self._params
        reference = self.reference
        if reference is None:
            self.reference = max(h, params.reference_floor)
        elif h >= reference:
            self.reference = h
        elif reference - h < params.threshold:  # not while it is pressed: a collapse must not become the norm
            self.reference = max(
                params.reference_floor, reference + (h - reference) * min(1.0, dt_s / params.reference_s)
            )

    def _confirm(self, signals: Signals, preempting: bool, rising: bool, now_s: float) -> None:
        params = self._params
        if self.pressure < params.threshold:
            self._high_since_s = None
            self.confirmed = False
            return
        if self._high_since_s is None:
            self._high_since_s = now_s
        waiting = signals.waiting_since_s is not None and now_s - signals.waiting_since_s >= params.confirm_s
        need_s = params.confirm_s / 2 if waiting or preempting else params.confirm_s
        self.confirmed = not rising and now_s - self._high_since_s >= need_s

    def _act(self, live: int, base_cap: int, now_s: float) -> None:
        params = self._params
        if self.confirmed:
            self._calm_since_s = None
            if now_s - self._acted_s >= params.settle_s:
                self._acted_s = now_s
                from_sessions = live if self.cap is None else min(live, self.cap)
                self.cap = max(1, int(from_sessions * params.contraction))
            return
        if self.cap is None:
            return
        if self.pressure >= params.threshold / 2:
            self._calm_since_s = None
            return
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        if now_s - max(self._calm_since_s, self._acted_s) >= params.settle_s:
            self._acted_s = now_s
            self.cap += max(1, int(self.cap * params.recovery))
            if self.cap >= base_cap:
                self.cap = None
