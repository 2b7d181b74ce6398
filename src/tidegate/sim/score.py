"""The score of a run: pure functions over what happened, for live runs and simulated ones.

Contract rate = min over classes b of X_b / rho_b, X_b completed sessions per second, rho_b the trainer's share. THE
score: raw sessions per second can be raised by serving short classes only, this cannot. With it: TV distance of the
completions from rho, hit rate, recomputed prompt tokens, preemptions, time held.

Counting rule. A session counts wholly, in the window in which it ENDS. Sessions that began during the warm-up and end
in the window count, those still open at its end do not: in steady state the two cancel in expectation, so long
sessions are not undercounted, whereas counting only sessions that lie inside the window would leave out just the
long ones. A synchronised start is not steady: the warm-up has to cover the longest class. `window_residencies`, the
window in units of the mean time of the sessions that ended in it, says how far to trust a run; below about 3 the edges
are of the same size as the count. Requests count in the window in which their reply ends.

The minimum of noisy rates is biased low, the more the fewer sessions each class completed, for every policy alike:
compare runs of one length, paired by repeat, with the interval that `ratio_interval` gives.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from tidegate.sim.distributions import percentile
from tidegate.types import WorkloadClass


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    workload: WorkloadClass
    started_s: float
    ended_s: float | None  # None: still open when the run stopped
    completed: bool = False  # all its turns were answered


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    workload: WorkloadClass
    sent_s: float
    first_byte_s: float
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None: the engine did not say
    repeated_tokens: int = 0  # of the prompt, computed before in this session (whole cache blocks)


class Window(msgspec.Struct, frozen=True):
    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def __contains__(self, at_s: float) -> bool:
        return self.start_s <= at_s < self.end_s


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Rates per minute of model time; None: nothing was known or there was nothing to divide by."""

    contract_per_min: float
    sessions_per_min: dict[WorkloadClass, float]
    total_per_min: float  # shown, never used to rank
    completed: dict[WorkloadClass, int]
    failed: int
    tv_pp: float | None
    hit_rate: float | None
    prompt_tokens: int
    output_tokens: int
    recomputed_prompt_tokens: int | None
    recomputed_prompt_share: float | None
    preemptions: int | None
    hold_p50_s: float | None  # of the requests that the gate held and placed in the window; 0: it held none
    hold_p95_s: float | None
    first_byte_p50_s: float | None
    first_byte_p95_s: float | None
    mean_in_flight: float
    residency_s: dict[WorkloadClass, float]  # mean, of the sessions that ended in the window
    window_s: float
    window_residencies: float | None


def score(
    sessions: Iterable[SessionRecord],
    requests: Iterable[RequestRecord],
    shares: Mapping[WorkloadClass, float],
    window: Window,
    *,
    holds_s: tuple[float, float] | None = None,
    preemptions: int | None = None,
) -> Score:
    """`holds_s` are the gate's own p50 and p95 in the window."""
    sessions = list(sessions)
    ended = [s for s in sessions if s.ended_s is not None and s.ended_s in window]
    replies = [r for r in requests if r.ended_s in window]
    completed = completions(ended, shares)
    minutes = window.length_s / 60
    residency_s = mean_residencies(ended)
    spans = [_span(s) for s in ended if s.completed]
    waits = [r.first_byte_s - r.sent_s for r in replies]
    recomputed = recomputed_tokens(replies)
    prompt_tokens = sum(r.prompt_tokens for r in replies)
    return Score(
        contract_per_min=contract_rate(completed, shares, window.length_s) * 60,
        sessions_per_min={b: n / minutes for b, n in completed.items()},
        total_per_min=sum(completed.values()) / minutes,
        completed=completed,
        failed=sum(not s.completed for s in ended),
        tv_pp=total_variation_pp(completed, shares),
        hit_rate=hit_rate(replies),
        prompt_tokens=prompt_tokens,
        output_tokens=sum(r.output_tokens for r in replies),
        recomputed_prompt_tokens=recomputed,
        recomputed_prompt_share=None if recomputed is None or not prompt_tokens else recomputed / prompt_tokens,
        preemptions=preemptions,
        hold_p50_s=None if holds_s is None else holds_s[0],
        hold_p95_s=None if holds_s is None else holds_s[1],
        first_byte_p50_s=percentile(waits, 0.5) if waits else None,
        first_byte_p95_s=percentile(waits, 0.95) if waits else None,
        mean_in_flight=mean_in_flight(sessions, window),
        residency_s=residency_s,
        window_s=window.length_s,
        window_residencies=window.length_s / (sum(spans) / len(spans)) if spans else None,
    )


def completions(ended: Iterable[SessionRecord], shares: Mapping[WorkloadClass, float]) -> dict[WorkloadClass, int]:
    counts = dict.fromkeys(shares, 0)
    for session in ended:
        if session.completed:
            counts[session.workload] = counts.get(session.workload, 0) + 1
    return counts


def contract_rate(
    completed: Mapping[WorkloadClass, int], shares: Mapping[WorkloadClass, float], over_s: float
) -> float:
    """min_b X_b / rho_b [sessions/s]: a class with nothing completed makes it 0."""
    return min(completed.get(b, 0) / over_s / share for b, share in shares.items())


def total_variation_pp(completed: Mapping[WorkloadClass, int], shares: Mapping[WorkloadClass, float]) -> float | None:
    """Half the sum of |realised - target| shares, in percentage points."""
    total = sum(completed.values())
    if not total:
        return None
    return 50 * sum(abs(completed.get(b, 0) / total - shares.get(b, 0.0)) for b in {*completed, *shares})


def hit_rate(replies: Sequence[RequestRecord]) -> float | None:
    """Cached prompt tokens / prompt tokens. vLLM leaves the count out of a reply when it is 0, so a silent reply counts
    as 0 if any other reply speaks, and all silent means unknown."""
    prompts = sum(r.prompt_tokens for r in replies)
    if not prompts or all(r.cached_tokens is None for r in replies):
        return None
    return sum(r.cached_tokens or 0 for r in replies) / prompts


def recomputed_tokens(replies: Sequence[RequestRecord]) -> int | None:
    """Prompt tokens that had been computed before in their session and were not found in the cache now."""
    if all(r.cached_tokens is None for r in replies):
        return None
    return sum(max(0, r.repeated_tokens - (r.cached_tokens or 0)) for r in replies)


def mean_in_flight(sessions: Iterable[SessionRecord], window: Window) -> float:
    """Open sessions, averaged over the window."""
    open_s = sum(
        max(0.0, min(math.inf if s.ended_s is None else s.ended_s, window.end_s) - max(s.started_s, window.start_s))
        for s in sessions
    )
    return open_s / window.length_s


def mean_residencies(ended: Iterable[SessionRecord]) -> dict[WorkloadClass, float]:
    spans: dict[WorkloadClass, list[float]] = {}
    for session in ended:
        if session.completed:
            spans.setdefault(session.workload, []).append(_span(session))
    return {workload: sum(values) / len(values) for workload, values in spans.items()}


def histogram_percentile(before: Mapping[float, float], after: Mapping[float, float], p: float) -> float | None:
    """A percentile of what a cumulative histogram (upper bound -> count) gained; linear within its bucket. In the last,
    unbounded bucket: its lower bound, as nothing more is known. None: it gained nothing."""
    bounds = sorted(after)
    gained = [after[bound] - before.get(bound, 0.0) for bound in bounds]
    if not gained or gained[-1] <= 0:
        return None
    rank = p * gained[-1]
    low = below = 0.0
    for bound, count in zip(bounds, gained, strict=True):
        if count >= rank and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low


def hold_percentiles(
    before: Mapping[float, float], after: Mapping[float, float], time_scale: float = 1.0
) -> tuple[float, float]:
    """p50 and p95 of the requests that were held, from a gate's histogram of times from arrival to placement. Its first
    bucket is left out: those were placed at once, and there are dozens of them in every agentic session."""
    at_once = min(after, default=math.inf)
    first = after.get(at_once, 0.0), before.get(at_once, 0.0)
    held_after = {bound * time_scale: count - first[0] for bound, count in after.items()}
    held_before = {bound * time_scale: count - first[1] for bound, count in before.items()}
    p50, p95 = (histogram_percentile(held_before, held_after, p) for p in (0.5, 0.95))
    return (p50 or 0.0, p95 or 0.0)


# --- repeats ------------------------------------------------------------------------------------------------------
class Interval(msgspec.Struct, frozen=True):
    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float], *, seed: int = 0, level: float = 0.95) -> Interval:
    """Mean over repeats with a percentile-bootstrap interval. Repeats are few: read it as spread, not as proof."""
    return _bootstrap(len(values), lambda chosen: sum(values[i] for i in chosen) / len(chosen), seed, level)


def ratio_interval(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0, level: float = 0.95) -> Interval:
    """Ratio of means, resampled in pairs: repeat i of both ran next to each other on the same machine."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} repeats against {len(theirs)}: a paired ratio needs the same number")

    def ratio(chosen: Sequence[int]) -> float:
        below = sum(theirs[i] for i in chosen)
        return sum(ours[i] for i in chosen) / below if below else math.inf

    return _bootstrap(len(ours), ratio, seed, level)


def _bootstrap(n: int, statistic: Callable[[Sequence[int]], float], seed: int, level: float) -> Interval:
    if n == 0:
        raise ValueError("no repeats")
    rng = random.Random(seed)
    draws = sorted(statistic(rng.choices(range(n), k=n)) for _ in range(2000))
    tail = (1 - level) / 2
    return Interval(statistic(range(n)), draws[int(tail * 1999)], draws[math.ceil((1 - tail) * 1999)])


def _span(session: SessionRecord) -> float:
    return (session.started_s if session.ended_s is None else session.ended_s) - session.started_s
