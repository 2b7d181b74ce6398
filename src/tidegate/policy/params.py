"""Every constant of the decision core, with its reason; mounted in the configuration as `core`.

Nothing here is tuned to a workload: times are learned or scale with what is observed, sizes are fractions of the
replica's own capacity. What the paper leaves open is chosen here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


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
            description="A replica without a sample for this long has unknown state. Three scrapes of 5 s may fail "
            "before it narrows.",
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


class CacheAwareParams(Struct, frozen=True, kw_only=True):
    match_share: Annotated[
        float,
        Meta(ge=0, le=1, description="A match above this part of the prompt decides (vLLM/SGLang router)."),
    ] = 0.3
    balance_requests: Annotated[
        int, Meta(ge=0, description="Requests in flight: max - min above this and ... (vLLM/SGLang router).")
    ] = 64
    balance_ratio: Annotated[
        float, Meta(ge=1, description="... max above this times min: to the least loaded (vLLM/SGLang router).")
    ] = 1.5
    max_chunks: Annotated[
        int, Meta(ge=1, description="Prefix chunks remembered per replica; the least recently used go. 2^18 = 30 MB.")
    ] = 262_144
    max_age_s: Annotated[
        float, Meta(gt=0, description="Chunks not seen for this long are forgotten, as the engine has by then.")
    ] = 1800.0
    chunk_tokens: Annotated[int, Meta(ge=1, description="Tokens per chunk of a prompt's prefix.")] = 256


class StaticCapParams(Struct, frozen=True, kw_only=True):
    cap: Annotated[
        int,
        Meta(ge=1, description="Live sessions per replica for the policy static_cap: KV capacity / maximum context."),
    ] = 32


class ConsistentHashParams(Struct, frozen=True, kw_only=True):
    virtual_nodes: Annotated[
        int, Meta(ge=1, description="Ring points per replica: 160 keeps the largest share within 25 % of the mean.")
    ] = 160


class AimdParams(Struct, frozen=True, kw_only=True):
    initial_window: Annotated[
        float,
        Meta(ge=1, description="Active sessions per replica at first. Open in the paper: few, as TCP starts."),
    ] = 8.0
    interval_s: Annotated[
        float,
        Meta(gt=0, description="Between two changes of a window. Open in the paper: what the other controllers take."),
    ] = 5.0
    usage_low: Annotated[float, Meta(ge=0, le=1, description="Below this KV usage the window grows (CONCUR).")] = 0.2
    usage_high: Annotated[
        float, Meta(ge=0, le=1, description="Above this KV usage, with few hits, the window is cut (CONCUR).")
    ] = 0.5
    hit_rate_low: Annotated[
        float, Meta(ge=0, le=1, description="Below this prefix hit rate a full cache is thrashing (CONCUR).")
    ] = 0.2
    increase: Annotated[float, Meta(gt=0, description="Sessions that a window grows by (CONCUR).")] = 2.0
    decrease: Annotated[float, Meta(gt=0, lt=1, description="A window is cut to this part (CONCUR).")] = 0.5
    pause_limit_s: Annotated[
        float,
        Meta(gt=0, description="A continuation paused for this long goes on: half of what client libraries wait."),
    ] = 300.0


class ProgramParams(Struct, frozen=True, kw_only=True):
    interval_s: Annotated[float, Meta(gt=0, description="Between two steps of pause and resume (ThunderAgent).")] = 5.0
    buffer_tokens: Annotated[
        int, Meta(ge=0, description="Kept free for each program beside its tokens (ThunderAgent).")
    ] = 100
    acting_halflife_s: Annotated[
        float,
        Meta(gt=0, description="Tokens of acting programs count half after this, where others resume (ThunderAgent)."),
    ] = 1.0
    resume_after_s: Annotated[
        float,
        Meta(
            gt=0,
            description="A request that has waited for this long goes on (ThunderAgent). Above the 600 s after "
            "which OpenAI's client libraries give up: clients need a longer timeout.",
        ),
    ] = 1800.0


class AdaptiveCapParams(Struct, frozen=True, kw_only=True):
    max_context_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="The first cap is sum of KV / this: the served model's maximum context, which replicas do not "
            "report. None: twice estimators.footprint_prior_tokens, at most half of a replica."
        ),
    ] = None
    min_sessions: Annotated[int, Meta(ge=1, description="The cap is never below this (prime-rl).")] = 1
    max_sessions: Annotated[
        int, Meta(ge=1, description="The cap is never above this (prime-rl; a large pool needs more).")
    ] = 1024
    poll_s: Annotated[float, Meta(gt=0, description="Between two looks at the replicas (prime-rl).")] = 5.0
    growth: Annotated[float, Meta(ge=1, description="Factor of the cap per turnover of the pool (prime-rl).")] = 1.25
    growth_below: Annotated[float, Meta(ge=0, le=1, description="From this KV usage it does not grow (prime-rl).")] = (
        0.6
    )
    growth_expiry_s: Annotated[
        float, Meta(gt=0, description="A clear poll lets the cap grow for this long: never blindly (prime-rl).")
    ] = 15.0
    binding_fraction: Annotated[
        float, Meta(ge=0, le=1, description="It grows only with this part of it in flight (prime-rl).")
    ] = 0.9
    soft_usage: Annotated[
        float, Meta(gt=0, le=1, description="KV usage above which the cap is trimmed (prime-rl).")
    ] = 0.8
    hard_usage: Annotated[
        float, Meta(gt=0, le=1, description="KV usage above which the excess is taken out too (prime-rl).")
    ] = 0.9
    target_usage: Annotated[float, Meta(gt=0, le=1, description="KV usage that a trim aims at (prime-rl).")] = 0.7
    trim_polls: Annotated[
        int, Meta(ge=0, description="Polls between two trims, to see what the first did (prime-rl).")
    ] = 6
    queue_ratio: Annotated[
        float, Meta(ge=0, description="Requests queued over running ones: above this, overload (prime-rl).")
    ] = 0.5
    queue_polls: Annotated[
        int, Meta(ge=1, description="Polls that this lasts before a cut: turns end in bursts (prime-rl).")
    ] = 6
    queue_cut: Annotated[float, Meta(gt=0, lt=1, description="A cut after queueing: this part (prime-rl).")] = 0.9
    preemption_cut: Annotated[float, Meta(gt=0, lt=1, description="A cut after preemption: this part (prime-rl).")] = (
        0.8
    )
    repeated_cut: Annotated[
        float, Meta(gt=0, lt=1, description="A cut soon after the pool drained for another: this part (prime-rl).")
    ] = 0.5
    grace_polls: Annotated[int, Meta(ge=0, description="Polls after draining that count as soon (prime-rl).")] = 6
    pause_limit_s: Annotated[
        float,
        Meta(gt=0, description="A continuation paused for this long goes on: half of what client libraries wait."),
    ] = 300.0


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
    cache_aware: CacheAwareParams = CacheAwareParams()
    static_cap: StaticCapParams = StaticCapParams()
    consistent_hash: ConsistentHashParams = ConsistentHashParams()
    aimd: AimdParams = AimdParams()
    program: ProgramParams = ProgramParams()
    adaptive_cap: AdaptiveCapParams = AdaptiveCapParams()
