"""The scenarios that have a name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tidegate.config.nearest import suggestion
from tidegate.errors import ConfigError
from tidegate.sim.cpu_tier import CpuTierSpec
from tidegate.sim.disturbances import Drift, Flip, ReplicaLoss
from tidegate.sim.formats import read_sessions
from tidegate.sim.hardware import PRESETS
from tidegate.sim.latency import CPU_TINY, H100_8B
from tidegate.sim.monitor import MonitorSpec
from tidegate.sim.recorded import longest_context
from tidegate.sim.replica import ReplicaConfig
from tidegate.sim.scenario import RECORDED, ReplicaSpec, Scenario
from tidegate.sim.trainer import TrainerSpec
from tidegate.sim.workload_names import PAPER_CONTEXT_TOKENS, WorkloadOptions

# Llama-3.1-8B on an H100-80GB: 128 KiB of KV a token; 72 GB at gpu_memory_utilization 0.9, less 16 GB of weights and
# 3 GB of activations, leave 53 GB: 400k tokens.
_H100_8B_BLOCKS = 25_000
_CONTEXT_TOKENS = 32_768
_LLAMA_CONTEXT_TOKENS = 131_072


def scenario(name: str) -> Scenario:
    build = SCENARIOS.get(name)
    if build is None:
        raise ConfigError(
            f"no scenario {name!r}, known: {', '.join(SCENARIOS)}{suggestion(name, SCENARIOS)}",
            reason="unknown_scenario",
        )
    return build()


def _h100_8b(max_model_len: int) -> ReplicaConfig:
    return ReplicaConfig(num_blocks=_H100_8B_BLOCKS, max_model_len=max_model_len, latency=H100_8B)


def _steady() -> Scenario:
    return Scenario(
        name="steady",
        about="4 x Llama-3.1-8B on an H100; the paper's classes and mixture in contexts of 32k; more sessions in "
        "flight than fit",
        workload="paper",
        options=WorkloadOptions(context_tokens=_CONTEXT_TOKENS),
        replicas=(
            ReplicaSpec(
                config=ReplicaConfig(num_blocks=_H100_8B_BLOCKS, max_model_len=_CONTEXT_TOKENS, latency=H100_8B),
                count=4,
            ),
        ),
        trainer=TrainerSpec(in_flight=256),
        warmup_s=600.0,
        duration_s=1800.0,
    )


def _like_steady(name: str, about: str, **changes: Any) -> Scenario:
    return msgspec.structs.replace(_steady(), name=name, about=f"steady, {about}", **changes)


def _burst() -> Scenario:
    return _like_steady(
        "burst",
        "measured from a synchronised start of all sessions, when every estimate is a prior",
        trainer=TrainerSpec(in_flight=512),
        warmup_s=0.0,
        duration_s=900.0,
    )


def _drift() -> Scenario:
    about = "with RLVR answers that get 1.5 times longer with every 150 sessions of the class"
    return _like_steady("drift", about, drift=Drift(workload="rlvr", factor=1.5, every=150))


def _flip() -> Scenario:
    about = "with the mixture turned over when the measurement begins: from mostly RLHF to mostly agentic"
    options = WorkloadOptions(context_tokens=_CONTEXT_TOKENS, shares={"agentic": 0.1, "rlvr": 0.2, "rlhf": 0.7})
    shares = {"agentic": 0.7, "rlvr": 0.2, "rlhf": 0.1}
    return _like_steady("flip", about, options=options, flip=Flip(at_s=600.0, shares=shares))


def _weight_sync() -> Scenario:
    about = "with new weights, a pause of 10 s and cold caches, after every 64 sessions"
    return _like_steady("weight-sync", about, trainer=TrainerSpec(in_flight=256, batch=64))


def _slow_snapshots() -> Scenario:
    about = "with readings ten times rarer, and ten times later: every 10 s, 10 s old"
    return _like_steady("slow-snapshots", about, monitor=MonitorSpec(period_s=10.0, delay_s=10.0))


def _dropped_snapshots() -> Scenario:
    about = "with half of the readings lost, and none at all for five minutes"
    return _like_steady("dropped-snapshots", about, monitor=MonitorSpec(loss=0.5, outage_s=(900.0, 1200.0)))


def _unlabelled() -> Scenario:
    return _like_steady("unlabelled", "with clients that never say a class", labelled=0.0)


def _silent_ends() -> Scenario:
    return _like_steady("silent-ends", "with clients that never say that a session is over", finishes=False)


def _small_kv() -> Scenario:
    config = msgspec.structs.replace(_h100_8b(_CONTEXT_TOKENS), num_blocks=5000)
    about = "with 80,000 tokens of KV: fewer than three of the longest sessions"
    return _like_steady(
        "small-kv", about, replicas=(ReplicaSpec(config=config, count=4),), trainer=TrainerSpec(in_flight=64)
    )


def _slow_tools() -> Scenario:
    options = WorkloadOptions(context_tokens=_CONTEXT_TOKENS, tool_time_factor=8.0)
    about = "with tools eight times slower: gaps of up to two minutes"
    return _like_steady("slow-tools", about, options=options)


def _heterogeneous() -> Scenario:
    large = _h100_8b(_CONTEXT_TOKENS)
    small = msgspec.structs.replace(large, num_blocks=large.num_blocks // 4)
    about = "with two of the four replicas at a quarter of the KV"
    return _like_steady(
        "heterogeneous", about, replicas=(ReplicaSpec(config=large, count=2), ReplicaSpec(config=small, count=2))
    )


def _replica_loss() -> Scenario:
    about = "with a replica that dies after 900 s and is back, empty, after 1,200"
    return _like_steady("replica-loss", about, losses=(ReplicaLoss(replica=1, at_s=900.0, back_s=1200.0),))


def _priority() -> Scenario:
    config = msgspec.structs.replace(_h100_8b(_CONTEXT_TOKENS), scheduling_policy="priority")
    return _like_steady(
        "priority",
        "with replicas that schedule by priority: agentic calls before RLVR's before RLHF's",
        replicas=(ReplicaSpec(config=config, count=4),),
        priorities={"agentic": 0, "rlvr": 1, "rlhf": 2},
    )


def _cpu_tier() -> Scenario:
    # 256 GiB of host memory a replica hold 2M tokens of 128 KiB; PCIe 5 x16 gives some 50 GB/s: 2.6 us a token.
    tier = CpuTierSpec(tokens=2_000_000, restore_token_s=131_072 / 50e9)
    spec = ReplicaSpec(config=_h100_8b(_CONTEXT_TOKENS), count=4, cpu_tier=tier)
    return _like_steady("cpu-tier", "with 256 GiB of host memory behind each replica's KV", replicas=(spec,))


def _synchronous() -> Scenario:
    about = "with iterations of 256 sessions, a training step of 60 s and new weights between them"
    return _like_steady(
        "synchronous",
        about,
        trainer=TrainerSpec(mode="synchronous", in_flight=256, batch=256, train_s=60.0),
        warmup_s=0.0,
        duration_s=3600.0,
    )


def _staleness() -> Scenario:
    about = "with training steps of 64 sessions that may be one version old"
    spec = TrainerSpec(mode="staleness", in_flight=256, batch=64, staleness=1, train_s=30.0)
    return _like_steady("staleness", about, trainer=spec)


def _partial() -> Scenario:
    about = "with rollouts that are interrupted for new weights once 64 have ended, and go on after"
    spec = TrainerSpec(mode="partial", in_flight=256, batch=64, train_s=30.0)
    return _like_steady("partial", about, trainer=spec)


def _populations() -> Scenario:
    spec = TrainerSpec(mode="populations", populations={"agentic": 128, "rlvr": 96, "rlhf": 32})
    return _like_steady("populations", "with a fixed number of sessions of each class", trainer=spec)


def _groups() -> Scenario:
    options = WorkloadOptions(context_tokens=_CONTEXT_TOKENS, group_size=8)
    return _like_steady("groups", "with GRPO groups of 8 that share their first prompt", options=options)


def _paper(
    name: str, about: str, preset: str, *, blocks: int, replicas: int, in_flight: int, tool_time_factor: float
) -> Scenario:
    config = ReplicaConfig(
        num_blocks=blocks,
        max_model_len=PAPER_CONTEXT_TOKENS,
        max_num_seqs=1024,
        max_num_batched_tokens=16_384,
        latency=PRESETS[preset],
    )
    return Scenario(
        name=name,
        about=f"{about}; the paper's classes and mixture at 128k",
        version=2,
        workload="paper",
        options=WorkloadOptions(context_tokens=PAPER_CONTEXT_TOKENS, tool_time_factor=tool_time_factor),
        replicas=(ReplicaSpec(config=config, count=replicas),),
        trainer=TrainerSpec(in_flight=in_flight),
        warmup_s=3600.0,
        duration_s=7200.0,
    )


# Tool time: the paper gives its share of an agentic session's residency, 22.7 % and 6.6 %. The recorded gaps would be
# 81 % and 67 %. The factors give the paper's shares where nothing is short: at the static cap of KV / maximum context.
def _paper_qwen() -> Scenario:
    # 5M tokens of KV a replica, and as many sessions in flight as a high static concurrency lets in.
    return _paper(
        "paper-qwen",
        "4 x Qwen3.6-35B-A3B on TP4 H100",
        "qwen3.6-35b-a3b-tp4-h100",
        blocks=312_500,
        replicas=4,
        in_flight=768,
        tool_time_factor=0.08,
    )


def _paper_step() -> Scenario:
    return _paper(
        "paper-step",
        "2 x Step3.7-like on TP8 H200",
        "step3.7-tp8-h200",
        blocks=750_000,
        replicas=2,
        in_flight=768,
        tool_time_factor=0.042,
    )


def _vllm_cpu() -> Scenario:
    return Scenario(
        name="vllm-cpu",
        about="two vLLM CPU replicas of 16,384 KV tokens under the workload cpu-mixed: the benchmark on real engines",
        workload="cpu-mixed",
        options=WorkloadOptions(context_tokens=8192),
        replicas=(
            ReplicaSpec(
                config=ReplicaConfig(
                    num_blocks=512,
                    block_size=32,
                    max_model_len=8192,
                    max_num_seqs=64,
                    max_num_batched_tokens=2048,
                    latency=CPU_TINY,
                ),
                count=2,
            ),
        ),
        trainer=TrainerSpec(in_flight=24),
        monitor=MonitorSpec(residency=True),
        warmup_s=60.0,
        duration_s=600.0,
    )


_ALL: tuple[Callable[[], Scenario], ...] = (
    _steady,
    _burst,
    _drift,
    _flip,
    _weight_sync,
    _slow_snapshots,
    _dropped_snapshots,
    _unlabelled,
    _silent_ends,
    _small_kv,
    _slow_tools,
    _heterogeneous,
    _replica_loss,
    _cpu_tier,
    _priority,
    _synchronous,
    _staleness,
    _partial,
    _populations,
    _groups,
    _paper_qwen,
    _paper_step,
    _vllm_cpu,
)
SCENARIOS: dict[str, Callable[[], Scenario]] = {build.__name__.strip("_").replace("_", "-"): build for build in _ALL}


def from_trace(path: Path, *, skip_bad: bool = False) -> Scenario:
    """The replicas of `steady` under recorded sessions, in contexts as long as the model takes."""
    limit = min(longest_context(read_sessions(path, skip_bad=skip_bad)) + 1, _LLAMA_CONTEXT_TOKENS)
    steady = _steady()
    return msgspec.structs.replace(
        steady,
        name=path.name,
        about=f"recorded sessions: {path.name}",
        workload=RECORDED,
        options=WorkloadOptions(context_tokens=limit, trace=str(path), skip_bad=skip_bad),
        replicas=(ReplicaSpec(config=_h100_8b(limit), count=4),),
        trainer=TrainerSpec(in_flight=32),
    )
