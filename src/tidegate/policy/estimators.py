"""What a class's sessions are like: how long they stay, how much KV they hold at which age, how long they pause.

Residency T and footprint kbar (Eqs 2, 8, 11) from an actuarial table. Ages are cut into bins j of growing width w_j;
per bin we keep, fading over a window of several residencies,

    e_j  session-seconds lived in the bin, by ended and by running sessions alike
    d_j  sessions that ended in it
    f_j  token-seconds held in it (block-time)

The hazard h_j = d_j / e_j is the maximum-likelihood estimate of a piecewise-constant hazard under right-censoring: a
session that still runs adds exposure without an end, so neither the youth of the pool nor an upward drift biases it, as
a mean over completed sessions is biased. Then, with S the survival to the start of a bin,

    T = sum_j S_j (1 - exp(-h_j w_j)) / h_j      k_j = f_j / e_j      Z = sum_j S_j (1 - exp(-h_j w_j)) / h_j k_j
    kbar = Z / T                                 the session-time average, whatever ages are running just now

A young synchronised cohort has small k_j at small ages only; ages not yet seen take k_j from the last seen one plus the
observed growth, and their hazard from the prior. Each bin's hazard is shrunk by `prior_sessions` sessions of the prior
residency, kbar by as many of the prior footprint against the sessions that ended. Updates cost O(1); a cohort of
sessions admitted within a quarter of a second moves from bin to bin as one (a heap of crossing times), a table is
solved once a control step.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from math import exp, expm1, inf, log
from typing import TYPE_CHECKING, Final

from tidegate.policy.params import EstimatorParams, LedgerParams
from tidegate.policy.sizes import EDGES_TOKENS, Sizes, size_bin

if TYPE_CHECKING:
    from tidegate.policy.entities import Session

FIRST_EDGE_S: Final = 0.25  # sessions shorter than this are one kind
EDGE_RATIO: Final = 1.5  # ages are told apart within 50 %
BINS: Final = 36  # up to four days; the last bin is open
EDGES_S: Final = (0.0, *(FIRST_EDGE_S * EDGE_RATIO**j for j in range(BINS - 1)))
WIDTHS_S: Final = (*(b - a for a, b in pairwise(EDGES_S)), inf)
MIDS_S: Final = (*((a + b) / 2 for a, b in pairwise(EDGES_S)), EDGES_S[-1] * 1.25)
STEPS_S: Final = (0.0, *(b - a for a, b in pairwise(MIDS_S)))
NOBODY: Final = 1e-20  # survival that adds less to any sum than its rounding


class Cohort:
    """Sessions of one class admitted together: they have one age."""

    __slots__ = ("bin", "birth_r", "sessions", "tokens")

    def __init__(self, birth_r: float, bin: int) -> None:
        self.birth_r = birth_r
        self.bin = bin
        self.sessions = 0
        self.tokens = 0


class Profile:
    """The actuarial table of one class."""

    def __init__(self, params: EstimatorParams) -> None:
        self._params = params
        self.sizes = Sizes()
        self.sessions = [0] * BINS  # now in the bin
        self.tokens = [0] * BINS
        self.exposure = [0.0] * BINS
        self.block_time = [0.0] * BINS
        self.ends = [0.0] * BINS
        self.lived_s = 0.0  # faded sum of the ages at which sessions ended
        self._turns = self._turn_tokens = 0.0  # faded
        self._started_tokens = self._started = 0.0  # faded: first prompts of admitted sessions
        self.growth_tokens = 0.0  # faded sum of growth after the first prompt
        self._at_r = [0.0] * BINS  # accrued up to
        self._faded_r = 0.0
        self._young: Cohort | None = None
        self._crossings: list[tuple[float, int, Cohort]] = []
        self._cohorts = 0
        # solved once a control step
        self.residency_s = params.residency_prior_s
        self.footprint_tokens = 0.0
        self.growth_per_s = 0.0
        self.growing_s = 0.0  # from the first prompt to the expected end, at that rate
        self.ended = 0  # sessions seen from beginning to end: what is known of how large they become

    # --- what happens ------------------------------------------------------------------------------------------
    def _accrue(self, j: int, now_r: float) -> None:
        dt = now_r - self._at_r[j]
        if dt > 0.0:
            self._at_r[j] = now_r
            if self.sessions[j]:
                self.exposure[j] += self.sessions[j] * dt
                self.block_time[j] += self.tokens[j] * dt

    def enter(self, session: Session, now_r: float) -> None:
        cohort = self._young
        if cohort is None or cohort.bin or now_r - cohort.birth_r >= FIRST_EDGE_S:
            cohort = self._young = self._new_cohort(now_r, 0)
        self._join(session, cohort, now_r)
        session.size_bin = size_bin(session.tokens)
        self._started_tokens += session.tokens
        self._started += 1.0

    def _new_cohort(self, birth_r: float, j: int) -> Cohort:
        cohort = Cohort(birth_r, j)
        self._cohorts += 1
        if j + 1 < BINS:
            heapq.heappush(self._crossings, (birth_r + EDGES_S[j + 1], self._cohorts, cohort))
        return cohort

    def _join(self, session: Session, cohort: Cohort, now_r: float) -> None:
        j = cohort.bin
        self._accrue(j, now_r)
        session.cohort = cohort
        cohort.sessions += 1
        cohort.tokens += session.tokens
        self.sessions[j] += 1
        self.tokens[j] += session.tokens

    def grow(self, session: Session, delta: int, now_r: float) -> None:
        cohort = session.cohort
        assert cohort is not None
        j = cohort.bin
        self._accrue(j, now_r)
        cohort.tokens += delta
        self.tokens[j] += delta
        self.growth_tokens += delta
        if session.tokens >= EDGES_TOKENS[session.size_bin + 1]:
            reached = size_bin(session.tokens)
            self.sizes.grew(session.size_bin, reached)
            session.size_bin = reached

    def turn(self, growth_tokens: int) -> None:
        """A further request of a session was placed, and its prompt adds this much at once."""
        self._turns += 1.0
        self._turn_tokens += growth_tokens

    @property
    def turn_tokens(self) -> float:
        """What a turn adds when it begins; held until it ends, the last one too."""
        return self._turn_tokens / self._turns if self._turns > 0.0 else 0.0

    def leave(self, session: Session, now_r: float) -> None:
        """Its end, for whatever reason: it holds nothing any more."""
        cohort = session.cohort
        assert cohort is not None
        self.ended += 1
        self.sizes.end(session.size_bin)
        self.lived_s += max(0.0, now_r - cohort.birth_r)
        self.ends[self._part(session, now_r)] += 1.0

    def suspend(self, session: Session, now_r: float) -> float:
        """Its residency clock stops (it waits in our queue); gives its age for `resume`."""
        cohort = session.cohort
        assert cohort is not None
        self._part(session, now_r)
        return now_r - cohort.birth_r

    def resume(self, session: Session, age_s: float, now_r: float) -> None:
        self._join(session, self._new_cohort(now_r - age_s, bisect_right(EDGES_S, age_s) - 1), now_r)

    def _part(self, session: Session, now_r: float) -> int:
        cohort = session.cohort
        assert cohort is not None
        j = cohort.bin
        self._accrue(j, now_r)
        cohort.sessions -= 1
        cohort.tokens -= session.tokens
        self.sessions[j] -= 1
        self.tokens[j] -= session.tokens
        session.cohort = None
        return j

    # --- once a control step -----------------------------------------------------------------------------------
    def advance(self, now_r: float) -> None:
        """Move cohorts to their bins, close the books up to now, and let them fade."""
        crossings = self._crossings
        while crossings and crossings[0][0] <= now_r:
            at_r, number, cohort = heapq.heappop(crossings)
            if not cohort.sessions:
                continue
            j = cohort.bin
            self._accrue(j, at_r)
            self._accrue(j + 1, at_r)
            for column, amount in ((self.sessions, cohort.sessions), (self.tokens, cohort.tokens)):
                column[j] -= amount
                column[j + 1] += amount
            cohort.bin = j + 1
            if j + 2 < BINS:
                heapq.heappush(crossings, (cohort.birth_r + EDGES_S[j + 2], number, cohort))
        for j, sessions in enumerate(self.sessions):
            if sessions:
                self._accrue(j, now_r)
        self._at_r = [now_r] * BINS
        self._fade(now_r)

    def _fade(self, now_r: float) -> None:
        params = self._params
        window_s = max(params.window_floor_s, params.window_residencies * self.residency_s)
        keep = exp(-(now_r - self._faded_r) / window_s)
        self._faded_r = now_r
        if not any(self.sessions):
            return  # nothing new is learned, so nothing is forgotten
        self.exposure = [seconds * keep for seconds in self.exposure]
        self.block_time = [token_s * keep for token_s in self.block_time]
        self.ends = [ends * keep for ends in self.ends]
        self.growth_tokens *= keep
        self.lived_s *= keep
        self._started_tokens *= keep
        self._started *= keep
        self._turns *= keep
        self._turn_tokens *= keep
        self.sizes.fade(keep)

    def solve(self, prior_residency_s: float, prior_footprint_tokens: float) -> None:
        weight = self._params.prior_sessions
        exposure = sum(self.exposure)
        self.growth_per_s = max(0.0, self.growth_tokens / exposure) if exposure > 0.0 else 0.0
        weight_s = weight * prior_residency_s
        survival, residency_s, block_time = 1.0, 0.0, 0.0
        held = 0.0
        for j, (lived, ends, width_s) in enumerate(zip(self.exposure, self.ends, WIDTHS_S, strict=True)):
            hazard = (ends + weight) / (lived + weight_s)
            held = self._holding(j, held, lived) if lived > 0.0 else held + self.growth_per_s * STEPS_S[j]
            time_s = survival * (-expm1(-hazard * width_s) / hazard)  # of the open bin: 1 / hazard
            residency_s += time_s
            block_time += time_s * held
            survival *= exp(-hazard * width_s)
            if survival < NOBODY:
                break
        self.residency_s = residency_s
        self.sizes.solve()
        first = self._started_tokens / self._started if self._started > 0.0 else 0.0
        self.growing_s = self.sizes.growth_left(first) / self.growth_per_s if self.growth_per_s > 0.0 else 0.0
        doubt = self.doubt
        self.footprint_tokens = (1.0 - doubt) * block_time / residency_s + doubt * prior_footprint_tokens

    def _holding(self, j: int, before: float, lived: float) -> float:
        """k_j where sessions lived: as observed, if they did long enough there, else carried on from the bin before."""
        carried = before + self.growth_per_s * STEPS_S[j]
        trust = lived / (lived + WIDTHS_S[j]) if WIDTHS_S[j] != inf else 1.0  # one session's passage weighs half
        seen = self.block_time[j] / lived
        return seen if j == 0 or not before else trust * seen + (1.0 - trust) * carried

    @property
    def doubt(self) -> float:
        """Weight of the priors against what was observed, 1 to 0. Only ended sessions count: while none has ended,
        nobody knows how large they become, however many run."""
        weight = self._params.prior_sessions
        return weight / (weight + self.ended)


class IdleGaps:
    """The gaps between a class's requests, and the idle TTL that follows from them.

    A histogram with bins of 20 %, halved when it is full, so that it follows a change. The TTL is a high quantile
    times a factor, within a floor and a ceiling. A class whose sessions have never come back, though many are idle or
    have expired, is one of single requests: the floor.
    """

    RATIO: Final = 1.2
    FIRST_S: Final = 0.05
    BINS: Final = 80  # up to 30 h
    FULL: Final = 4096
    __slots__ = ("_counts", "_fresh", "_params", "_total", "_ttl_s", "expired")

    def __init__(self, params: LedgerParams) -> None:
        self._params = params
        self._counts: list[int] = []  # grown on the first gap: most classes of single requests have none
        self._total = 0
        self._fresh = 0  # gaps since the TTL was worked out
        self._ttl_s = params.idle_ttl_initial_s
        self.expired = 0  # sessions that ended by idling

    def record(self, gap_s: float) -> None:
        if not self._counts:
            self._counts = [0] * self.BINS
        j = 0 if gap_s <= self.FIRST_S else 1 + int(log(gap_s / self.FIRST_S) / log(self.RATIO))
        self._counts[min(j, self.BINS - 1)] += 1
        self._total += 1
        self._fresh += 1
        if self._total >= self.FULL:
            self._counts = [count // 2 for count in self._counts]
            self._total = sum(self._counts)

    @property
    def samples(self) -> int:
        return self._total

    def bins(self) -> Iterator[tuple[float, int]]:
        """Upper edge [s] and gaps, from the shortest; empty at first."""
        upper_s = self.FIRST_S
        for count in self._counts:
            yield upper_s, count
            upper_s *= self.RATIO

    def ttl_s(self, idle_sessions: int) -> float:
        params = self._params
        if self._total + self.expired + idle_sessions < params.idle_gap_min_samples:
            return params.idle_ttl_initial_s
        if not self._total:
            return params.idle_ttl_floor_s
        if self._fresh > self._total >> 5:
            self._fresh = 0
            self._ttl_s = self._learned_s()
        return self._ttl_s

    def _learned_s(self) -> float:
        params = self._params
        left = params.idle_gap_quantile * self._total
        j = 0
        for j, count in enumerate(self._counts):  # noqa: B007 - the bin where the quantile falls
            left -= count
            if left <= 0:
                break
        upper_s = self.FIRST_S * self.RATIO**j
        return min(max(upper_s * params.idle_gap_factor, params.idle_ttl_floor_s), params.idle_ttl_ceiling_s)
