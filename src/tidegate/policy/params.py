"""Every constant of the decision core, with its reason; mounted in the configuration as `core`.

Nothing here is tuned to a workload: times are learned or scale with what is observed, sizes are fractions of the
replica's own capacity. What the paper leaves open is chosen here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from tidegate.policy.baselines.params import (
    AdaptiveCapParams,
    AimdParams,
    CacheAwareParams,
    ConsistentHashParams,
    ProgramParams,
    StaticCapParams,
)


class LedgerParams(Struct, frozen=True, kw_only=True):
    max_sessions: Annotated[
        int,
        Meta(ge=1, description="Session ids kept; a new one beyond it evicts the longest idle. At 2 KB each, 512 MB."),
    ] = 262_144
    max_classes: Annotated[
        int,
        Meta(
            ge=2,
            le=1024,
            description="Workload classes told apart; further labels share the class `other`. Caps are computed per "
            "replica and class, so this bounds the control step.",
        ),
    ] = 64
    max_remembered: Annotated[
        int,
        Meta(
            ge=0,
            description="Ended ids remembered, so that a late request opens a new generation and teaches the idle TTL.",
        ),
    ] = 16_384
    idle_ttl_initial_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Idle time that ends a session while its class has shown too few gaps: half an hour outlives "
            "nearly all tool calls, and a pool of dead sessions heals within it.",
        ),
    ] = 1800.0
    idle_ttl_floor_s: Annotated[
        float,
        Meta(gt=0, description="The learned TTL is never below this: a stalled tool call must not end its session."),
    ] = 60.0
    idle_ttl_ceiling_s: Annotated[
        float,
        Meta(gt=0, description="The learned TTL is never above this: four hours, what other routers use for all."),
    ] = 14_400.0
    idle_gap_quantile: Annotated[
        float,
        Meta(gt=0, lt=1, description="Quantile of the class's observed gaps between requests that the TTL is made of."),
    ] = 0.99
    idle_gap_factor: Annotated[
        float,
        Meta(ge=1, description="TTL = this times the quantile: gaps have heavy tails; a wrong expiry costs a turn."),
    ] = 4.0
    idle_gap_min_samples: Annotated[
        int,
        Meta(
            ge=1,
            description="Observed gaps, and sessions idle now or expired, before the TTL is learned: 32 show a "
            "thirtieth.",
        ),
    ] = 32


class EstimatorParams(Struct, frozen=True, kw_only=True):
    residency_prior_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Neutral residency of a session before any ended, alike for all classes: a minute, between a "
            "short answer and a long agent; it weighs as much as one session.",
        ),
    ] = 60.0
    footprint_prior_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Conservative footprint of a session before any was seen: half of a 128K context, what a "
            "session holds on average at that limit.",
        ),
    ] = 65_536
    footprint_prior_fraction: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="The prior footprint is at most this part of a replica: four sessions teach the rest.",
        ),
    ] = 0.25
    prior_sessions: Annotated[
        float, Meta(gt=0, description="Weight of the priors, in whole sessions observed: one, so that they fade fast.")
    ] = 1.0
    window_residencies: Annotated[
        float,
        Meta(
            gt=0,
            description="Observations fade over this many residencies of the class: four generations of sessions "
            "average enough, and follow a drifting policy.",
        ),
    ] = 4.0
    window_floor_s: Annotated[
        float, Meta(gt=0, description="The window is never shorter: a class of split-second requests needs some.")
    ] = 30.0


class ReplicaParams(Struct, frozen=True, kw_only=True):
    stale_after_s: Annotated[
        float,
        Meta(
            gt=0,
            description="A replica without a sample for this long has unknown state: fewer new sessions enter, and an "
            "alarm stands. Three scrapes of 5 s, the longest period advised, may fail before it narrows.",
        ),
    ] = 20.0
    unknown_sessions: Annotated[
        int,
        Meta(
            ge=1,
            description="Live sessions up to which a replica of unknown capacity or stale state takes new ones: "
            "progress, and far below what any replica holds.",
        ),
    ] = 2
    prefill_rate_prior_tokens_per_s: Annotated[
        float,
        Meta(gt=0, description="Prefill rate mu until one is measured; it only scales Eq (1), alike for all replicas."),
    ] = 8000.0
    prefill_rate_halflife_s: Annotated[
        float,
        Meta(
            gt=0,
            description="The best observed rate fades with this: intervals with idle time say nothing of the rate, so "
            "mu is a fading maximum.",
        ),
    ] = 300.0


class AdmissionParams(Struct, frozen=True, kw_only=True):
    hold_timeout_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="A new session held this long is refused with 503. None: it waits; rollout clients do."),
    ] = None
    overload: Annotated[
        Literal["hold", "reject"],
        Meta(description="What a new session that does not fit gets: a wait, or 429 at once."),
    ] = "hold"
    max_waiting: Annotated[
        int,
        Meta(ge=0, description="Requests of sessions not yet admitted that may wait; beyond it they are refused."),
    ] = 65_536
    retry_after_s: Annotated[
        float,
        Meta(gt=0, description="Retry-After of a refusal: a turn or two of an agent, after which room has moved."),
    ] = 5.0


class OccupancyParams(Struct, frozen=True, kw_only=True):
    protected_fraction: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="C_w = this part of a replica's KV: partly filled blocks, blocks of ended sessions that were "
            "used last, and the error of the forecast take the rest, in proportion to the memory.",
        ),
    ] = 0.9
    deviations: Annotated[
        float,
        Meta(
            ge=0,
            description="Standard deviations kept free above the expected occupancy, besides the unprotected part: "
            "past the edge all is evicted before it is used again. Counts for much with few sessions, for little with "
            "many.",
        ),
    ] = 1.0
    sessions_per_step: Annotated[
        int,
        Meta(ge=1, description="Sessions gone through per control step to rebuild forecasts: about 2 ms."),
    ] = 4096
    exact_sessions: Annotated[
        int,
        Meta(ge=0, description="Replicas with no more live sessions are rebuilt at once when one ends: 0.1 ms."),
    ] = 32


class PressureParams(Struct, frozen=True, kw_only=True):
    window_s: Annotated[
        float, Meta(gt=0, description="Hits are summed over this, fading: several turns of an agent, a few samples.")
    ] = 10.0
    least_expected_tokens: Annotated[
        float,
        Meta(gt=0, description="Below this sum of expected hits in the window the hit efficiency says nothing."),
    ] = 512.0
    reference_floor: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="h* starts and stays at or above this: a pool that starts in collapse must not call it normal.",
        ),
    ] = 0.8
    reference_s: Annotated[
        float, Meta(gt=0, description="h* follows h downwards this slowly: minutes, past any single episode.")
    ] = 300.0
    threshold: Annotated[
        float,
        Meta(gt=0, lt=1, description="G from which a replica is pressed: block rounding and retries stay below 0.1."),
    ] = 0.15
    slope: Annotated[
        float, Meta(ge=0, description="h above its average of confirm_s by this is rising: it is recovering by itself.")
    ] = 0.03
    confirm_s: Annotated[
        float, Meta(gt=0, description="G must last this long: one long cold prompt in a window is no overload.")
    ] = 5.0
    settle_s: Annotated[
        float,
        Meta(gt=0, description="Between two changes of the cap: the effect of one shows after turns have returned."),
    ] = 15.0
    contraction: Annotated[
        float, Meta(gt=0, lt=1, description="The cap contracts to this part of what is live; two steps halve it.")
    ] = 0.75
    recovery: Annotated[
        float, Meta(gt=0, description="The cap recovers by this part, at least by one session, per settle_s.")
    ] = 0.1
    preempting_pressure: Annotated[
        float,
        Meta(ge=0, le=1, description="G of a replica that preempts: its running requests alone exceed its memory."),
    ] = 0.3


class MisaParams(Struct, frozen=True, kw_only=True):
    floor: Annotated[
        Literal["feasible", "paper"],
        Meta(
            description="Class caps: integers that never exceed the replica's memory, remainders carried over; or the "
            "paper's max(1, floor)."
        ),
    ] = "feasible"
    turn_s: Annotated[
        float,
        Meta(
            gt=0,
            description="A class served one session below its share for this long gets a slot before others: a few "
            "control steps, so that a share of a tenth has its turn within minutes.",
        ),
    ] = 10.0
    cells_per_step: Annotated[
        int,
        Meta(ge=1, description="Class caps (replicas x classes) recomputed per control step: about 5 ms."),
    ] = 4096


class WorkingSetParams(Struct, frozen=True, kw_only=True):
    resident_fraction: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="theta: the sessions that may go on claim at most this part of a replica's KV. Partly filled "
            "blocks and what requests generate until their next turn boundary take the rest.",
        ),
    ] = 0.95
    admit_fraction: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="alpha: a new session enters while the expected claims fit in this part; below theta, so that "
            "growth pauses nobody most of the time.",
        ),
    ] = 0.9
    pause_limit_s: Annotated[
        float,
        Meta(
            gt=0,
            description="A continuation paused for this long goes on, whatever it evicts: half of the 600 s after "
            "which OpenAI's client libraries give up.",
        ),
    ] = 300.0
    prior_fraction: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Part of a replica that a session is expected to grow to while none of its class has ended "
            "(estimators.footprint_prior_tokens at most): small, because sessions that turn out larger are paused, "
            "and memory that waits for the first ends serves nobody.",
        ),
    ] = 0.03125


class PlacementParams(Struct, frozen=True, kw_only=True):
    candidates: Annotated[
        int,
        Meta(
            ge=1,
            description="Open replicas whose cost is computed for a new session, starting from the rotating turn: all "
            "of a pool up to this size; of larger ones as many as find a nearly best one.",
        ),
    ] = 16
    tie_fraction: Annotated[
        float,
        Meta(ge=0, description="Costs within this part of the least are equal: prefill rates are measured no better."),
    ] = 0.25
    tie_s: Annotated[
        float, Meta(ge=0, description="Costs within this of the least are equal: nobody would notice.")
    ] = 0.1


class AdviceParams(Struct, frozen=True, kw_only=True):
    reaction_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Sessions that end within this are advised on top, to wait at the gate: what a trainer takes "
            "to start the next one, with a poll of the advice in between.",
        ),
    ] = 5.0
    band_fraction: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description="Advice falls only when it is off by more than this part (and by more than a session), since "
            "one that waits at the gate costs no memory; it rises at once.",
        ),
    ] = 0.1


class CoreParams(Struct, frozen=True, kw_only=True):
    tick_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Control step: estimates, caps, expiry, timeouts. A second is well under a residency and well "
            "over the cost of a step.",
        ),
    ] = 1.0
    ledger: LedgerParams = LedgerParams()
    estimators: EstimatorParams = EstimatorParams()
    replica: ReplicaParams = ReplicaParams()
    admission: AdmissionParams = AdmissionParams()
    placement: PlacementParams = PlacementParams()
    occupancy: OccupancyParams = OccupancyParams()
    pressure: PressureParams = PressureParams()
    misa: MisaParams = MisaParams()
    working_set: WorkingSetParams = WorkingSetParams()
    advice: AdviceParams = AdviceParams()
    cache_aware: CacheAwareParams = CacheAwareParams()
    static_cap: StaticCapParams = StaticCapParams()
    consistent_hash: ConsistentHashParams = ConsistentHashParams()
    aimd: AimdParams = AimdParams()
    program: ProgramParams = ProgramParams()
    adaptive_cap: AdaptiveCapParams = AdaptiveCapParams()
