"""The workloads that have a name.

paper      the classes of arXiv 2608.11152, table "workload", at a 128K context: RLVR and RLHF lengths through its
           percentiles; agentic sessions from the recorded trace, their prompt and output lengths mapped by rank onto
           its percentiles. Mixture: the paper's target. `context_tokens` scales all lengths and tool gaps alike,
           `tool_time_factor` the gaps alone.
trace      the same classes and mixture, agentic lengths as recorded, scaled so that the 99th percentile of the
           recorded contexts is `context_tokens`; RLVR and RLHF scaled from 128K to it.
cpu-mixed  a mixture for replicas of some 16k KV tokens. agentic: 12 turns, the first prompt 1,000 tokens longer than
           the others' 100-300 new ones, 24 generated, 0.5 s of tool time. RLVR: prompt 50-150, output 300-600.
           RLHF: prompt 100-300, output 100-200. Shares .5, .3, .2.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import msgspec

from tidegate.data import CODING_AGENT_TRACE
from tidegate.errors import ConfigError
from tidegate.sim.distributions import QuantileFunction
from tidegate.sim.traces import Trace, read_trace
from tidegate.sim.workload import SessionSource, Workload, normalised
from tidegate.sim.workload_sources import (
    Grouped,
    MultiTurn,
    SingleTurn,
    TraceReplay,
    TraceScale,
    context_factor,
    linear_map,
    quantile_map,
)
from tidegate.types import WorkloadClass

PAPER_CONTEXT_TOKENS = 131_072
PAPER_SHARES = {"agentic": 0.486, "rlvr": 0.331, "rlhf": 0.182}  # the paper's rounding; normalised on use

AGENTIC_PROMPT = QuantileFunction.through(37_757, 103_209, 123_207, limit=PAPER_CONTEXT_TOKENS)
AGENTIC_OUTPUT = QuantileFunction.through(148, 1_612, 3_930)
RLHF_PROMPT = QuantileFunction.through(60, 2_564, 2_564)
RLHF_OUTPUT = QuantileFunction.through(7_344, 24_447, 37_101, limit=PAPER_CONTEXT_TOKENS)
RLVR_PROMPT = QuantileFunction.through(156, 1_129, 1_277)
RLVR_OUTPUT = QuantileFunction.through(47_583, 130_815, 130_958, limit=PAPER_CONTEXT_TOKENS)

# Half of the recorded gaps are under 10 s, a tenth over three minutes, the longest 15 hours: tools at the short end,
# people at the long one. A minute keeps the tools' heavy tail.
TOOL_GAP_LIMIT_S = 60.0


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    seed: int = 0
    context_tokens: int = 8192  # the longest context that the engines take
    merge_turns: int = 1  # recorded turns that become one
    group_size: int = 1  # GRPO: sessions that share a first prompt
    tool_time_factor: float = 1.0  # of recorded tool gaps: the tools of other environments are faster or slower
    shares: dict[WorkloadClass, float] | None = None  # None: the workload's own
    trace: str = ""  # a file of recorded sessions; empty: the one that ships
    skip_bad: bool = False


def build_workload(name: str, options: WorkloadOptions) -> Workload:
    build = WORKLOADS.get(name)
    if build is None:
        near = difflib.get_close_matches(name, WORKLOADS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"no workload {name!r}, known: {', '.join(WORKLOADS)}{hint}", reason="unknown_workload")
    workload = build(options)
    if options.group_size > 1:
        sources: dict[WorkloadClass, SessionSource] = {
            label: Grouped(source, options.group_size, limit_tokens=options.context_tokens)
            for label, source in workload.sources.items()
        }
        workload = msgspec.structs.replace(workload, sources=sources)
    if options.shares is not None:
        try:
            workload = workload.with_shares(options.shares)
        except ValueError as error:
            raise ConfigError(str(error), reason="invalid_mixture") from error
    return workload


def _paper(options: WorkloadOptions) -> Workload:
    trace = _recorded(options)
    factor = options.context_tokens / PAPER_CONTEXT_TOKENS
    prompts = [turn.prompt_tokens for session in trace.sessions for turn in session.turns]
    outputs = [turn.output_tokens for session in trace.sessions for turn in session.turns]
    prompt = quantile_map(prompts, AGENTIC_PROMPT, factor)
    return _three_classes("paper", options, trace, prompt, quantile_map(outputs, AGENTIC_OUTPUT, factor))


def _trace(options: WorkloadOptions) -> Workload:
    trace = _recorded(options)
    lengths = linear_map(context_factor(trace.sessions, options.context_tokens))
    return _three_classes("trace", options, trace, lengths, lengths)


def _cpu_mixed(options: WorkloadOptions) -> Workload:
    limit, seed = options.context_tokens, options.seed
    between = QuantileFunction.uniform_log
    sources: dict[WorkloadClass, SessionSource] = {
        "agentic": MultiTurn(
            "agentic",
            seed=seed,
            limit_tokens=limit,
            first_tokens=1000,
            turns=12,
            new_tokens=(100, 300),
            output_tokens=24,
            gap_s=between(0.5, 0.5),
        ),
        "rlvr": SingleTurn("rlvr", between(50, 150), between(300, 600), seed=seed, limit_tokens=limit),
        "rlhf": SingleTurn("rlhf", between(100, 300), between(100, 200), seed=seed, limit_tokens=limit),
    }
    return Workload(name="cpu-mixed", shares={"agentic": 0.5, "rlvr": 0.3, "rlhf": 0.2}, sources=sources)


WORKLOADS: dict[str, Callable[[WorkloadOptions], Workload]] = {
    "paper": _paper,
    "trace": _trace,
    "cpu-mixed": _cpu_mixed,
}


def _three_classes(
    name: str,
    options: WorkloadOptions,
    trace: Trace,
    prompt: Callable[[float], float],
    output: Callable[[float], float],
) -> Workload:
    limit, seed = options.context_tokens, options.seed
    factor = limit / PAPER_CONTEXT_TOKENS
    scale = TraceScale(
        prompt=prompt,
        output=output,
        limit_tokens=limit,
        time_factor=factor * options.tool_time_factor,
        gap_limit_s=TOOL_GAP_LIMIT_S,
        merge_turns=options.merge_turns,
    )
    sources: dict[WorkloadClass, SessionSource] = {
        "agentic": TraceReplay("agentic", trace.sessions, scale, seed=seed),
        "rlvr": SingleTurn("rlvr", RLVR_PROMPT, RLVR_OUTPUT, seed=seed, limit_tokens=limit, factor=factor),
        "rlhf": SingleTurn("rlhf", RLHF_PROMPT, RLHF_OUTPUT, seed=seed, limit_tokens=limit, factor=factor),
    }
    return Workload(name=name, shares=normalised(PAPER_SHARES), sources=sources, skipped=trace.skipped)


def _recorded(options: WorkloadOptions) -> Trace:
    path = Path(options.trace) if options.trace else CODING_AGENT_TRACE
    return read_trace(path, skip_bad=options.skip_bad)
