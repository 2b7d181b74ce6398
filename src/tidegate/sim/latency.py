"""How long one engine step takes.

A step computes a batch of tokens: chunks of prompts (prefill) and one token for each decoding sequence. In seconds:

    t = step_s + prompt_s R + prefill_token_s P + attention_pair_s A + decode_seq_s D + kv_token_s K

    R  prompts of which this step computes a chunk: their entry into the batch, and kernels that run for each of them
    P  prompt tokens computed in this step: the matrix multiplications, linear in tokens
    A  pairs (computed token, token it attends to) of prefill chunks: attention, linear in chunk x context
    D  decoding sequences: their share of the matrix multiplications, sampling and detokenisation
    K  tokens of KV cache read by decoding sequences: their summed contexts

`step_s` is what every step costs: reading the weights once, launching kernels, scheduling.
"""

from __future__ import annotations

import msgspec


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True):
    step_s: float
    prefill_token_s: float
    attention_pair_s: float
    decode_seq_s: float
    kv_token_s: float
    prompt_s: float = 0.0

    def step_time_s(
        self, prefill_tokens: int, attention_pairs: float, decode_seqs: int, kv_tokens: int, prompts: int = 0
    ) -> float:
        return (
            self.step_s
            + self.prompt_s * prompts
            + self.prefill_token_s * prefill_tokens
            + self.attention_pair_s * attention_pairs
            + self.decode_seq_s * decode_seqs
            + self.kv_token_s * kv_tokens
        )


# vLLM 0.32 on two CPU cores, a model of hidden size 512 with 8 layers. It prefills 4,600 tokens/s where contexts are
# short (the linear term) and 2,400 at a context of 8k (the attention term makes the difference; 4k attended on
# average). A closed loop of one session (24 tokens a turn, pause 0.5 s, about 250 new prompt tokens a turn) makes 0.83
# turns/s, one of four 2.72: they give the cost of a step and of a sequence in it. KV reads are within the noise.
CPU_TINY = LatencyModel(
    step_s=0.0245,
    prefill_token_s=1 / 4600,
    attention_pair_s=(1 / 2400 - 1 / 4600) / 4096,
    decode_seq_s=0.0003,
    kv_token_s=2.0e-7,
)

# The same model in bfloat16 on two cores that multiply it, two vLLM replicas of one core each at once, as fitted by
# `sim fit` at the beginning of bench/validate.py: relative errors of 6 % (prefill), 7 % (prompts together), 12 %
# (decode). Throughput of simulated replicas was 0.87 to 1.07 of theirs (docs/simulator.md).
CPU_SMALL = LatencyModel(
    step_s=0.0159,
    prefill_token_s=1.93e-4,
    attention_pair_s=1.37e-7,
    decode_seq_s=1.79e-4,
    kv_token_s=1.51e-6,
)

# An 8B dense bf16 model on one H100 SXM (Llama-3.1-8B: 16 GB of weights, 128 KiB of KV a token; 3.35 TB/s, 989 TFLOP/s
# dense bf16, NVIDIA's data sheet), at 60 % of peak bandwidth and 45 % of peak FLOP/s, which served models reach:
# weights 16e9 / 2.0e12 = 8 ms a step; prefill 2 * 8e9 FLOP / 4.45e14 = 36 us a token; attention 4 * 32 layers * 4096
# FLOP a pair / 4.45e14 = 1.2 ns; KV read 131,072 / 2.0e12 = 65 ns a token; sampling and host work 20 us a sequence.
H100_8B = LatencyModel(
    step_s=0.008,
    prefill_token_s=3.6e-5,
    attention_pair_s=1.2e-9,
    decode_seq_s=2.0e-5,
    kv_token_s=6.5e-8,
)
