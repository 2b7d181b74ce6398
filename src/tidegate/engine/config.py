"""What `tidegate engine` can be told; names are vLLM's where it has the same option."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from tidegate.errors import ConfigError
from tidegate.sim.hardware import PRESETS
from tidegate.sim.replica import ReplicaConfig


class EngineConfig(Struct, frozen=True, kw_only=True):
    dialect: Annotated[Literal["vllm", "sglang"], Meta(description="Whose HTTP surface and metrics.")] = "vllm"
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="0: a free one.")] = 0
    kv_tokens: Annotated[int, Meta(ge=32, description="Size of the KV cache.")] = 131_072
    block_size: Annotated[int, Meta(ge=1, description="Tokens in a KV block.")] = 16
    max_model_len: Annotated[
        int | None, Meta(description="Longest prompt + reply. None: what fits in the KV cache, at most 131072.")
    ] = None
    max_num_seqs: Annotated[int, Meta(ge=1, description="Sequences in a batch.")] = 256
    max_num_batched_tokens: Annotated[int, Meta(ge=1, description="Tokens in a step, prefill chunks included.")] = 8192
    max_num_queued_reqs: Annotated[
        int | None, Meta(description="Unfinished requests; more are answered 503. None: no limit.")
    ] = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True
    served_model_name: str = "tidegate"
    latency: Annotated[str, Meta(description=f"Step-time model: {', '.join(PRESETS)}.")] = "cpu-tiny"
    time_scale: Annotated[float, Meta(gt=0, description="Seconds of model time in one second of the clock.")] = 1.0
    mean_output_tokens: Annotated[
        int, Meta(ge=1, description="Average length of a reply that may end by itself (ignore_eos is not set).")
    ] = 256
    seed: Annotated[int, Meta(description="Other replies.")] = 0
    kv_events_port: Annotated[
        int | None, Meta(description="Publish KV events on this port (ZMQ PUB); 0: a free one. None: do not.")
    ] = None
    kv_events_replay_port: Annotated[
        int | None, Meta(description="Replay KV events on this port (ZMQ ROUTER); 0: a free one. None: do not.")
    ] = None
    kv_events_topic: str = ""
    plugin: Annotated[
        bool, Meta(description="Eviction by session: tidegate's plugin for vLLM, or SGLang's session radix cache.")
    ] = False
    shutdown_timeout_s: Annotated[
        float, Meta(ge=0, description="On SIGTERM, let running requests go on for so long. 0: abort them.")
    ] = 0.0

    @property
    def num_blocks(self) -> int:
        """The null block included, as vLLM counts."""
        return self.kv_tokens // self.block_size

    @property
    def model_len(self) -> int:
        fits = (self.num_blocks - 1) * self.block_size
        return self.max_model_len if self.max_model_len is not None else min(fits, 131_072)

    def replica(self) -> ReplicaConfig:
        if self.latency not in PRESETS:
            raise ConfigError(f"unknown latency preset {self.latency!r}: one of {', '.join(PRESETS)}")
        try:
            return ReplicaConfig(
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                max_model_len=self.model_len,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                scheduling_policy=self.scheduling_policy,
                enable_prefix_caching=self.enable_prefix_caching,
                record_events=self.kv_events_port is not None,
                latency=PRESETS[self.latency],
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
