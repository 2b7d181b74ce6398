"""Step times from facts: what a model reads and multiplies, over what a GPU can.

    step_s            weights that a step reads / bandwidth, plus a fixed cost for each layer (kernels, all-reduce)
    prefill_token_s   2 FLOPs for each active parameter / FLOP/s
    attention_pair_s  4 FLOPs for each full-attention head dimension and layer / FLOP/s
    kv_token_s        KV bytes of a token / bandwidth
    decode_seq_s      the FLOPs of one token, and the host's work for a sequence

A mixture of experts reads the experts that a batch of 32 touches: of E experts with k active, E (1 - (1 - k/E)^32).

GPUs: H100 SXM 3.35 TB/s, 989 TFLOP/s dense bf16; H200 SXM 4.8 TB/s, the same FLOP/s (NVIDIA's data sheets). Served
models reach about 60 % of the bandwidth and 45 % of the FLOP/s; tensor parallelism divides both, at 85 % efficiency.

Models: Qwen3.6-35B-A3B, 40 layers of which every fourth has full attention (16 heads of 256, 2 KV heads: 10 x 2 x 2 x
256 x 2 bytes = 20 KiB of KV a token), 256 experts, 8 active and a shared one. Step3.7-like, after Step 3.5 Flash: 196B
parameters, 11B active, 45 layers of which 12 have full attention (64 heads of 128, 8 KV heads: 48 KiB a token), 288
experts, 8 active. Both in bf16. The parts of a model outside its experts are what is left of the active parameters.
"""

from __future__ import annotations

import msgspec

from tidegate.sim.latency import CPU_SMALL, CPU_TINY, H100_8B, LatencyModel

BANDWIDTH_SHARE = 0.60
FLOPS_SHARE = 0.45
TENSOR_PARALLEL_SHARE = 0.85
LAYER_S = 2.5e-5  # a layer's kernels in a captured graph, and two all-reduces
SEQUENCE_HOST_S = 2.0e-5  # sampling, detokenisation, scheduling
TYPICAL_BATCH = 32


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    bandwidth: float  # bytes/s
    flops: float


class Model(msgspec.Struct, frozen=True, kw_only=True):
    parameters: float
    active_parameters: float
    layers: int
    attention_layers: int
    heads: int
    head_dim: int
    kv_token_bytes: int
    experts: int = 1
    active_experts: int = 1
    parameter_bytes: float = 2.0


H100 = Gpu(bandwidth=3.35e12, flops=9.89e14)
H200 = Gpu(bandwidth=4.8e12, flops=9.89e14)

QWEN36_35B_A3B = Model(
    parameters=35e9,
    active_parameters=3e9,
    layers=40,
    attention_layers=10,
    heads=16,
    head_dim=256,
    kv_token_bytes=20_480,
    experts=256,
    active_experts=8,
)
STEP37 = Model(
    parameters=196e9,
    active_parameters=11e9,
    layers=45,
    attention_layers=12,
    heads=64,
    head_dim=128,
    kv_token_bytes=49_152,
    experts=288,
    active_experts=8,
)


def latency(model: Model, gpu: Gpu, tensor_parallel: int) -> LatencyModel:
    scale = tensor_parallel * (TENSOR_PARALLEL_SHARE if tensor_parallel > 1 else 1.0)
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE * scale
    flops = gpu.flops * FLOPS_SHARE * scale
    token_s = 2 * model.active_parameters / flops
    return LatencyModel(
        step_s=weights_read(model) * model.parameter_bytes / bandwidth + model.layers * LAYER_S,
        prefill_token_s=token_s,
        attention_pair_s=4 * model.attention_layers * model.heads * model.head_dim / flops,
        decode_seq_s=token_s + SEQUENCE_HOST_S,
        kv_token_s=model.kv_token_bytes / bandwidth,
    )


def weights_read(model: Model) -> float:
    """Parameters that one step reads."""
    if model.experts == 1:
        return model.parameters
    share = model.active_experts / model.experts
    # active = dense + share x expert parameters; all = dense + expert parameters
    expert_parameters = (model.parameters - model.active_parameters) / (1 - share)
    dense = model.parameters - expert_parameters
    return dense + expert_parameters * (1 - (1 - share) ** TYPICAL_BATCH)


PRESETS: dict[str, LatencyModel] = {
    "cpu-tiny": CPU_TINY,
    "cpu-small": CPU_SMALL,
    "h100-8b": H100_8B,
    "qwen3.6-35b-a3b-tp4-h100": latency(QWEN36_35B_A3B, H100, 4),
    "step3.7-tp8-h200": latency(STEP37, H200, 8),
}
