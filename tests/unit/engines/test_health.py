"""The states of a replica, from facts and their times."""

from __future__ import annotations

import pytest

from tidegate.config.engines import EnginesConfig
from tidegate.engines.health import Health, ProbeFailure, State

CONFIG = EnginesConfig(
    unhealthy_after=2,
    eject_after=3,
    eject_s=2.0,
    eject_max_s=16.0,
    drain_s=30.0,
    livelock_after_s=30.0,
    stalled_after_s=120.0,
)


def healthy() -> Health:
    health = Health(CONFIG)
    health.probe_ok()
    return health


def state(health: Health, now_s: float = 0.0, *, last_usable: bool = False) -> tuple[State, str]:
    verdict = health.verdict(now_s, lambda: last_usable)
    return verdict.state, verdict.reason


def test_it_starts_unusable_until_it_answers() -> None:
    health = Health(CONFIG)
    assert state(health) == (State.STARTING, "starting")
    assert not health.verdict(0.0).usable
    health.probe_ok()
    assert state(health) == (State.HEALTHY, "ok")
    assert health.verdict(0.0).usable


def test_one_refused_probe_is_not_enough_and_two_are() -> None:
    health = healthy()
    health.probe_failed(1.0, "connect", "refused")
    assert state(health, 1.0) == (State.HEALTHY, "ok")
    health.probe_failed(2.0, "connect", "refused")
    assert state(health, 2.0) == (State.UNREACHABLE, "connect_failed")
    assert health.last_error == "refused"
    health.probe_ok()
    assert state(health, 3.0) == (State.HEALTHY, "ok")


def test_refusals_with_an_answer_between_them_do_not_add_up() -> None:
    health = healthy()
    for at_s in range(5):
        health.probe_failed(at_s, "connect", "refused")
        health.probe_ok()
    assert state(health, 9.0) == (State.HEALTHY, "ok")


def test_5xx_probes_make_it_unhealthy() -> None:
    health = healthy()
    health.probe_failed(1.0, "status", "503")
    health.probe_failed(2.0, "status", "503")
    assert state(health, 2.0) == (State.UNHEALTHY, "health_failed")


def test_a_slow_probe_alone_never_makes_it_unusable() -> None:
    health = healthy()
    for at_s in range(0, 1000, 5):
        health.probe_failed(at_s, "hang", "no answer")
        health.sampled(at_s, running=1, waiting=0, totals=(at_s, at_s))
    assert state(health, 1000.0) == (State.HEALTHY, "ok")


def test_hanging_with_counters_that_stand_still_is_stalled_but_never_for_the_last_replica() -> None:
    health = healthy()
    health.sampled(0.0, running=1, waiting=0, totals=(5, 5))
    for at_s in range(0, 130, 5):
        health.probe_failed(at_s, "hang", "no answer")
    assert state(health, 119.0) == (State.HEALTHY, "ok")
    assert state(health, 121.0) == (State.UNHEALTHY, "stalled")
    assert state(health, 121.0, last_usable=True) == (State.HEALTHY, "ok")
    health.probe_ok()
    assert state(health, 122.0) == (State.HEALTHY, "ok")


def test_waiting_without_running_or_progress_is_a_livelock_and_not_free() -> None:
    health = healthy()
    for at_s in range(0, 31, 5):
        health.sampled(at_s, running=0, waiting=3, totals=(5, 5))
    assert state(health, 29.0) == (State.HEALTHY, "ok")
    assert state(health, 30.0) == (State.UNHEALTHY, "livelock")
    assert state(health, 30.0, last_usable=True) == (State.UNHEALTHY, "livelock")
    health.sampled(31.0, running=1, waiting=2, totals=(5, 5))
    assert state(health, 31.0) == (State.HEALTHY, "ok")


@pytest.mark.parametrize(("running", "waiting"), [(1, 3), (0, 0), (None, 3), (0, None)])
def test_what_runs_or_is_idle_or_unknown_is_no_livelock(running: int | None, waiting: int | None) -> None:
    health = healthy()
    for at_s in range(0, 100, 5):
        health.sampled(at_s, running, waiting, totals=(5, 5))
    assert state(health, 100.0) == (State.HEALTHY, "ok")


def test_waiting_while_counters_move_is_no_livelock() -> None:
    health = healthy()
    for at_s in range(0, 100, 5):
        health.sampled(at_s, running=0, waiting=3, totals=(at_s, 5))
    assert state(health, 100.0) == (State.HEALTHY, "ok")


def eject(health: Health, at_s: float) -> None:
    for _ in range(3):
        health.connect_failed(at_s, "reset")


def test_three_failed_connections_in_a_row_eject_it_for_a_while() -> None:
    health = healthy()
    health.connect_failed(0.0, "reset")
    health.connect_failed(0.0, "reset")
    assert state(health) == (State.HEALTHY, "ok")
    health.connect_failed(0.0, "reset")
    assert state(health, 1.9) == (State.EJECTED, "ejected")
    assert state(health, 2.0) == (State.HALF_OPEN, "half_open")
    assert health.verdict(2.0).usable


def test_an_answer_of_a_request_breaks_the_row() -> None:
    health = healthy()
    for _ in range(10):
        health.connect_failed(0.0, "reset")
        health.connect_failed(0.0, "reset")
        health.response_ok()
    assert state(health) == (State.HEALTHY, "ok")


def test_half_open_heals_by_one_answer() -> None:
    health = healthy()
    eject(health, 0.0)
    assert state(health, 2.0)[0] is State.HALF_OPEN
    health.response_ok()
    assert state(health, 2.0) == (State.HEALTHY, "ok")


def test_half_open_heals_by_three_probes_when_no_request_comes() -> None:
    health = healthy()
    eject(health, 0.0)
    assert state(health, 2.0)[0] is State.HALF_OPEN
    health.probe_ok()
    health.probe_ok()
    assert state(health, 3.0)[0] is State.HALF_OPEN
    health.probe_ok()
    assert state(health, 4.0) == (State.HEALTHY, "ok")


def test_each_ejection_lasts_twice_as_long_up_to_the_bound_and_health_forgives() -> None:
    health = healthy()
    now_s = 0.0
    eject(health, now_s)
    for length_s in (2.0, 4.0, 8.0, 16.0, 16.0, 16.0):
        assert state(health, now_s + length_s - 0.1)[0] is State.EJECTED
        now_s += length_s
        assert state(health, now_s)[0] is State.HALF_OPEN
        health.connect_failed(now_s, "reset")  # one is enough while it is on trial
    assert state(health, now_s + 16.0)[0] is State.HALF_OPEN
    health.response_ok()
    eject(health, 1000.0)
    assert state(health, 1002.0)[0] is State.HALF_OPEN


def test_an_ejection_does_not_end_while_probes_fail() -> None:
    health = healthy()
    eject(health, 0.0)
    health.probe_failed(1.0, "status", "503")
    assert state(health, 50.0)[0] is State.EJECTED
    health.probe_ok()
    assert state(health, 51.0)[0] is State.HALF_OPEN


def test_an_empty_abort_means_draining_for_a_while_then_a_trial() -> None:
    health = Health(EnginesConfig(drain_s=30.0, eject_max_s=60.0))
    health.probe_ok()
    health.empty_abort(0.0)
    health.empty_abort(10.0)
    assert state(health, 29.0) == (State.DRAINING, "draining")
    assert state(health, 30.0) == (State.HALF_OPEN, "half_open")
    health.empty_abort(30.0)
    assert state(health, 89.0) == (State.DRAINING, "draining")
    assert state(health, 90.0)[0] is State.HALF_OPEN


def test_a_drained_replica_that_comes_back_is_a_new_one() -> None:
    health = healthy()
    health.empty_abort(0.0)
    health.restarted()
    assert state(health, 1.0) == (State.HEALTHY, "ok")


def test_paused_and_sleeping_are_states_of_their_own() -> None:
    health = healthy()
    health.paused(True)
    assert state(health) == (State.PAUSED, "paused")
    health.sleeping(True)
    assert state(health) == (State.SLEEPING, "sleeping")
    health.sleeping(False)
    health.paused(False)
    assert state(health) == (State.HEALTHY, "ok")


def test_a_paused_replica_that_is_gone_is_unreachable() -> None:
    health = healthy()
    health.paused(True)
    health.probe_failed(1.0, "connect", "refused")
    health.probe_failed(2.0, "connect", "refused")
    assert state(health, 2.0)[0] is State.UNREACHABLE


def test_only_healthy_and_half_open_replicas_are_usable() -> None:
    assert {state for state in State if state.usable} == {State.HEALTHY, State.HALF_OPEN}


# --- requests that nobody will answer --------------------------------------------------------------------------------
TOTALS = (100, 100)


def test_a_replica_that_cannot_be_reached_for_long_has_lost_what_was_sent_before() -> None:
    health = healthy()
    health.probe_failed(5.0, "connect", "refused")
    health.probe_failed(7.0, "connect", "refused")
    assert health.lost_before_s(5.0 + CONFIG.lost_after_s - 0.1) is None
    assert health.lost_before_s(5.0 + CONFIG.lost_after_s) == 5.0
    health.probe_ok()
    assert health.lost_before_s(100.0) is None
    health.probe_failed(100.0, "connect", "refused")
    assert health.lost_before_s(101.0) is None


@pytest.mark.parametrize("kind", ["hang", "status"])
def test_a_replica_that_connects_has_lost_nothing(kind: ProbeFailure) -> None:
    health = healthy()
    for at_s in range(100):
        health.probe_failed(at_s, kind, "not well")
    assert health.lost_before_s(100.0) is None


def test_an_engine_that_is_idle_for_long_has_lost_what_was_sent_before() -> None:
    health = healthy()
    for at_s in (5.0, 60.0, 5.0 + CONFIG.stalled_after_s - 0.1):
        health.sampled(at_s, 0, 0, TOTALS)
        assert health.lost_before_s(at_s) is None
    assert health.lost_before_s(1000.0) is None  # unless it still says so
    health.sampled(1000.0, 0, 0, TOTALS)
    assert health.lost_before_s(1000.0) == 5.0
    health.sampled(1001.0, 1, 0, TOTALS)
    assert health.lost_before_s(1001.0) is None


@pytest.mark.parametrize(("running", "waiting"), [(1, 0), (0, 1), (None, 0), (0, None)])
def test_one_that_works_or_does_not_say_has_lost_nothing(running: int | None, waiting: int | None) -> None:
    health = healthy()
    for at_s in (0.0, 1000.0):
        health.sampled(at_s, running, waiting, TOTALS)
    assert health.lost_before_s(1000.0) is None


def test_a_pause_is_no_idleness() -> None:
    health = healthy()
    health.sampled(0.0, 0, 0, TOTALS)
    health.paused(True)
    health.sampled(1000.0, 0, 0, TOTALS)
    health.paused(False)
    health.sampled(1001.0, 0, 0, TOTALS)
    assert health.lost_before_s(1001.0) is None


def test_a_replica_that_loads_takes_no_requests_before_its_first_good_answer() -> None:
    health = Health(CONFIG)
    health.probe_failed(0.0, "status", "503")
    assert health.verdict(0.0).state is State.STARTING
    health.probe_ok()
    assert health.verdict(1.0).usable
    for at_s in range(CONFIG.unhealthy_after):  # it ends, and is started again
        health.probe_failed(2.0 + at_s, "connect", "refused")
    health.probe_failed(9.0, "status", "503")
    assert health.verdict(9.0).state is State.STARTING
    health.probe_ok()
    assert health.verdict(10.0).usable
