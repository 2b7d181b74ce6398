"""The fit gives back the constants that made the measurements."""

from __future__ import annotations

import msgspec
import pytest

from tidegate.errors import ConfigError
from tidegate.sim.fit import Decode, Joined, Measurements, Prefill, fit
from tidegate.sim.hardware import PRESETS, QWEN36_35B_A3B, STEP37, weights_read
from tidegate.sim.latency import CPU_TINY, LatencyModel

LENGTHS = (64, 256, 512, 1024, 2048, 4096, 8192)
SHAPES = ((1, 56), (4, 224), (16, 896), (1, 2072), (4, 8288))


def measured(model: LatencyModel, request_s: float = 0.002) -> Measurements:
    return Measurements(
        [Prefill(n, request_s + _prefill_s(model, n)) for n in LENGTHS],
        [Joined(r, 64, model.step_time_s(64 * r, r * 64**2 / 2, 0, 0, r)) for r in (1, 4, 8)],
        [Decode(d, k, model.step_time_s(0, 0.0, d, k)) for d, k in SHAPES],
    )


def _prefill_s(model: LatencyModel, tokens: int) -> float:
    steps = -(-tokens // 2048)
    return (
        steps * (model.step_s + model.prompt_s)
        + model.prefill_token_s * tokens
        + model.attention_pair_s * tokens**2 / 2
    )


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("prompt_s", [0.0, 0.004])
def test_exact_measurements_give_the_constants_back(name: str, prompt_s: float) -> None:
    model = msgspec.structs.replace(PRESETS[name], prompt_s=prompt_s)
    found = fit(measured(model))
    for field, value in msgspec.structs.asdict(model).items():
        assert getattr(found.latency, field) == pytest.approx(value, rel=1e-4, abs=1e-12), field
    assert found.request_s == pytest.approx(0.002, rel=1e-3)
    assert found.prefill_error < 1e-6
    assert found.joined_error < 1e-6
    assert found.decode_error < 1e-6


def test_a_prompts_own_cost_is_told_from_what_its_request_takes_outside_of_steps() -> None:
    inside, outside = (
        fit(measured(msgspec.structs.replace(CPU_TINY, prompt_s=prompt_s), request_s))
        for prompt_s, request_s in ((0.010, 0.001), (0.001, 0.010))
    )
    assert (inside.latency.prompt_s, inside.request_s) == pytest.approx((0.010, 0.001), rel=1e-3)
    assert (outside.latency.prompt_s, outside.request_s) == pytest.approx((0.001, 0.010), rel=1e-3)


def test_a_measurement_shorter_than_a_step_does_not_carry_the_fit_away() -> None:
    """Its rest is negative, by noise; it weighs as much as any other."""
    seen = measured(CPU_TINY)
    seen.joined[0] = Joined(1, 64, 0.9 * CPU_TINY.step_s)
    found = fit(seen)
    assert found.latency.prefill_token_s == pytest.approx(CPU_TINY.prefill_token_s, rel=0.25)


def test_no_constant_is_negative() -> None:
    seen = measured(CPU_TINY)
    seen.decodes[:] = [Decode(d, k, 0.02 - 1e-4 * d) for d, k in SHAPES]
    found = fit(seen)
    assert min(msgspec.structs.astuple(found.latency)) >= 0.0
    assert found.latency.decode_seq_s == 0.0
    assert found.decode_error > 0.0


def test_too_few_measurements_are_refused() -> None:
    seen = measured(CPU_TINY)
    with pytest.raises(ConfigError, match="do not give 3 constants"):
        fit(Measurements(seen.prefills, seen.joined, seen.decodes[:2]))
    with pytest.raises(ConfigError, match="do not tell the constants apart"):
        fit(Measurements([seen.prefills[0]] * 4, [], seen.decodes))


def test_a_batch_reads_most_but_not_all_experts() -> None:
    for model in (QWEN36_35B_A3B, STEP37):
        assert model.active_parameters < 0.4 * weights_read(model)
        assert weights_read(model) < 0.75 * model.parameters
