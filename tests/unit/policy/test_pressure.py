"""Pressure: a collapse is seen, a change of mixture is not taken for one, the cap contracts and comes back."""

from __future__ import annotations

import pytest

from tidegate.policy.params import PressureParams
from tidegate.policy.pressure import PressureCap, Signals
from tidegate.types import ReplicaSample

PARAMS = PressureParams()


class Watched:
    """A replica with a steady flow of requests, stepped by a second."""

    def __init__(self, live: int = 12, base_cap: int = 12) -> None:
        self.signals = Signals(PARAMS, 0.0)
        self.cap = PressureCap(PARAMS)
        self.now_s = 0.0
        self.live = live
        self.base_cap = base_cap

    def run(self, seconds: int, hit: float | None, *, single: int = 0, waiting: int = 0, preempted: int = 0) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            if hit is not None:
                self.signals.placed(2_000, 1_800)
                self.signals.answered(2_000, int(1_800 * hit), 1_800)
            for _ in range(single):  # requests that nobody expects to be cached
                self.signals.placed(5_000, 0)
                self.signals.answered(5_000, 0, 0)
            self.signals.sampled(
                ReplicaSample(at_s=self.now_s, replica="r", waiting=waiting, preemptions_total=preempted)
            )
            self.signals.fade(self.now_s)
            self.cap.step(self.signals, self.live, self.base_cap, self.now_s, 1.0)


def test_a_healthy_replica_is_not_pressed() -> None:
    watched = Watched()
    watched.run(120, 0.97)
    assert (watched.cap.cap, watched.cap.confirmed) == (None, False)
    assert watched.cap.pressure == pytest.approx(0.0, abs=1e-9)


def test_a_collapse_is_confirmed_and_contracts_the_cap() -> None:
    watched = Watched()
    watched.run(60, 0.97)
    watched.run(12, 0.1)
    assert watched.cap.confirmed
    assert watched.cap.cap == 9
    watched.run(20, 0.1)
    assert watched.cap.cap is not None
    assert watched.cap.cap <= 6


def test_a_collapse_from_the_start_is_no_healthy_reference() -> None:
    watched = Watched()
    watched.run(30, 0.05)
    assert watched.cap.confirmed


def test_a_short_dip_is_not_confirmed() -> None:
    watched = Watched()
    watched.run(60, 0.97)
    watched.run(2, 0.0)
    watched.run(30, 0.97)
    assert watched.cap.cap is None


def test_a_change_of_mixture_is_no_pressure() -> None:
    """The hit rate falls from 0.9 to below 0.1, the hit efficiency stays."""
    watched = Watched()
    watched.run(60, 0.97)
    watched.run(60, 0.97, single=6)
    assert watched.signals.hit_rate is not None
    assert watched.signals.hit_rate < 0.1
    assert watched.cap.cap is None


def test_a_recovery_in_progress_is_not_contracted_further() -> None:
    watched = Watched()
    watched.run(60, 0.97)
    watched.run(8, 0.1)
    contracted = watched.cap.cap
    for percent in range(15, 95, 4):
        watched.run(1, percent / 100)
    assert watched.cap.cap == contracted


def test_the_cap_recovers_step_by_step_and_goes() -> None:
    watched = Watched()
    watched.run(60, 0.97)
    watched.run(12, 0.1)
    watched.run(45, 0.97)
    assert watched.cap.cap is not None
    assert 9 <= watched.cap.cap <= 11
    watched.run(60, 0.97)
    assert watched.cap.cap is None


def test_waiting_halves_the_time_to_confirm() -> None:
    calm, queued = Watched(), Watched()
    for watched, waiting in ((calm, 0), (queued, 4)):
        watched.run(60, 0.97, waiting=waiting)
        watched.cap.step(watched.signals, 12, 12, watched.now_s, 0.0)
        while not watched.cap.confirmed:
            watched.run(1, 0.0, waiting=waiting)
    assert queued.now_s < calm.now_s


def test_preemptions_press_a_pool_without_any_reuse() -> None:
    watched = Watched()
    watched.run(5, None, preempted=0)
    for total in range(1, 12):
        watched.run(1, None, preempted=total)
    assert watched.cap.cap is not None


def test_used_fraction_is_not_looked_at() -> None:
    signals = Signals(PARAMS, 0.0)
    signals.sampled(ReplicaSample(at_s=1.0, replica="r", kv_used_fraction=0.99))
    assert signals.efficiency is None


def test_samples_stand_in_where_requests_report_nothing() -> None:
    signals = Signals(PARAMS, 0.0)
    for i in range(5):
        signals.placed(2_000, 1_800)
        sample = ReplicaSample(at_s=float(i), replica="r", prompt_tokens_total=2_000 * i, cached_tokens_total=900 * i)
        signals.sampled(sample)
    assert signals.efficiency == pytest.approx(0.5)


def test_kv_events_lead_where_they_show_less() -> None:
    signals = Signals(PARAMS, 0.0)
    signals.answered(2_000, 1_800, 1_800)
    assert signals.efficiency == pytest.approx(1.0)
    signals.resident_share = 0.4
    assert signals.efficiency == pytest.approx(0.4)


def test_empty_caches_erase_what_was_seen() -> None:
    watched = Watched()
    watched.run(20, 0.97)
    watched.signals.forget(watched.now_s)
    assert watched.signals.efficiency is None
