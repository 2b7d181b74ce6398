"""working_set: who is resident, who is paused, who goes on first, who moves."""

from __future__ import annotations

from tests.unit.policy.shell import Shell, held, placed

from tidegate.policy.params import CoreParams, ReplicaParams, WorkingSetParams
from tidegate.policy.working_set import WorkingSetPolicy
from tidegate.types import Hold, Place, RequestProgress

FRESH = ReplicaParams(stale_after_s=1e9)


def pool(replicas: int = 1, capacity: int = 1000, **own: float) -> Shell:
    params = CoreParams(working_set=WorkingSetParams(**own), replica=FRESH)
    return Shell("working_set", replicas, capacity=capacity, params=params)


def policy(shell: Shell) -> WorkingSetPolicy:
    found = shell.scheduler.policy
    assert isinstance(found, WorkingSetPolicy)
    return found


def two_grown_sessions(shell: Shell) -> None:
    """`old` and `new`, admitted in this order, hold 550 and 350 of 1000 tokens."""
    shell.turn("old", prompt=100, completion=10)
    shell.turn("new", prompt=100, completion=10)
    shell.turn("old", prompt=500, completion=50)
    shell.turn("new", prompt=300, completion=50)


def test_a_newer_session_that_does_not_fit_is_paused_at_its_turn_boundary() -> None:
    shell = pool()
    two_grown_sessions(shell)
    assert held(shell.arrive("new", prompt_tokens=450)).reason == "not_resident"
    assert shell.view().paused_sessions == 1
    assert shell.view().held == 0


def test_the_oldest_goes_on_however_large_it_is() -> None:
    shell = pool()
    two_grown_sessions(shell)
    decision = shell.arrive("old", prompt_tokens=5000)
    assert isinstance(decision, Place)
    assert decision.reason == "continuation"


def test_a_paused_session_goes_on_when_an_older_one_ends() -> None:
    shell = pool()
    two_grown_sessions(shell)
    shell.arrive("new", prompt_tokens=450)
    paused = shell.requests
    assert [place.request for place in placed(shell.finish("old"))] == [paused]
    assert shell.view().paused_sessions == 0


def test_a_session_that_fits_up_to_theta_goes_on() -> None:
    shell = pool()
    two_grown_sessions(shell)
    assert isinstance(shell.arrive("new", prompt_tokens=400), Place)  # 550 + 400 = 0.95 of 1000


def test_running_requests_of_newer_sessions_count_against_an_older_one() -> None:
    shell = pool()
    for name in ("first", "second", "third"):
        shell.turn(name, prompt=100, completion=10)
    shell.arrive("third", prompt_tokens=600)
    running = shell.requests
    assert held(shell.arrive("second", prompt_tokens=300)).reason == "not_resident"
    paused = shell.requests
    after = shell.end(running, prompt_tokens=600, completion_tokens=10)
    assert [place.request for place in placed(after)] == [paused], "it is older than the one that ran"


def test_paused_sessions_go_on_in_order_of_admission_and_no_further_than_they_fit() -> None:
    shell = pool()
    for name in ("a", "b", "c", "d"):
        shell.turn(name, prompt=100, completion=10)
    shell.turn("a", prompt=600, completion=10)
    requests = {}
    for name in ("d", "c", "b"):  # asked for in the other order
        assert isinstance(shell.arrive(name, prompt_tokens=400), Hold)
        requests[shell.requests] = name
    assert [requests[place.request] for place in placed(shell.finish("a"))] == ["b", "c"]
    assert shell.view().paused_sessions == 1


def test_a_pause_ends_at_its_limit_though_nothing_fits() -> None:
    shell = pool(pause_limit_s=30.0)
    two_grown_sessions(shell)
    shell.arrive("new", prompt_tokens=450)
    paused = shell.requests
    assert not placed(shell.tick(29.0))
    assert [place.request for place in placed(shell.tick(2.0))] == [paused]


def test_a_paused_session_whose_client_leaves_is_forgotten() -> None:
    shell = pool()
    two_grown_sessions(shell)
    shell.arrive("new", prompt_tokens=450)
    shell.end(shell.requests, "aborted")
    assert shell.view().paused_sessions == 0
    assert not placed(shell.finish("old"))
    shell.finish("new")
    assert policy(shell).sets[0].claimed_tokens(shell.now_s) == 0


def test_a_finish_lets_the_paused_request_of_the_session_go() -> None:
    shell = pool()
    two_grown_sessions(shell)
    shell.arrive("new", prompt_tokens=450)
    paused = shell.requests
    assert [place.request for place in placed(shell.finish("new"))] == [paused]


def test_a_paused_session_moves_to_a_replica_with_room_once_its_wait_outweighs_its_prefill() -> None:
    shell = pool(replicas=2, capacity=10_000)
    first, second = shell.turn("old", prompt=100), shell.turn("other", prompt=100)
    assert first != second
    while shell.turn("new", prompt=100) != first:
        shell.finish("new")
    shell.finish("other")
    shell.turn("old", prompt=9000)
    assert isinstance(shell.arrive("new", prompt_tokens=900), Hold)
    moved = placed(shell.tick(1.0))  # 900 tokens take 0.1 s at the prior rate
    assert [place.replica for place in moved] == [second]
    assert moved[0].reason == "routed"
    assert policy(shell).sets[0].claimed_tokens(shell.now_s) + policy(shell).sets[1].claimed_tokens(shell.now_s) >= 9900


def test_nobody_is_paused_on_a_replica_of_unknown_capacity() -> None:
    shell = Shell("working_set", 1, capacity=None, params=CoreParams(replica=FRESH))
    shell.turn("a", prompt=100)
    shell.turn("b", prompt=100)
    shell.turn("a", prompt=10_000_000)
    assert isinstance(shell.arrive("b", prompt_tokens=10_000_000), Place)


def test_nobody_is_paused_on_a_replica_of_stale_state() -> None:
    shell = Shell("working_set", 1, capacity=1000, params=CoreParams(replica=ReplicaParams(stale_after_s=5.0)))
    shell.tick()
    two_grown_sessions(shell)
    shell.arrive("new", prompt_tokens=450)
    paused = shell.requests
    assert [place.request for place in placed(shell.tick(10.0, sampled=False))] == [paused]


def test_an_empty_replica_takes_a_session_larger_than_itself() -> None:
    shell = pool(capacity=100)
    assert isinstance(shell.arrive("huge", prompt_tokens=5000), Place)
    assert isinstance(shell.arrive("next", prompt_tokens=10), Hold)


def test_a_prefix_that_sessions_share_is_charged_once() -> None:
    shell = pool(capacity=100_000)
    for number in range(4):
        shell.arrive(f"s{number}", workload="agentic", prompt_tokens=1000)
        cached = 0 if number == 0 else 800
        shell.end(shell.requests, prompt_tokens=1000, completion_tokens=0, cached_tokens=cached)
    claimed = policy(shell).sets[0].claimed_tokens(shell.now_s)
    assert claimed == 1000 + 3 * 200
    shell.finish("s0")  # the others hold it still
    assert policy(shell).sets[0].claimed_tokens(shell.now_s) == 800 + 3 * 200


def test_unseen_growth_follows_the_replicas_own_count_of_generated_tokens() -> None:
    shell = pool(capacity=100_000)
    shell.sample(shell.urls[0], running=0, generation_tokens_total=0)
    shell.arrive("a", prompt_tokens=100)
    shell.arrive("b", prompt_tokens=100)
    for total in (0, 200, 400):  # two sequences, 100 tokens/s each
        shell.now_s += 1.0
        shell.sample(shell.urls[0], running=2, generation_tokens_total=total)
    assert abs(policy(shell).sets[0].claimed_tokens(shell.now_s) - (200 + 400)) <= 4
    shell.now_s += 1.0  # no sample: it goes on at the last rate
    assert abs(policy(shell).sets[0].claimed_tokens(shell.now_s) - (200 + 600)) <= 4


def test_what_a_stream_shows_is_not_counted_twice() -> None:
    shell = pool(capacity=100_000)
    shell.sample(shell.urls[0], running=0, generation_tokens_total=0)
    shell.arrive("a", prompt_tokens=100)
    for total in (0, 100, 200):
        shell.now_s += 1.0
        shell.sample(shell.urls[0], running=1, generation_tokens_total=total)
    shell.send(RequestProgress(at_s=shell.now_s, request=shell.requests, completion_tokens=190))
    assert abs(policy(shell).sets[0].claimed_tokens(shell.now_s) - 290) <= 2


def test_the_ledger_learns_of_unseen_growth_so_that_sizes_are_not_those_of_the_short_only() -> None:
    shell = pool(capacity=100_000)
    shell.sample(shell.urls[0], running=0, generation_tokens_total=0)
    shell.arrive("a", prompt_tokens=100)
    shell.now_s += 1.0
    shell.sample(shell.urls[0], running=1, generation_tokens_total=0)
    for total in (500, 1000):
        shell.now_s += 5.0
        shell.sample(shell.urls[0], running=1, generation_tokens_total=total)
    shell.tick(0.0, sampled=False)
    assert abs(shell.ledger.sessions["a"].tokens - 1100) <= 20


def test_a_request_that_a_replica_gave_back_starts_over_elsewhere() -> None:
    shell = pool(replicas=2, capacity=100_000)
    for url in shell.urls:
        shell.sample(url, running=0, generation_tokens_total=0)
    place = shell.arrive("a", prompt_tokens=100)
    assert isinstance(place, Place)
    for total in (0, 1000, 2000):
        shell.now_s += 5.0
        shell.sample(place.replica, running=1, generation_tokens_total=total)
    shell.tick(0.0, sampled=False)
    assert shell.ledger.sessions["a"].tokens > 2000
    shell.returned(shell.requests, place.replica)
    assert shell.ledger.sessions["a"].tokens == 100
    assert sum(each.claimed_tokens(shell.now_s) for each in policy(shell).sets) == 100
