"""Accounting: what is counted is uncounted once, by the request that it was counted for."""

from __future__ import annotations

from tests.unit.policy.shell import Shell, held, placed

from tidegate.policy.baselines.params import StaticCapParams
from tidegate.policy.params import CoreParams
from tidegate.types import (
    Place,
    PoolPaused,
    PoolResumed,
    ReplicaAdded,
    ReplicaRemoved,
    RequestProgress,
)

CAP_1 = CoreParams(static_cap=StaticCapParams(cap=1))


def test_a_second_end_of_a_request_changes_nothing() -> None:
    shell = Shell("least_requests")
    shell.arrive("a")
    shell.end(1)
    assert shell.end(1) == []
    assert [r.requests for r in shell.view().replicas] == [0, 0]


def test_an_abort_while_held_frees_its_place_in_the_queue_at_once() -> None:
    shell = Shell("static_cap", 1, params=CAP_1)
    shell.turn("a")
    held(shell.arrive("b"))
    held(shell.arrive("c"))
    shell.end(2, "aborted")
    assert (shell.view().held, shell.view().waiting) == (1, 1)
    assert [p.session for p in placed(shell.finish("a"))] == ["c"]


def test_health_does_not_touch_the_load() -> None:
    shell = Shell("least_requests")
    shell.arrive("a", prompt_tokens=300)
    url = "http://r0"
    shell.health(url, False)
    shell.health(url, True)
    view = shell.view().replicas[0]
    assert (view.requests, view.sessions, view.kv_used_tokens) == (1, 1, 300)


def test_listing_a_replica_again_keeps_its_load() -> None:
    shell = Shell("least_requests", 1)
    shell.arrive("a", prompt_tokens=300)
    shell.send(ReplicaAdded(at_s=shell.now_s, replica="http://r0"))
    assert shell.view().replicas[0].requests == 1
    shell.send(ReplicaRemoved(at_s=shell.now_s, replica="http://r0"))
    shell.send(ReplicaAdded(at_s=shell.now_s, replica="http://r0"))
    view = shell.view().replicas[0]
    assert (view.requests, view.ready, view.kv_capacity_tokens) == (1, True, 1_000_000)


def test_a_removed_replica_is_forgotten_when_its_last_request_ends() -> None:
    shell = Shell("sticky_least_loaded", 2)
    shell.arrive("a", prompt_tokens=300)
    shell.send(ReplicaRemoved(at_s=shell.now_s, replica="http://r0"))
    assert [r.url for r in shell.view().replicas] == ["http://r0", "http://r1"]
    shell.end(1, "replica_lost")
    shell.turn("a")
    assert [r.url for r in shell.view().replicas] == ["http://r1"]


def test_a_footprint_is_the_last_usage_and_grows_with_running_requests() -> None:
    shell = Shell("sticky_least_loaded", 1)
    shell.turn("a", prompt=1_000, completion=50)
    assert shell.tokens("http://r0") == 1_050
    shell.arrive("a", prompt_tokens=1_300)
    assert shell.tokens("http://r0") == 1_300
    shell.send(RequestProgress(at_s=shell.now_s, request=2, completion_tokens=40))
    assert shell.tokens("http://r0") == 1_340
    shell.send(RequestProgress(at_s=shell.now_s, request=2, completion_tokens=30))  # late and older: ignored
    assert shell.tokens("http://r0") == 1_340
    shell.end(2, prompt_tokens=1_280, completion_tokens=60)
    assert shell.tokens("http://r0") == 1_340
    shell.finish("a")
    assert shell.tokens("http://r0") == 0


def test_parallel_requests_of_a_session_add_only_what_is_new() -> None:
    shell = Shell("sticky_least_loaded", 1)
    shell.turn("a", prompt=1_000, completion=0)
    shell.arrive("a", prompt_tokens=1_100)
    shell.arrive("a", prompt_tokens=1_200)
    assert shell.tokens("http://r0") == 1_300
    shell.end(3, prompt_tokens=1_200, completion_tokens=0)
    shell.end(2, "aborted")
    assert shell.tokens("http://r0") == 1_200


def test_a_failed_request_teaches_no_footprint() -> None:
    shell = Shell("sticky_least_loaded", 1)
    shell.turn("a", prompt=1_000, completion=0)
    shell.arrive("a", prompt_tokens=9_000)
    shell.end(2, "error")
    assert shell.tokens("http://r0") == 1_000


def test_prefill_credit_goes_with_the_first_token_the_end_or_two_samples() -> None:
    shell = Shell("sticky_least_loaded", 1)
    replica = shell.ledger.replicas["http://r0"]
    for session in ("a", "b", "c"):
        shell.arrive(session, prompt_tokens=1_000)
    assert replica.credit_new + replica.credit_old == 3_000
    shell.send(RequestProgress(at_s=shell.now_s, request=1, completion_tokens=1))
    shell.end(2)
    assert replica.credit_new + replica.credit_old == 1_000
    shell.sample("http://r0", waiting=3)  # they wait: nothing is known to be done
    assert replica.credit_new + replica.credit_old == 1_000
    shell.sample("http://r0", waiting=0)
    shell.sample("http://r0", waiting=0)
    assert replica.credit_new + replica.credit_old == 0
    shell.end(3)
    assert replica.credit_new + replica.credit_old == 0


def test_a_returned_request_leaves_the_pin_before_the_second_try() -> None:
    shell = Shell("sticky_least_loaded", 3)
    first = shell.arrive("a", prompt_tokens=400)
    assert isinstance(first, Place)
    second = shell.returned(1, first.replica)
    assert isinstance(second, Place)
    assert (second.reason, second.replica != first.replica) == ("retried", True)
    third = shell.returned(1, second.replica)
    assert isinstance(third, Place)
    assert third.replica not in (first.replica, second.replica)
    assert shell.view().in_flight == 1


def test_a_request_that_every_replica_returned_waits_and_is_tried_again() -> None:
    shell = Shell("sticky_least_loaded", 1)
    shell.arrive("a")
    assert held(shell.returned(1, "http://r0")).reason == "no_replica"
    assert [p.request for p in placed(shell.tick())] == [1]


def test_continuations_wait_for_a_paused_pool_and_then_all_run() -> None:
    shell = Shell("misa_t", 2)
    for session in ("a", "b"):
        shell.turn(session)
    shell.send(PoolPaused(at_s=shell.now_s))
    assert held(shell.arrive("a")).reason == "pool_paused"
    assert held(shell.arrive("b")).reason == "pool_paused"
    assert held(shell.arrive("new")).reason == "pool_paused"
    view = shell.view()
    assert (view.paused_sessions, view.held, view.in_flight) == (2, 1, 0)
    assert [p.session for p in placed(shell.send(PoolResumed(at_s=shell.now_s)))] == ["a", "b", "new"]


def test_a_continuation_without_any_usable_replica_waits_for_one() -> None:
    shell = Shell("misa_t", 1)
    shell.turn("a")
    shell.health("http://r0", False)
    assert held(shell.arrive("a")).reason == "no_replica"
    assert [p.session for p in placed(shell.health("http://r0", True))] == ["a"]
