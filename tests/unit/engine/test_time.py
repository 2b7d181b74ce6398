"""Model time: what the clock's coarseness must not change."""

from __future__ import annotations

import asyncio
import time

import pytest

from tidegate.engine import tokenizer
from tidegate.engine.config import EngineConfig
from tidegate.engine.core import MAX_LAG_S, EngineCore
from tidegate.engine.generation import Generation, Sampling

PROMPT = tokenizer.pack([1] * 16)


async def ended(generation: Generation) -> None:
    async with asyncio.timeout(20):
        while not generation.done:
            await generation.changed.wait()
            generation.changed.clear()


def submit(core: EngineCore, id: str, tokens: int) -> Generation:
    return core.submit(PROMPT, Sampling(max_tokens=tokens, ignore_eos=True), id=id)


@pytest.mark.parametrize("scale", [100.0, 3000.0])
async def test_a_generation_takes_the_same_model_time_at_any_scale(scale: float) -> None:
    core = EngineCore(EngineConfig(time_scale=scale))
    generation = submit(core, "a", 60)
    await ended(generation)
    slow = core.config.replica().latency
    context = sum(range(17, 17 + 59))
    decode_s = 59 * (slow.step_s + slow.decode_seq_s) + slow.kv_token_s * context
    assert generation.first_token_s is not None
    assert generation.last_token_s - generation.first_token_s == pytest.approx(decode_s)
    core.close()


async def test_a_reply_is_not_delivered_before_its_time() -> None:
    core = EngineCore(EngineConfig(time_scale=10.0))
    generation = submit(core, "a", 20)
    started = time.monotonic()
    await ended(generation)
    assert (time.monotonic() - started) * 10.0 >= (generation.last_token_s - generation.arrival_s) * 0.98
    core.close()


async def test_a_request_joins_the_first_step_after_its_arrival_even_when_that_is_run_late() -> None:
    core = EngineCore(EngineConfig(time_scale=10.0))
    first = submit(core, "a", 100)
    await asyncio.sleep(0.02)
    second = submit(core, "b", 3)
    time.sleep(MAX_LAG_S / 2)  # noqa: ASYNC251 - the loop is busy elsewhere while many steps fall due
    await ended(second)
    assert second.scheduled_s is not None
    assert 0.0 <= second.scheduled_s - second.arrival_s <= core.config.replica().latency.step_s * 1.1
    core.abort_all()
    assert first.done
    core.close()


async def test_a_stopped_process_sets_the_model_clock_back_and_says_so() -> None:
    core = EngineCore(EngineConfig(time_scale=10.0))
    generation = submit(core, "a", 100)
    await asyncio.sleep(0.02)
    before = core.now_s()
    time.sleep(4 * MAX_LAG_S)  # noqa: ASYNC251 - as if the process had not been scheduled
    await asyncio.sleep(0.01)
    assert core.slipped_s > MAX_LAG_S
    assert core.now_s() - before < 4 * MAX_LAG_S * 10.0
    await ended(generation)
    core.close()


async def test_an_engine_that_breaks_answers_everybody_and_says_that_it_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = EngineCore(EngineConfig(time_scale=100.0))
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
    monkeypatch.setattr(core.replica, "step", lambda _: 1 / 0)
    generation = submit(core, "a", 5)
    await ended(generation)
    assert generation.finish_reason == "abort"
    assert not core.alive
    assert isinstance(failures[0], ZeroDivisionError)
