"""The driver where something fails: a replica before its first byte or after it, or the gate's own code."""

from __future__ import annotations

import json

import pytest
from tests.unit.server.exchanges import JSON, A, B, Shell

from tidegate.errors import ReplicaError
from tidegate.types import ReplicaHealth

EMPTY_ABORT = json.dumps({"choices": [{"text": "", "finish_reason": "abort"}]}).encode()
CLOSED = ReplicaError("closed", reason="replica_closed")
UNREACHABLE = ReplicaError("refused", reason="connect_failed")


def test_a_request_leaves_a_replica_that_failed_before_its_first_byte(shell: Shell) -> None:
    exchange = shell.open("s")
    first = exchange.placed[0]
    shell.driver.returned(exchange, first, CLOSED)
    assert len(exchange.placed) == 2
    assert exchange.placed[1] != first
    assert shell.replicas.told == [("connect_failed", first)]
    shell.answer(exchange)
    assert shell.at_rest
    again = shell.open("s")
    assert again.placed == [exchange.placed[1]]  # the session moved with it


def test_what_a_replica_lost_is_recalled_and_what_it_was_sent_since_is_not(shell: Shell) -> None:
    old = shell.open("s")
    (lost,) = old.placed
    elsewhere = shell.open("t")
    assert elsewhere.placed != old.placed
    shell.clock.advance(10.0)
    new = shell.open("s")
    shell.replicas.lost = {lost: shell.clock.now_s() - 1.0}
    shell.driver.tick()
    assert (old.recalled, elsewhere.recalled, new.recalled) == (["replica_lost_request"], [], [])


def test_a_continuation_waits_for_its_only_replica_to_come_back() -> None:
    """Longer than any number of attempts: nothing was sent, so nothing was tried."""
    shell = Shell()
    shell.add(A)
    shell.answer(shell.open("s"))
    exchange = shell.open("s")
    for _ in range(10):
        shell.driver.returned(exchange, A, UNREACHABLE)
        assert exchange.rejected is None
        shell.clock.advance(1.0)
        shell.driver.tick()  # the monitor has not left it yet: it is asked again
    shell.driver.returned(exchange, A, UNREACHABLE)
    shell.driver.handle(ReplicaHealth(at_s=shell.clock.now_s(), replica=A, usable=False, reason="connect_failed"))
    shell.clock.advance(300.0)
    shell.driver.tick()
    assert [entry.hold_reason for entry in shell.driver.held()] == ["no_replica"]
    tried = len(exchange.placed)
    shell.driver.handle(ReplicaHealth(at_s=shell.clock.now_s(), replica=A, usable=True))
    assert len(exchange.placed) == tried + 1
    shell.answer(exchange)
    assert shell.at_rest


def test_a_request_that_its_replicas_die_of_is_given_up_however_often_they_could_not_be_reached() -> None:
    shell = Shell()
    shell.add(A)
    exchange = shell.open("s")
    for error in (CLOSED, UNREACHABLE, UNREACHABLE, CLOSED, UNREACHABLE, CLOSED):
        assert exchange.rejected is None
        shell.driver.returned(exchange, A, error)
        shell.clock.advance(1.0)
        shell.driver.tick()
    assert exchange.rejected is CLOSED
    assert shell.at_rest


def test_without_retries_not_even_an_unreachable_replica_is_waited_for() -> None:
    shell = Shell(max_attempts=1)
    shell.add(A, B)
    exchange = shell.open("s")
    shell.driver.returned(exchange, exchange.placed[0], UNREACHABLE)
    assert exchange.rejected is UNREACHABLE
    assert shell.at_rest


def test_attempts_are_bounded_and_the_last_error_is_the_answer() -> None:
    shell = Shell()
    shell.add(A, B, "http://c", "http://d")
    exchange = shell.open("s")
    for _ in range(3):
        shell.driver.returned(exchange, exchange.placed[-1], CLOSED)
    assert len(set(exchange.placed)) == 3
    assert exchange.rejected is CLOSED
    assert shell.at_rest


def test_an_abort_without_text_tells_the_monitor_and_is_tried_elsewhere(shell: Shell) -> None:
    exchange = shell.open("s")
    assert exchange.meter is not None
    exchange.meter.response_head(200, JSON)
    exchange.meter.response_body(EMPTY_ABORT)
    assert exchange.meter.response_end() == "retry"
    first = exchange.placed[0]
    shell.driver.returned(exchange, first, ReplicaError("answered 200", reason="replica_refused"))
    assert shell.replicas.told == [("empty_abort", first)]
    assert exchange.placed[1] != first
    assert shell.driver.counters.empty_aborts[first] == 1
    shell.answer(exchange)


def test_what_a_first_replica_said_is_not_held_against_the_second(shell: Shell) -> None:
    exchange = shell.open("s")
    first = exchange.placed[0]
    second = B if first == A else A
    meter = exchange.meter
    assert meter is not None
    meter.response_head(200, [*JSON, (b"endpoint-load-metrics", b"TEXT x=1")])
    meter.response_body(EMPTY_ABORT)
    assert meter.response_end() == "retry"
    shell.driver.returned(exchange, first, ReplicaError("refused", reason="replica_refused"))
    shell.driver.returned(exchange, second, CLOSED)
    assert shell.replicas.told == [("empty_abort", first), ("connect_failed", second)]


def test_a_client_that_leaves_after_a_retry_teaches_nothing_of_the_second_replica(shell: Shell) -> None:
    exchange = shell.open("s")
    first = exchange.placed[0]
    meter = exchange.meter
    assert meter is not None
    meter.response_head(200, [*JSON, (b"endpoint-load-metrics", b"TEXT x=1")])
    meter.response_body(EMPTY_ABORT)
    assert meter.response_end() == "retry"
    shell.driver.returned(exchange, first, ReplicaError("refused", reason="replica_refused"))
    shell.clock.advance(5.0)
    shell.driver.ended(exchange, "aborted", None)
    assert shell.replicas.told == [("empty_abort", first)]
    counters = shell.driver.counters.of_class(None)
    assert (sum(counters.first_byte_s.counts), counters.prompt_tokens, counters.completion_tokens) == (0, 0, 0)
    assert sum(replica.kv_used_tokens for replica in shell.scheduler.view(shell.clock.now_s()).replicas) == 0


def test_a_pool_that_drains_altogether_is_said_to(shell: Shell) -> None:
    exchange = shell.open("s")
    assert exchange.meter is not None
    for _ in range(3):
        if exchange.rejected is None:
            exchange.meter.response_head(200, JSON)
            exchange.meter.response_body(EMPTY_ABORT)
            exchange.meter.response_end()
            replica = exchange.placed[-1]
            shell.driver.returned(exchange, replica, CLOSED)
            shell.driver.handle(ReplicaHealth(at_s=10.0, replica=replica, usable=False, reason="draining"))
            shell.driver.handle(ReplicaHealth(at_s=10.0, replica=replica, usable=True))
    assert exchange.rejected is not None
    assert (exchange.rejected.status, exchange.rejected.reason) == (503, "replica_draining")
    assert exchange.rejected.retry_after_s
    assert shell.at_rest


def test_an_abort_asked_for_through_the_gate_is_delivered(shell: Shell) -> None:
    exchange = shell.open("s")
    shell.clock.advance(1.0)
    shell.driver.aborts_called()
    assert exchange.meter is not None
    assert exchange.meter.response_head(200, JSON) == "pass"
    shell.clock.advance(1.0)
    later = shell.open("t")
    assert later.meter is not None
    assert later.meter.response_head(200, JSON) == "wait"


def test_a_generation_that_its_replica_aborted_is_no_result(shell: Shell) -> None:
    exchange = shell.open("s")
    shell.answer(exchange, json.dumps({"choices": [{"text": "some", "finish_reason": "abort"}]}).encode())
    counters = shell.driver.counters
    assert counters.of_class(None).requests["/v1/completions", "error"] == 1
    assert counters.aborted_replies[exchange.placed[0]] == 1


def test_a_replicas_failure_after_the_first_byte_is_counted_against_it(shell: Shell) -> None:
    exchange = shell.open("s")
    assert exchange.meter is not None
    exchange.meter.response_head(200, [(b"content-type", b"text/event-stream")])
    exchange.meter.response_body(b'data: {"choices": [{"text": "a"}]}\n\n')
    shell.driver.ended(exchange, "replica_lost", CLOSED)
    assert shell.driver.counters.replica_errors[exchange.placed[0], "replica_closed"] == 1
    assert shell.driver.counters.of_class(None).requests["/v1/completions", "replica_lost"] == 1
    assert shell.at_rest


# --- faults of our own -----------------------------------------------------------------------------------------------
def test_a_fault_while_placing_ends_the_request_and_leaks_nothing(shell: Shell) -> None:
    exchange = shell.exchange("s")
    exchange.fault = RuntimeError("boom")
    shell.driver.opened(exchange, None)
    assert exchange.rejected is not None
    assert (exchange.rejected.status, exchange.rejected.reason) == (500, "internal_error")
    assert shell.driver.counters.faults == 1
    assert shell.at_rest


def test_a_fault_while_accounting_still_ends_the_request(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = shell.open("s")
    monkeypatch.setattr(shell.driver, "_account", lambda *arguments: 1 / 0)
    shell.driver.ended(exchange, "ok", None)
    assert shell.driver.counters.faults == 1
    assert shell.at_rest


def test_a_fault_of_the_scheduler_is_contained(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = shell.scheduler.handle
    monkeypatch.setattr(shell.scheduler, "handle", lambda event: 1 / 0)
    exchange = shell.open("s")
    shell.driver.ended(exchange, "aborted", None)
    monkeypatch.setattr(shell.scheduler, "handle", handle)
    assert shell.driver.counters.faults >= 1
    shell.answer(shell.open("s"))
    assert shell.at_rest


def test_a_fault_at_what_a_monitor_saw_does_not_reach_the_monitor(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end the monitor's task, and the replica would be left for good."""
    monkeypatch.setattr(shell.scheduler, "handle", lambda event: 1 / 0)
    shell.driver.observed(ReplicaHealth(at_s=shell.clock.now_s(), replica=A, usable=True))
    assert shell.driver.counters.faults == 1


def test_a_second_end_is_ignored(shell: Shell) -> None:
    exchange = shell.open("s")
    shell.answer(exchange)
    shell.driver.ended(exchange, "aborted", None)
    shell.driver.returned(exchange, exchange.placed[0], CLOSED)
    assert shell.at_rest
    assert sum(shell.driver.counters.of_class(None).requests.values()) == 1
