"""Weight updates: nothing starts meanwhile, callbacks come once, and the pool goes on whichever way the block ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.client.fake_gate import FakeGate, advice, until

from tidegate.client import GateError, GateRefused, RolloutScheduler

QUICK: dict[str, Any] = {"poll_s": 0.02}


class Heard:
    def __init__(self) -> None:
        self.said: list[str] = []

    def paused(self) -> None:
        self.said.append("pause")

    async def resumed(self) -> None:
        await asyncio.sleep(0)
        self.said.append("resume")


def scheduler(fake: FakeGate | None, heard: Heard) -> RolloutScheduler:
    return RolloutScheduler(fake.url if fake else None, on_pause=heard.paused, on_resume=heard.resumed, **QUICK)


async def starts(gate: RolloutScheduler) -> bool:
    try:
        async with asyncio.timeout(0.1), gate.session():
            return True
    except TimeoutError:
        return False


async def test_nothing_starts_while_weights_change(fake: FakeGate) -> None:
    heard = Heard()
    async with scheduler(fake, heard) as gate:
        async with gate.pausing():
            assert gate.paused
            assert not await starts(gate)
            await gate.update_weights({"path": "/w/7"})
        assert await starts(gate)
    assert heard.said == ["pause", "resume"]
    control = [(path, body) for _, path, body in fake.calls if path in ("/pause", "/update_weights", "/resume")]
    assert control == [("/pause", {"mode": "keep"}), ("/update_weights", {"path": "/w/7"}), ("/resume", {})]


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError])
async def test_the_pool_goes_on_after_an_update_that_failed(fake: FakeGate, error: type[BaseException]) -> None:
    heard = Heard()
    async with scheduler(fake, heard) as gate:
        with pytest.raises(error):
            async with gate.pausing():
                raise error
        assert await starts(gate)
    assert len(fake.asked("/resume")) == 1
    assert heard.said == ["pause", "resume"]


async def test_a_pause_that_failed_is_raised_and_undone(fake: FakeGate) -> None:
    heard = Heard()
    fake.statuses["/pause"] = 502
    async with scheduler(fake, heard) as gate:
        with pytest.raises(GateRefused, match="502"):
            async with gate.pausing():
                raise AssertionError("not reached")
        assert not gate.paused
    assert len(fake.asked("/resume")) == 1  # some replicas may have been paused


async def test_a_resume_that_failed_may_be_tried_again(fake: FakeGate) -> None:
    heard = Heard()
    async with scheduler(fake, heard) as gate:
        await gate.pause(mode=None)
        fake.statuses["/resume"] = 502
        with pytest.raises(GateRefused):
            await gate.resume()
        assert not await starts(gate)
        fake.statuses.clear()
        await gate.resume()
        assert await starts(gate)
    assert heard.said == ["pause", "resume"]
    assert fake.asked("/pause") == [{}]


async def test_the_bodys_error_is_raised_though_the_resume_failed_too(fake: FakeGate) -> None:
    async def update(gate: RolloutScheduler) -> None:
        async with gate.pausing():
            fake.statuses["/resume"] = 502
            raise ZeroDivisionError

    async with scheduler(fake, Heard()) as gate:
        with pytest.raises(ZeroDivisionError):
            await update(gate)


async def test_somebody_elses_pause_is_seen(fake: FakeGate) -> None:
    heard = Heard()
    async with scheduler(fake, heard) as gate:
        fake.advice = advice(5, paused=True)
        await until(lambda: gate.paused)
        assert not await starts(gate)
        fake.advice = advice(5)
        await until(lambda: not gate.paused)
        assert await starts(gate)
    assert heard.said == ["pause", "resume"]


async def test_a_callback_that_raises_stops_no_poll(fake: FakeGate) -> None:
    def fails() -> None:
        raise RuntimeError("mine")

    async with RolloutScheduler(fake.url, on_pause=fails, **QUICK) as gate:
        fake.advice = advice(5, paused=True)
        await until(lambda: gate.paused)
        fake.advice = advice(6)
        await until(lambda: gate.stats().limit == 6)
        with pytest.raises(RuntimeError, match="mine"):
            await gate.pause()


async def test_without_a_gate_the_pause_is_local() -> None:
    heard = Heard()
    async with scheduler(None, heard) as gate:
        async with gate.pausing():
            assert not await starts(gate)
            with pytest.raises(GateError, match="without a gate"):
                await gate.update_weights()
        assert await starts(gate)
    assert heard.said == ["pause", "resume"]
