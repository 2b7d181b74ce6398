"""The fit gives back the constants that made the measurements."""

from __future__ import annotations

import msgspec
import pytest

from tidegate.errors import ConfigError
from tidegate.sim.fit import Decode, Prefill, fit
from tidegate.sim.hardware import PRESETS, QWEN36_35B_A3B, STEP37, weights_read
from tidegate.sim.latency import CPU_TINY, LatencyModel

LENGTHS = (64, 256, 512, 1024, 2048, 4096, 8192)
SHAPES = ((1, 56), (4, 224), (16, 896), (1, 2072), (4, 8288))


def measured(model: LatencyModel, request_s: float = 0.002) -> tuple[list[Prefill], list[Decode]]:
    prefills = [Prefill(n, request_s + _prefill_s(model, n)) for n in LENGTHS]
    return prefills, [Decode(d, k, model.step_time_s(0, 0.0, d, k)) for d, k in SHAPES]


def _prefill_s(model: LatencyModel, tokens: int) -> float:
    steps = -(-tokens // 2048)
    return steps * model.step_s + model.prefill_token_s * tokens + model.attention_pair_s * tokens**2 / 2


@pytest.mark.parametrize("name", list(PRESETS))
def test_exact_measurements_give_the_constants_back(name: str) -> None:
    model = PRESETS[name]
    found = fit(*measured(model))
    for field, value in msgspec.structs.asdict(model).items():
        assert getattr(found.latency, field) == pytest.approx(value, rel=1e-4), field
    assert found.request_s == pytest.approx(0.002, rel=1e-3)
    assert found.prefill_error < 1e-6
    assert found.decode_error < 1e-6


def test_no_constant_is_negative() -> None:
    prefills, decodes = measured(CPU_TINY)
    shrinking = [Decode(d.sequences, d.context_tokens, 0.02 - 1e-4 * d.sequences) for d in decodes]
    found = fit(prefills, shrinking)
    assert min(msgspec.structs.astuple(found.latency)) >= 0.0
    assert found.latency.decode_seq_s == 0.0
    assert found.decode_error > 0.0


def test_too_few_measurements_are_refused() -> None:
    prefills, decodes = measured(CPU_TINY)
    with pytest.raises(ConfigError, match="do not give 3 constants"):
        fit(prefills[:2], decodes)
    with pytest.raises(ConfigError, match="do not tell the constants apart"):
        fit([prefills[0]] * 4, decodes)


def test_a_batch_reads_most_but_not_all_experts() -> None:
    for model in (QWEN36_35B_A3B, STEP37):
        assert model.active_parameters < 0.4 * weights_read(model)
        assert weights_read(model) < 0.75 * model.parameters
