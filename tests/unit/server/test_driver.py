"""The driver: one end for each request, whatever happens to it, and decisions that reach their exchange."""

from __future__ import annotations

import json

import pytest
from tests.unit.server.exchanges import A, B, Shell

from tidegate.errors import ReplicaError, TidegateError
from tidegate.policy.base import Choice
from tidegate.policy.baselines.params import StaticCapParams
from tidegate.policy.params import AdmissionParams, CoreParams
from tidegate.server.prefix import chunk_hashes
from tidegate.types import PoolPaused, PoolResumed, ReplicaHealth, SessionFinished

EMPTY_ABORT = json.dumps({"choices": [{"text": "", "finish_reason": "abort"}]}).encode()
CLOSED = ReplicaError("closed", reason="replica_closed")


def one_seat(**admission: object) -> Shell:
    params = CoreParams(static_cap=StaticCapParams(cap=1), admission=AdmissionParams(**admission))  # type: ignore[arg-type]
    shell = Shell("static_cap", params)
    shell.add(A)
    return shell


def test_a_session_stays_where_it_was_placed(shell: Shell) -> None:
    homes = set()
    for _ in range(3):
        exchange = shell.open("s")
        homes.update(exchange.placed)
        shell.answer(exchange)
    assert len(homes) == 1
    assert shell.at_rest


def test_what_the_replica_counted_reaches_the_ledger_and_the_counters(shell: Shell) -> None:
    exchange = shell.open("s", x_workload_class="agentic")
    shell.answer(exchange)
    view = shell.scheduler.view(shell.clock.now_s())
    assert sum(replica.kv_used_tokens for replica in view.replicas) == 12
    counters = shell.driver.counters.of_class("agentic")
    assert (counters.prompt_tokens, counters.completion_tokens) == (9, 3)
    assert counters.requests["/v1/completions", "ok"] == 1
    assert shell.replicas.told == [("ok", exchange.placed[0])]


def test_what_a_replica_cannot_have_counted_moves_no_books(shell: Shell) -> None:
    exchange = shell.open("s", x_workload_class="agentic")
    shell.answer(exchange, b'{"usage": {"prompt_tokens": 90000000000, "completion_tokens": -3}}')
    (tokens,) = {replica.kv_used_tokens for replica in shell.scheduler.view(10.0).replicas if replica.sessions}
    assert 0 < tokens < 1000
    counters = shell.driver.counters.of_class("agentic")
    assert 0 < counters.prompt_tokens < 1000
    assert shell.driver.counters.implausible_usages[exchange.placed[0]] == 1
    assert shell.driver.counters.estimated_usages["/v1/completions"] == 1


def test_a_held_request_is_placed_when_a_seat_is_free() -> None:
    shell = one_seat()
    shell.answer(shell.open("first"))
    held = shell.open("second")
    assert not held.placed
    assert [entry.hold_reason for entry in shell.driver.held()] == ["replica_cap"]
    shell.clock.advance(7.0)
    shell.driver.handle(SessionFinished(at_s=shell.clock.now_s(), session="first"))
    assert held.placed == [A]
    assert shell.driver.counters.of_class(None).held_s.total == pytest.approx(7.0)
    assert not shell.driver.held()


def test_a_client_that_leaves_while_held_is_forgotten(shell: Shell) -> None:
    shell = one_seat()
    shell.answer(shell.open("first"))
    held = shell.open("second")
    shell.driver.ended(held, "aborted", None)
    shell.driver.handle(SessionFinished(at_s=shell.clock.now_s(), session="first"))
    assert not held.placed
    assert shell.at_rest
    assert shell.scheduler.view(shell.clock.now_s()).held == 0


@pytest.mark.parametrize(
    ("admission", "status", "reason"),
    [({"overload": "reject"}, 429, "overloaded"), ({"max_waiting": 0}, 503, "queue_full")],
)
def test_a_refusal_has_its_reason_status_and_retry_after(
    admission: dict[str, object], status: int, reason: str
) -> None:
    shell = one_seat(**admission)
    shell.answer(shell.open("first"))
    refused = shell.open("second").rejected
    assert refused is not None
    assert (refused.status, refused.reason, refused.retry_after_s) == (status, reason, 5.0)
    assert json.loads(refused.body())["error"]["code"] == reason
    assert shell.driver.counters.refused[reason] == 1
    assert shell.at_rest


def test_a_hold_timeout_is_answered_at_the_tick_after_it() -> None:
    shell = one_seat(hold_timeout_s=5.0)
    shell.answer(shell.open("first"))
    held = shell.open("second")
    shell.driver.tick()
    assert held.rejected is None
    shell.clock.advance(6.0)
    shell.driver.tick()
    assert held.rejected is not None
    assert (held.rejected.status, held.rejected.reason) == (503, "hold_timeout")
    assert shell.at_rest


@pytest.mark.parametrize(
    "path", ["/v1/chat%2Fcompletions", "/v1/%63hat/completions", "/v1/chat/completions/", "//v1/chat/./completions"]
)
def test_a_path_in_another_spelling_is_admitted_too_and_counted_under_its_own_name(shell: Shell, path: str) -> None:
    exchange = shell.exchange("s", path)
    assert shell.driver.route(exchange.head) is None
    shell.driver.opened(exchange, None)
    assert shell.scheduler.view(shell.clock.now_s()).live == 1
    assert exchange.head.target == path.encode()
    shell.answer(exchange)
    assert shell.driver.counters.of_class(None).requests["/v1/chat/completions", "ok"] == 1


# --- bad requests ----------------------------------------------------------------------------------------------------
def test_bad_requests_are_refused_before_the_ledger_knows_them(shell: Shell) -> None:
    for exchange, reason in (
        (shell.open("x" * 257), "invalid_session_id"),
        (shell.open(None, b"{nonsense"), "invalid_json"),
    ):
        assert exchange.rejected is not None
        assert (exchange.rejected.status, exchange.rejected.reason) == (400, reason)
    assert shell.scheduler.view(10.0).live == 0
    assert shell.at_rest


# --- other paths -----------------------------------------------------------------------------------------------------
def test_other_paths_are_spread_over_replicas_and_stay_out_of_the_ledger(shell: Shell) -> None:
    exchanges = [shell.open(path="/v1/models", method="GET") for _ in range(4)]
    assert sorted(exchange.placed[0] for exchange in exchanges) == [A, A, B, B]
    view = shell.scheduler.view(10.0)
    assert (view.live, view.in_flight) == (0, 0)
    assert shell.driver.under_way == 4
    for exchange in exchanges:
        shell.driver.ended(exchange, "ok", None)
    assert shell.at_rest


def test_one_that_names_a_session_goes_where_that_session_is(shell: Shell) -> None:
    homes = {}
    for session in ("s", "t"):
        exchange = shell.open(session)
        homes[session] = exchange.placed[0]
        shell.answer(exchange)
    assert len(set(homes.values())) == 2
    for session, home in homes.items():
        assert [shell.open(session, path="/v1/responses/x", method="GET").placed[0] for _ in range(3)] == [home] * 3


def test_they_pass_while_the_pool_is_paused(shell: Shell) -> None:
    shell.driver.handle(PoolPaused(at_s=10.0))
    assert shell.open(path="/v1/models", method="GET").placed
    held = shell.open("s")
    assert not held.placed
    shell.driver.handle(PoolResumed(at_s=10.0))
    assert held.placed


def test_they_try_each_replica_once(shell: Shell) -> None:
    exchange = shell.open(path="/version", method="GET")
    shell.driver.returned(exchange, exchange.placed[0], CLOSED)
    shell.driver.returned(exchange, exchange.placed[1], CLOSED)
    assert sorted(exchange.placed) == [A, B]
    assert exchange.rejected is CLOSED
    assert shell.at_rest


def test_without_a_replica_they_are_refused_at_once() -> None:
    exchange = Shell().open(path="/v1/models", method="GET")
    assert exchange.rejected is not None
    assert (exchange.rejected.status, exchange.rejected.reason) == (503, "no_replica")


# --- prefixes --------------------------------------------------------------------------------------------------------
def test_a_policy_that_routes_by_prefix_gets_hashes_of_the_body_and_others_an_unread_body() -> None:
    shell = Shell("cache_aware")
    shell.add(A, B)
    shared = b'{"prompt": "' + b"x" * 8000
    homes = [shell.open(f"s{number}", shared + str(number).encode() + b'"}').placed[0] for number in range(4)]
    assert len(set(homes)) == 1
    assert chunk_hashes(shared, 1280)[:6] == chunk_hashes(shared[:8000] + b"other" * 999, 1280)[:6]
    assert chunk_hashes(shared, 1280)[0] != chunk_hashes(b"y" + shared, 1280)[0]
    assert chunk_hashes(b"short", 1280) == ()
    assert not Shell().driver.wants_body(Shell().exchange("s").head)


# --- shutdown --------------------------------------------------------------------------------------------------------
def test_a_shutdown_refuses_what_waits_and_what_comes_and_leaves_the_rest() -> None:
    shell = one_seat()
    running, held = shell.open("first"), shell.open("second")
    assert shell.driver.refuse_all() == 1
    late = shell.open("first")
    for refused in (held, late):
        assert refused.rejected is not None
        assert (refused.rejected.status, refused.rejected.reason) == (503, "shutting_down")
    assert running.rejected is None
    assert shell.driver.under_way == 1
    shell.answer(running)
    assert shell.at_rest


def test_a_shutdown_places_none_of_those_that_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first in the queue is too large, those behind it are not: its end must not let them in."""
    shell = Shell()
    shell.add(A)
    policy = shell.scheduler.policy
    enter = policy.enter
    fits = lambda request: Choice(None, "occupancy") if request.session.id == "large" else enter(request)  # noqa: E731
    monkeypatch.setattr(policy, "enter", fits)
    held = [shell.open(session) for session in ("large", "b", "c")]
    assert shell.driver.refuse_all() == 3
    assert [exchange.placed for exchange in held] == [[], [], []]
    assert all(exchange.rejected is not None for exchange in held)
    assert shell.at_rest


def test_during_a_shutdown_what_would_have_to_wait_is_refused() -> None:
    shell = Shell()
    shell.add(A)
    exchange = shell.open("s")
    shell.driver.refuse_all()
    shell.driver.handle(ReplicaHealth(at_s=shell.clock.now_s(), replica=A, usable=False))
    shell.driver.returned(exchange, A, CLOSED)
    assert exchange.rejected is not None
    assert exchange.rejected.reason == "shutting_down"
    assert shell.at_rest


def test_more_classes_than_are_told_apart_count_as_other(shell: Shell) -> None:
    for number in range(100):
        shell.answer(shell.open(f"s{number}", x_workload_class=f"class {number}"))
    classes = shell.driver.counters.classes
    assert len(classes) == 65
    assert sum(sum(c.requests.values()) for c in classes.values()) == 100
    assert sum(classes["other"].requests.values()) == 36


def test_errors_have_the_openai_shape() -> None:
    body = json.loads(TidegateError("m", param="p").body())
    assert body == {"error": {"message": "m", "type": "server_error", "param": "p", "code": "internal_error"}}


def test_a_session_that_engines_would_not_find_is_named_to_them(shell: Shell) -> None:
    shell.driver.names_sessions = True
    assert shell.open("s").named == []
    assert shell.open(None, x_smg_routing_key="t").named == [b"t"]
    assert shell.open(None, b'{"prompt": "x", "program_id": "u"}').named == [b"u"]
    assert shell.open(None).named == []
    shell.driver.names_sessions = False
    assert shell.open(None, x_smg_routing_key="t").named == []
