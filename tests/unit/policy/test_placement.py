"""Placement: spreading, pins, prefixes, costs, lots that fall alike everywhere."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policy.shell import Shell, held

from tidegate.policy.baselines.consistent_hash import ring_point
from tidegate.policy.baselines.params import CacheAwareParams
from tidegate.policy.params import CoreParams, PlacementParams
from tidegate.policy.placement import LoadIndex, Rotation, members, next_member
from tidegate.policy.rng import SplitMix64
from tidegate.types import EpochStarted, Place, ReplicaAdded, ReplicaReset

RING_POINT_OF_SESSION_1 = 0xAE49BD2CD463E7AC


def where(shell: Shell, count: int, **fields: object) -> Counter[str]:
    found: Counter[str] = Counter()
    for _ in range(count):
        decision = shell.arrive(None, **fields)
        assert isinstance(decision, Place)
        found[decision.replica] += 1
    return found


def test_equal_replicas_take_turns() -> None:
    for policy in ("round_robin", "least_requests", "sticky_least_loaded", "misa_t", "session_admission"):
        shell = Shell(policy, 4)
        assert set(where(shell, 8).values()) == {2}, policy


def test_sessionless_requests_spread_by_requests_in_flight() -> None:
    shell = Shell("sticky_least_loaded", 3)
    assert sorted(where(shell, 9).values()) == [3, 3, 3]


def test_sticky_least_loaded_counts_live_sessions_not_requests() -> None:
    shell = Shell("sticky_least_loaded", 2)
    shell.turn("a")
    shell.turn("b")
    shell.finish("a")
    assert shell.turn("c") == "http://r0"


def test_least_requests_follows_requests_in_flight() -> None:
    shell = Shell("least_requests", 2)
    shell.arrive("a")  # r0
    shell.arrive("b")  # r1
    shell.end(1)
    assert isinstance(decision := shell.arrive("b"), Place)
    assert decision.replica == "http://r0"
    assert decision.reason == "routed"


def test_consistent_hash_moves_only_the_sessions_of_a_lost_replica() -> None:
    shell = Shell("consistent_hash", 4)
    before = {f"s{i}": shell.turn(f"s{i}") for i in range(200)}
    shares = Counter(before.values())
    assert min(shares.values()) > 20
    shell.health("http://r2", False)
    after = {session: shell.turn(session) for session in before}
    assert {s for s in before if before[s] != after[s]} == {s for s in before if before[s] == "http://r2"}
    shell.health("http://r2", True)
    assert {session: shell.turn(session) for session in before} == before


def test_the_ring_is_the_same_on_every_machine() -> None:
    assert ring_point("session-1") == RING_POINT_OF_SESSION_1
    assert Shell("consistent_hash", 3).turn("x") == Shell("consistent_hash", 3).turn("x")


def test_random_draws_are_those_of_the_seed() -> None:
    reference = SplitMix64(1234567)
    assert [reference.next() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for policy in ("random", "power_of_two"):
        assert where(Shell(policy, 3), 60) == where(Shell(policy, 3), 60)
        assert len(where(Shell(policy, 3), 60)) == 3


def test_power_of_two_avoids_the_busy_replica() -> None:
    shell = Shell("power_of_two", 2)
    assert where(shell, 20) == {"http://r0": 10, "http://r1": 10}


def test_cache_aware_follows_a_prefix_and_else_the_smallest_tree() -> None:
    shell = Shell("cache_aware", 3)
    first = shell.arrive("a", prefix=(1, 2, 3, 4))
    other = shell.arrive("b", prefix=(9,))
    again = shell.arrive("c", prefix=(1, 2, 3, 77))
    weak = shell.arrive("d", prefix=(1, 55, 66, 88))  # a quarter is no match
    assert [d.replica for d in (first, other, again, weak) if isinstance(d, Place)] == [
        "http://r0",
        "http://r1",
        "http://r0",
        "http://r2",
    ]


def test_cache_aware_leaves_the_prefix_when_the_load_is_uneven() -> None:
    shell = Shell("cache_aware", 2)
    for _ in range(65):
        shell.arrive(None, prefix=(1, 2))
    assert isinstance(decision := shell.arrive(None, prefix=(1, 2)), Place)
    assert shell.view().replicas[0].requests == 65
    assert decision.replica == "http://r1"


def test_cache_aware_forgets_with_the_cache_with_age_and_beyond_its_bound() -> None:
    params = CoreParams(cache_aware=CacheAwareParams(max_chunks=3, max_age_s=50.0))
    shell = Shell("cache_aware", 2, params=params)
    tree = shell.scheduler.policy._trees[0]  # type: ignore[attr-defined]
    shell.arrive("a", prefix=(1, 2, 3, 4))
    assert (len(tree), tree.match((1, 2, 3, 4))) == (3, 3)
    shell.send(ReplicaReset(at_s=shell.now_s, replica="http://r0", reason="restart"))
    assert len(tree) == 0
    tree.insert((1, 2), shell.now_s)
    shell.tick(51.0)
    assert len(tree) == 0
    tree.insert((1, 2), shell.now_s)
    shell.send(EpochStarted(at_s=shell.now_s, reason="weights"))
    assert len(tree) == 0


def test_a_group_goes_where_its_prompt_is_cached_if_the_prompt_is_long() -> None:
    shell = Shell("misa_t", 4)
    first = shell.turn("a", prompt=30_000, group="g")
    assert shell.turn("b", prompt=30_000, group="g") == first
    assert shell.turn("c", prompt=30_000, group="other") != first
    short = Shell("misa_t", 4)
    first = short.turn("a", prompt=100, group="g")
    assert short.turn("b", prompt=100, group="g") != first  # nothing to gain: spread


def test_a_prefill_backlog_turns_new_sessions_away() -> None:
    shell = Shell("misa_t", 2)
    shell.arrive("a", prompt_tokens=80_000)  # ten seconds of prefill
    urls = set()
    for i in range(5):
        decision = shell.arrive(f"s{i}", prompt_tokens=100)
        assert isinstance(decision, Place)
        urls.add(decision.replica)
    assert urls == {"http://r1"}


def test_a_large_pool_is_looked_at_in_part_and_still_evenly_filled() -> None:
    shell = Shell("misa_t", 40, params=CoreParams(placement=PlacementParams(candidates=4)))
    for i in range(80):
        shell.turn(f"s{i}")
    loads = [replica.sessions for replica in shell.view().replicas]
    assert sum(loads) == 80
    assert max(loads) <= 4


def test_no_usable_replica_holds_new_sessions() -> None:
    for policy in ("round_robin", "cache_aware", "consistent_hash", "static_cap", "misa_t"):
        shell = Shell(policy, 1)
        shell.health("http://r0", False)
        assert held(shell.arrive("a")).reason == "no_replica", policy
        assert [d.session for d in shell.health("http://r0", True) if isinstance(d, Place)] == ["a"], policy


def test_a_replica_that_joins_takes_sessions() -> None:
    shell = Shell("misa_t", 1)
    shell.turn("a")
    shell.send(ReplicaAdded(at_s=shell.now_s, replica="http://new", kv_capacity_tokens=1_000_000))
    assert shell.turn("b") == "http://new"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 3)), max_size=60), st.integers(0, 1023))
def test_the_load_index_agrees_with_a_list(moves: list[tuple[int, int]], mask: int) -> None:
    index, plain = LoadIndex(), [0] * 10
    for slot in range(10):
        index.add(slot)
    for slot, by in moves:
        if plain[slot] + by >= 0:
            plain[slot] += by
            index.shift(slot, by)
    assert index.loads == plain
    inside = [slot for slot in range(10) if mask >> slot & 1]
    least = min((plain[slot] for slot in inside), default=0)
    assert list(members(index.least(mask))) == [slot for slot in inside if plain[slot] == least]
    assert list(members(index.below(mask, 2))) == [slot for slot in inside if plain[slot] < 2]


@settings(deadline=None)
@given(st.integers(1, 1 << 12), st.integers(0, 14))
def test_the_next_member_wraps_round(mask: int, start: int) -> None:
    slots = list(members(mask))
    assert next_member(mask, start) == next((s for s in slots if s >= start), slots[0])


@settings(deadline=None)
@given(st.integers(1, 1 << 12), st.integers(1, 12))
def test_rotation_visits_every_member_in_turn(mask: int, limit: int) -> None:
    turn = Rotation()
    count = mask.bit_count()
    assert sorted(turn.pick(mask) for _ in range(count)) == list(members(mask))
    assert len(turn.some(mask, limit)) == min(limit, count)
