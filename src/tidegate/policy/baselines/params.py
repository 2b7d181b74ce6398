"""Constants of the peers' policies: their authors' values, and ours where they leave one open."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


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
