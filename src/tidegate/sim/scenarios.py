"""The scenarios that have a name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from tidegate.config.nearest import suggestion
from tidegate.errors import ConfigError
from tidegate.sim.latency import CPU_TINY, H100_8B
from tidegate.sim.monitor import MonitorSpec
from tidegate.sim.recorded import longest_context
from tidegate.sim.replica import ReplicaConfig
from tidegate.sim.scenario import RECORDED, ReplicaSpec, Scenario
from tidegate.sim.traces import read_trace
from tidegate.sim.trainer import TrainerSpec
from tidegate.sim.workload_names import WorkloadOptions

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


def _burst() -> Scenario:
    """A synchronised start, measured from its first second, when every estimate is a prior."""
    steady = _steady()
    return msgspec.structs.replace(
        steady,
        name="burst",
        about="steady, measured from a synchronised start of all sessions",
        trainer=TrainerSpec(in_flight=512),
        warmup_s=0.0,
        duration_s=900.0,
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


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "steady": _steady,
    "burst": _burst,
    "vllm-cpu": _vllm_cpu,
}


def from_trace(path: Path, *, skip_bad: bool = False) -> Scenario:
    """The replicas of `steady` under recorded sessions, in contexts as long as the model takes."""
    limit = min(longest_context(read_trace(path, skip_bad=skip_bad)) + 1, _LLAMA_CONTEXT_TOKENS)
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
