"""Admission of new sessions: caps, occupancy, queues, refusals; continuations are exempt from all of it."""

from __future__ import annotations

import pytest
from tests.unit.policy.shell import Shell, held, placed, rejected

from tidegate.policy.baselines.params import StaticCapParams
from tidegate.policy.params import AdmissionParams, CoreParams, MisaParams
from tidegate.types import AnyDecision, Place, PoolPaused, SessionOpened

CAP_2 = StaticCapParams(cap=2)


def full(**admission: object) -> Shell:
    """One replica with two sessions of two allowed."""
    params = CoreParams(static_cap=CAP_2, admission=AdmissionParams(**admission))  # type: ignore[arg-type]
    shell = Shell("static_cap", 1, params=params)
    shell.turn("a")
    shell.turn("b")
    return shell


def test_a_full_replica_holds_a_new_session_and_passes_a_continuation() -> None:
    shell = full()
    assert held(shell.arrive("c")).reason == "replica_cap"
    assert isinstance(shell.arrive("a"), Place)


def test_held_sessions_leave_first_come_first_served() -> None:
    shell = full()
    for session in ("c", "d", "e"):
        held(shell.arrive(session))
    assert [p.session for p in placed(shell.finish("a"))] == ["c"]
    held(shell.arrive("f"))
    assert [p.session for p in placed(shell.finish("b"))] == ["d"]


def test_an_arrival_never_overtakes_its_queue() -> None:
    shell = full()
    held(shell.arrive("c"))
    assert held(shell.arrive("d")).reason == "queued"


def test_hold_timeout_refuses_new_sessions_only() -> None:
    shell = full(hold_timeout_s=10.0)
    held(shell.arrive("c"))
    shell.health("http://r0", False)
    held(shell.arrive("a"))  # a continuation that cannot run
    assert rejected(shell.tick(9.0)) == []
    refused = rejected(shell.tick(2.0))
    assert [(r.request, r.reason) for r in refused] == [(3, "hold_timeout")]
    assert refused[0].retry_after_s == pytest.approx(5.0)
    assert rejected(shell.tick(1_000.0)) == []
    assert shell.view().waiting == 1


def test_overload_reject_answers_at_once_but_a_pause_holds() -> None:
    shell = full(overload="reject")
    decisions = shell.arrive_all("c")
    assert [r.reason for r in rejected(decisions)] == ["overloaded"]
    assert "c" not in shell.ledger.sessions
    shell.send(PoolPaused(at_s=shell.now_s))
    assert held(shell.arrive("d")).reason == "pool_paused"


def test_the_queue_is_bounded() -> None:
    shell = full(max_waiting=1)
    held(shell.arrive("c"))
    assert [r.reason for r in rejected(shell.arrive_all("d"))] == ["queue_full"]
    assert shell.view().waiting == 1
    assert "d" not in shell.ledger.sessions


def test_admissions_between_two_samples_count_at_once() -> None:
    shell = Shell("misa_t", 1, capacity=16_384)
    for i in range(30):
        shell.arrive(f"s{i}", prompt_tokens=1_000)  # a burst, no sample in between
    view = shell.view()
    assert 1 <= view.live <= 5
    assert view.live + view.held == 30


@pytest.mark.parametrize("policy", ["session_admission", "misa", "misa_t"])
def test_a_continuation_passes_whatever_the_occupancy(policy: str) -> None:
    shell = Shell(policy, 1, capacity=16_384)
    shell.arrive("a", prompt_tokens=1_000)
    shell.end(1, prompt_tokens=60_000, completion_tokens=0)
    shell.tick()
    held(shell.arrive("b", prompt_tokens=1_000))
    assert isinstance(shell.arrive("a", prompt_tokens=61_000), Place)


@pytest.mark.parametrize("policy", ["session_admission", "misa", "misa_t"])
def test_a_session_larger_than_the_replica_still_runs_alone(policy: str) -> None:
    shell = Shell(policy, 1, capacity=16_384)
    assert isinstance(shell.arrive("huge", prompt_tokens=50_000), Place)


def test_a_lost_replicas_sessions_move_even_above_the_caps() -> None:
    shell = Shell("misa_t", 2, capacity=8_192)
    sessions = []
    for i in range(20):
        decision = shell.arrive(f"s{i}", prompt_tokens=1_000)
        if isinstance(decision, Place):
            sessions.append(decision.session)
            shell.end(shell.requests, prompt_tokens=1_000, completion_tokens=0)
    assert len(sessions) >= 2
    shell.health("http://r0", False)
    for session in sessions:
        decision = shell.arrive(session, prompt_tokens=1_000)
        assert isinstance(decision, Place)
        assert decision.replica == "http://r1"


def test_demand_counts_held_sessions() -> None:
    shell = full()
    held(shell.arrive("c"))
    shell.send(SessionOpened(at_s=shell.now_s, session="d"))
    assert shell.ledger.classes[0].demand == 4


def test_a_class_of_large_sessions_has_its_turn_among_small_ones() -> None:
    """Its share of the replica is less than one of its sessions, and the small ones never stop coming."""
    shell = Shell("misa_t", 1, capacity=20_000)
    tokens = {"large": 12_000, "small": 1_000}
    running: list[tuple[float, int, str]] = []
    served = {"large": 0, "small": 0}
    arrived = {"large": 0, "small": 0}

    def take(decisions: list[AnyDecision]) -> None:
        running.extend((shell.now_s + 3.0, d.request, d.session) for d in placed(decisions))

    for _ in range(400):
        for name in ("large", "small"):
            while shell.ledger.klass(name).held < (2 if name == "large" else 30):
                arrived[name] += 1
                take(shell.arrive_all(f"{name}-{arrived[name]}", prompt_tokens=tokens[name], workload=name))
        take(shell.tick())
        for due_s, request, session in [item for item in running if item[0] <= shell.now_s]:
            running.remove((due_s, request, session))
            name = session.partition("-")[0]
            served[name] += 1
            take(shell.end(request, prompt_tokens=tokens[name], completion_tokens=0))
            take(shell.finish(session))
    assert served["large"] >= 10
    assert served["small"] >= 200


def test_the_papers_rounding_gives_every_class_a_slot() -> None:
    for floor, least in (("paper", 1), ("feasible", 0)):
        shell = Shell("misa", 1, capacity=4_000, params=CoreParams(misa=MisaParams(floor=floor)))  # type: ignore[arg-type]
        for name in ("a", "b", "c", "d", "e", "f"):
            shell.arrive(name, prompt_tokens=3_000, workload=name)
        shell.tick()
        caps = [shell.view().classes[name].cap for name in ("a", "b", "c", "d", "e", "f")]
        assert min(caps) >= least
        kbar = [klass.profile.footprint_tokens for klass in shell.ledger.classes]
        used = sum(cap * k for cap, k in zip(caps, kbar, strict=True))
        assert (used <= 4_000) == (floor == "feasible")


def test_an_idle_pool_admits_a_class_never_seen_at_once() -> None:
    shell = Shell("misa_t", 2)
    for i in range(10):
        assert isinstance(shell.arrive(f"s{i}", prompt_tokens=100, workload=f"class-{i}"), Place)


def test_a_class_without_demand_leaves_its_share_to_the_others() -> None:
    shell = Shell("misa_t", 1, capacity=100_000)
    for i in range(600):
        shell.turn(f"w{i}", prompt=1_000, workload="a" if i % 2 else "b")
        shell.finish(f"w{i}")
    shell.tick()
    live = sum(isinstance(shell.arrive(f"s{i}", prompt_tokens=1_000, workload="a"), Place) for i in range(100))
    shell.tick()
    assert live > 60  # of the 95 that the memory holds


def test_admission_says_what_it_was_made_from() -> None:
    shell = Shell("misa_t", 1, capacity=16_384)
    decision = shell.arrive("a", prompt_tokens=1_000)
    assert isinstance(decision, Place)
    assert {"sessions", "cap", "needed_tokens", "capacity_tokens", "cost_s"} <= set(decision.inputs)


@pytest.mark.parametrize("policy", ["session_admission", "misa", "misa_t", "working_set", "program"])
def test_a_prompt_that_no_replica_could_hold_waits_for_nothing_and_keeps_nobody_waiting(policy: str) -> None:
    shell = Shell(policy, 2, capacity=10_000)
    shell.tick()
    for number in range(2):
        shell.arrive(f"long {number}", prompt_tokens=2000)
    shell.tick()
    assert isinstance(shell.arrive("image", prompt_tokens=500_000), Place)  # the engine judges it, and soon
    assert isinstance(shell.arrive("short", prompt_tokens=10), Place)
    shell.end(3, "refused")
    shell.end(4, prompt_tokens=10, completion_tokens=10)
    shell.ledger.check()


def test_while_some_capacity_is_unknown_any_prompt_may_be_right() -> None:
    shell = Shell("misa_t", 1, capacity=None)
    shell.tick()
    shell.arrive("large", prompt_tokens=500_000)
    assert shell.ledger.requests[1].prompt_tokens == 500_000
