"""What vLLM exports about requests: histograms in seconds of model time, and counts of how they ended."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.engine.generation import Generation

_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    __slots__ = ("bounds", "counts", "name", "help", "sum")

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = help
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


def _one_two_five(limit: int) -> tuple[int, ...]:
    """vLLM's buckets for token counts: 1, 2, 5, 10, ... up to the model's length."""
    bounds: list[int] = []
    power = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * power > limit:
                return tuple(bounds)
            bounds.append(mantissa * power)
        power *= 10


class RequestMetrics:
    def __init__(self, model_len: int) -> None:
        lengths = _one_two_five(model_len)

        def seconds(name: str, help: str) -> Histogram:
            return Histogram(name, help, _REQUEST_S)

        self.prompt_tokens = Histogram("request_prompt_tokens", "Number of prefill tokens processed.", lengths)
        self.generation_tokens = Histogram(
            "request_generation_tokens", "Number of generation tokens processed.", lengths
        )
        self.max_tokens = Histogram(
            "request_params_max_tokens", "Histogram of the max_tokens request parameter.", lengths
        )
        self.n = Histogram("request_params_n", "Histogram of the n request parameter.", (1, 2, 5, 10, 20))
        self.computed_tokens = Histogram(
            "request_prefill_kv_computed_tokens",
            "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
            lengths,
        )
        self.preemptions = Histogram(
            "request_num_preemptions", "Histogram of the number of preemptions per request.", (0, 1, 2, 5, 10, 20, 50)
        )
        self.step_tokens = Histogram(
            "iteration_tokens_total", "Histogram of number of tokens per engine_step.", _STEP_TOKENS
        )
        self.ttft_s = Histogram("time_to_first_token_seconds", "Histogram of time to first token in seconds.", _TTFT_S)
        self.itl_s = Histogram("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _TOKEN_S)
        self.tpot_s = Histogram(
            "request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            _TOKEN_S,
        )
        self.e2e_s = seconds("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.")
        self.queue_s = seconds("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.")
        self.inference_s = seconds(
            "request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request."
        )
        self.prefill_s = seconds(
            "request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request."
        )
        self.decode_s = seconds("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.")
        self.success = {reason: 0 for reason in ("stop", "length", "abort", "error", "repetition")}
        self.rejected = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}

    def histograms(self) -> list[Histogram]:
        return [value for value in vars(self).values() if isinstance(value, Histogram)]

    def step(self, tokens: int) -> None:
        self.step_tokens.observe(tokens)

    def token(self, generation: Generation, at_s: float) -> None:
        if generation.delivered == 1:
            self.ttft_s.observe(at_s - generation.arrival_s)
        else:
            self.itl_s.observe(at_s - generation.last_token_s)
        generation.last_token_s = at_s

    def ended(self, generation: Generation, at_s: float) -> None:
        self.success[generation.finish_reason] += 1
        self.prompt_tokens.observe(generation.prompt_tokens)
        self.generation_tokens.observe(generation.delivered)
        self.n.observe(generation.sampling.n)
        if generation.sampling.max_tokens is not None:
            self.max_tokens.observe(generation.sampling.max_tokens)
        self.computed_tokens.observe(generation.prompt_tokens - (generation.cached_tokens or 0))
        self.preemptions.observe(generation.preemptions)
        first_s = generation.first_token_s if generation.first_token_s is not None else at_s
        scheduled_s = generation.scheduled_s if generation.scheduled_s is not None else at_s
        self.e2e_s.observe(at_s - generation.arrival_s)
        self.queue_s.observe(scheduled_s - generation.arrival_s)
        self.inference_s.observe(at_s - scheduled_s)
        self.prefill_s.observe(first_s - scheduled_s)
        self.decode_s.observe(at_s - first_s)
        if generation.delivered > 1:
            self.tpot_s.observe((at_s - first_s) / (generation.delivered - 1))
