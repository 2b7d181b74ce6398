"""Sessions: identity, generations, expiry, the bounded table."""

from __future__ import annotations

import pytest
from tests.unit.policy.shell import Shell, ended, held, placed, rejected

from tidegate.policy.baselines.params import StaticCapParams
from tidegate.policy.params import CoreParams, LedgerParams
from tidegate.types import (
    EpochStarted,
    Place,
    PoolPaused,
    PoolResumed,
    ReplicaRemoved,
    SessionOpened,
)


def short_ttl(**fields: object) -> CoreParams:
    return CoreParams(ledger=LedgerParams(idle_ttl_initial_s=30.0, **fields))  # type: ignore[arg-type]


def test_a_session_stays_on_its_replica() -> None:
    shell = Shell("sticky_least_loaded", 3)
    first = shell.turn("a")
    shell.turn("b")
    assert {shell.turn("a") for _ in range(5)} == {first}


def test_ids_with_a_common_prefix_are_different_sessions() -> None:
    shell = Shell("sticky_least_loaded", 2)
    assert shell.turn("session-1") != shell.turn("session-12")
    assert shell.view().live == 2


def test_a_finish_ends_the_session_once() -> None:
    shell = Shell("sticky_least_loaded")
    url = shell.turn("a", workload="agentic")
    first = ended(shell.finish("a"))
    assert [(e.session, e.replica, e.workload, e.cause, e.completed) for e in first] == [
        ("a", url, "agentic", "finished", True)
    ]
    assert shell.finish("a") == []
    assert shell.finish("never-seen") == []
    assert shell.view().classes["agentic"].completed == 1


def test_a_late_request_opens_a_new_generation_that_counts_once() -> None:
    shell = Shell("sticky_least_loaded")
    shell.turn("a")
    shell.finish("a")
    shell.turn("a")
    assert shell.ledger.sessions["a"].generation == 1
    assert shell.view().classes["unlabelled"].completed == 1
    shell.finish("a")
    assert shell.view().classes["unlabelled"].completed == 2


def test_a_finish_during_a_request_keeps_the_request_and_its_memory_counted() -> None:
    shell = Shell("sticky_least_loaded", 1)
    shell.arrive("a", prompt_tokens=500)
    assert len(ended(shell.finish("a"))) == 1
    view = shell.view()
    assert (view.live, view.in_flight) == (0, 1)
    assert shell.tokens("http://r0") == 500
    shell.end(1, prompt_tokens=500, completion_tokens=50)
    assert (shell.view().in_flight, shell.tokens("http://r0")) == (0, 0)


def test_the_final_mark_ends_the_session_with_its_request() -> None:
    shell = Shell("sticky_least_loaded")
    shell.arrive("a")
    assert [e.cause for e in ended(shell.end(1, final=True))] == ["finished"]


def test_expiry_is_checked_before_activity_renews_it() -> None:
    shell = Shell("sticky_least_loaded", params=short_ttl())
    shell.turn("a")
    shell.now_s += 31.0  # no tick: the request itself finds it expired
    decisions = shell.arrive_all("a")
    assert [e.cause for e in ended(decisions)] == ["expired"]
    assert isinstance(decisions[-1], Place)
    assert shell.ledger.sessions["a"].generation == 1


def test_a_request_in_flight_never_expires_its_session() -> None:
    shell = Shell("sticky_least_loaded", params=short_ttl())
    shell.arrive("a")
    assert ended(shell.tick(10_000.0)) == []
    shell.end(1)
    assert ended(shell.tick(29.0)) == []
    assert [e.cause for e in ended(shell.tick(2.0))] == ["expired"]


def test_an_expired_session_counts_as_completed_only_after_a_success() -> None:
    shell = Shell("sticky_least_loaded", params=short_ttl())
    shell.turn("good")
    shell.arrive("bad")
    shell.end(shell.requests, "aborted")
    assert {e.session: e.completed for e in ended(shell.tick(60.0))} == {"good": True, "bad": False}


def test_idle_time_stands_still_while_the_pool_is_paused() -> None:
    shell = Shell("sticky_least_loaded", params=short_ttl())
    shell.turn("a")
    shell.send(PoolPaused(at_s=shell.now_s))
    assert ended(shell.tick(500.0)) == []
    shell.send(PoolResumed(at_s=shell.now_s))
    assert ended(shell.tick(29.0)) == []
    assert len(ended(shell.tick(2.0))) == 1


def test_the_ttl_is_learned_from_the_gaps_of_the_class() -> None:
    shell = Shell("sticky_least_loaded")
    for _ in range(20):
        for session in ("a", "b", "c"):
            shell.turn(session, workload="slow")
            shell.turn(f"x{session}", workload="quick")
        shell.now_s += 100.0
    gaps = {k.name: k.gaps.ttl_s(len(k.idle)) for k in shell.ledger.classes}
    assert 400.0 <= gaps["slow"] <= 600.0  # four times the 99th percentile of 100 s, within a bin
    assert gaps["quick"] == pytest.approx(gaps["slow"], rel=0.01)


def test_a_class_whose_sessions_never_come_back_expires_at_the_floor() -> None:
    shell = Shell("sticky_least_loaded")
    for i in range(40):
        shell.turn(f"once-{i}")
    assert ended(shell.tick(59.0)) == []
    assert len(ended(shell.tick(2.0))) == 40


def test_dead_sessions_do_not_stop_a_pool_that_others_wait_for() -> None:
    """Four sessions whose client died fill the only replica, before their class has taught any gap."""
    shell = Shell("static_cap", 1, params=CoreParams(static_cap=StaticCapParams(cap=4)))
    for i in range(4):
        shell.turn(f"dead-{i}")
    waiting = held(shell.arrive("new")).request
    assert ended(shell.tick(49.0)) == []
    decisions = shell.tick(12.0)
    assert [e.session for e in ended(decisions)] == ["dead-0"]
    assert [p.request for p in placed(decisions)] == [waiting]
    assert ended(shell.tick(30.0)) == []  # the replica works again: the others may still come back


def test_idle_sessions_keep_their_place_while_nobody_waits() -> None:
    shell = Shell("static_cap", 1, params=CoreParams(static_cap=StaticCapParams(cap=4)))
    for i in range(4):
        shell.turn(f"slow-{i}")
    assert ended(shell.tick(1000.0)) == []


def test_a_return_after_expiry_teaches_the_ttl() -> None:
    shell = Shell("sticky_least_loaded", params=short_ttl())
    shell.turn("a")
    shell.tick(100.0)
    shell.turn("a")
    assert shell.ledger.classes[0].gaps.samples == 1


def test_a_full_table_evicts_the_longest_idle() -> None:
    shell = Shell("sticky_least_loaded", params=CoreParams(ledger=LedgerParams(max_sessions=2)))
    for session in ("a", "b"):
        shell.turn(session)
        shell.now_s += 1.0
    shell.turn("a")
    decisions = shell.arrive_all("c")
    assert [(e.session, e.cause) for e in ended(decisions)] == [("b", "evicted")]


def test_a_table_full_of_busy_sessions_refuses_ids_but_not_sessionless_requests() -> None:
    shell = Shell("sticky_least_loaded", params=CoreParams(ledger=LedgerParams(max_sessions=2)))
    shell.arrive("a")
    shell.arrive("b")
    assert [r.reason for r in rejected(shell.arrive_all("c"))] == ["session_table_full"]
    assert isinstance(shell.arrive(None), Place)
    assert isinstance(shell.arrive("a"), Place)  # a continuation is no new id


def test_a_sessionless_request_is_a_session_of_one_request() -> None:
    shell = Shell("sticky_least_loaded")
    assert isinstance(shell.arrive(None, workload="rlvr"), Place)
    assert shell.view().live == 1
    assert [(e.cause, e.completed) for e in ended(shell.end(1))] == [("single_request", True)]
    shell.arrive(None, workload="rlvr")
    assert [(e.cause, e.completed) for e in ended(shell.end(2, "error"))] == [("single_request", False)]
    assert shell.view().live == 0


def test_an_announced_session_is_demand_until_its_first_request_admits_it() -> None:
    shell = Shell("sticky_least_loaded")
    shell.send(SessionOpened(at_s=shell.now_s, session="a", workload="agentic"))
    assert (shell.ledger.classes[0].demand, shell.view().live) == (1, 0)
    shell.turn("a")
    assert (shell.ledger.classes[0].demand, shell.view().live) == (1, 1)


def test_an_announcement_without_a_class_takes_the_first_requests_class() -> None:
    shell = Shell("sticky_least_loaded")
    shell.send(SessionOpened(at_s=shell.now_s, session="a"))
    shell.turn("a", workload="agentic")
    assert {name: c.live for name, c in shell.view().classes.items()} == {"unlabelled": 0, "agentic": 1}


def test_classes_are_bounded_and_the_rest_share_one() -> None:
    shell = Shell("sticky_least_loaded", params=CoreParams(ledger=LedgerParams(max_classes=3)))
    for i in range(10):
        shell.turn(f"s{i}", workload=f"class-{i}")
    assert {name: c.live for name, c in shell.view().classes.items()} == {"class-0": 1, "class-1": 1, "other": 8}


def test_sessions_of_a_removed_replica_are_pinned_anew_and_others_stay() -> None:
    shell = Shell("sticky_least_loaded", 3)
    where = {session: shell.turn(session) for session in ("a", "b", "c")}
    shell.send(ReplicaRemoved(at_s=shell.now_s, replica=where["a"]))
    decision = shell.arrive("a")
    assert isinstance(decision, Place)
    assert (decision.reason, decision.replica != where["a"]) == ("repinned", True)
    shell.end(shell.requests)
    assert shell.turn("a") == decision.replica  # the new pin is kept
    assert {session: shell.turn(session) for session in ("b", "c")} == {s: where[s] for s in ("b", "c")}


def test_further_requests_of_a_held_session_wait_with_it_and_enter_together() -> None:
    shell = Shell("static_cap", 1, params=CoreParams(static_cap=StaticCapParams(cap=1)))
    shell.turn("a")
    held(shell.arrive("b"))
    held(shell.arrive("b"))
    assert (shell.view().held, shell.view().waiting) == (1, 2)
    assert [p.request for p in placed(shell.finish("a"))] == [2, 3]


def test_a_finish_of_a_held_session_serves_its_requests_and_keeps_nothing() -> None:
    shell = Shell("static_cap", 1, params=CoreParams(static_cap=StaticCapParams(cap=1)))
    shell.turn("a")
    held(shell.arrive("b"))
    assert shell.finish("b") == []
    assert [p.request for p in placed(shell.finish("a"))] == [2]
    assert [(e.cause, e.completed) for e in ended(shell.end(2))] == [("single_request", True)]


def test_new_weights_leave_sessions_and_pins_but_not_their_caches() -> None:
    shell = Shell("sticky_least_loaded", 2)
    url = shell.turn("a", prompt=1_000)
    assert shell.ledger.sessions["a"].resident_tokens == 1_010
    shell.send(EpochStarted(at_s=shell.now_s, reason="weights"))
    assert shell.ledger.sessions["a"].resident_tokens == 0
    assert shell.turn("a") == url
