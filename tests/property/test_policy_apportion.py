"""Apportionment: within the memory, work-conserving, true to the shares of the pool and over time; a naive twin."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.policy.apportion import Apportioner, fractional_caps, paper_caps

CLASSES = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0.0, 100.0).map(lambda x: round(x, 1)), min_size=n, max_size=n),  # demand
        st.lists(st.floats(10.0, 5_000.0), min_size=n, max_size=n),  # footprints
        st.lists(st.floats(0.1, 100.0), min_size=n, max_size=n),  # residencies
    )
)
CAPACITY = st.floats(5_000.0, 100_000.0)


def weights_of(demand: list[float], footprints: list[float], residencies: list[float]) -> list[float]:
    return [n * k * t for n, k, t in zip(demand, footprints, residencies, strict=True)]


def naive_fractions(capacity: float, weights: list[float], footprints: list[float], demand: list[float]) -> list[float]:
    """Pour memory in small drops in proportion to the weights; a full class takes no more; the rest in proportion."""
    held = [0.0] * len(weights)
    left = capacity
    for _ in range(4_000):
        open_ = [b for b, w in enumerate(weights) if w > 0 and held[b] < demand[b] * footprints[b] * (1 - 1e-9)]
        if not open_ or left <= capacity * 1e-9:
            break
        total = sum(weights[b] for b in open_)
        drop = min(min((demand[b] * footprints[b] - held[b]) * total / weights[b] for b in open_), left)
        for b in open_:
            held[b] += drop * weights[b] / total
        left -= drop
    total = sum(weights)
    return [(h + (left * w / total if total else 0.0)) / k for h, w, k in zip(held, weights, footprints, strict=True)]


@settings(deadline=None)
@given(CLASSES, CAPACITY)
def test_fractional_caps_agree_with_pouring(
    classes: tuple[list[float], list[float], list[float]], capacity: float
) -> None:
    demand, footprints, residencies = classes
    weights = weights_of(demand, footprints, residencies)
    found = fractional_caps(capacity, weights, footprints, demand)
    expected = naive_fractions(capacity, weights, footprints, demand)
    for a, b in zip(found, expected, strict=True):
        assert abs(a - b) <= 1e-6 * max(1.0, b)
    if any(weights):  # work-conserving: all of the memory is given out
        used = sum(cap * k for cap, k in zip(found, footprints, strict=True))
        assert abs(used - capacity) <= 1e-6 * capacity


@settings(deadline=None)
@given(CLASSES, st.lists(CAPACITY, min_size=1, max_size=12))
def test_integer_caps_never_exceed_the_memory_and_follow_the_share(
    classes: tuple[list[float], list[float], list[float]], capacities: list[float]
) -> None:
    demand, footprints, residencies = classes
    weights = weights_of(demand, footprints, residencies)
    apportioner = Apportioner()
    apportioner.round(1.0, [0.0] * len(weights), footprints)
    apportioner.start_pass()
    given_, wanted = [0] * len(weights), [0.0] * len(weights)
    for capacity in capacities:
        caps = fractional_caps(capacity, weights, footprints, demand)
        whole = apportioner.round(capacity, caps, footprints)
        assert sum(n * k for n, k in zip(whole, footprints, strict=True)) <= capacity * (1 + 1e-9)
        assert all(n >= 0 for n in whole)
        assert all(n == 0 for n, cap in zip(whole, caps, strict=True) if cap == 0.0)
        for b, n in enumerate(whole):
            given_[b] += n
            wanted[b] += caps[b]
        room = capacity - sum(n * k for n, k in zip(whole, footprints, strict=True))
        hungry = [k for k, cap in zip(footprints, caps, strict=True) if cap > 0.0]
        assert all(room < k * (1 + 1e-9) for k in hungry)  # nothing that fits is left out
    if len([cap for cap in wanted if cap > 0]) == 1:
        b = wanted.index(max(wanted))
        assert given_[b] >= wanted[b] - len(capacities)


def naive_round(
    capacity: float, caps: list[float], footprints: list[float], carry: list[float]
) -> tuple[list[int], list[float]]:
    """One session at a time: whole sessions of the class with most carry first, then one more each by remainder."""
    whole = [0] * len(caps)
    left = capacity
    rest = [b for b, cap in enumerate(caps) if cap > 0.0]
    todo = list(rest)
    while todo:
        b = todo[0]
        for other in todo:
            if carry[other] > carry[b]:
                b = other
        todo.remove(b)
        room = int(left / footprints[b])
        while whole[b] + 1 <= caps[b] + max(0.0, carry[b]) and whole[b] + 1 <= room:
            whole[b] += 1
        left -= whole[b] * footprints[b]
    for greedy in (False, True):
        start = list(whole)
        todo = list(rest)
        while todo:
            b = todo[0]
            for other in todo:
                if start[other] - caps[other] - carry[other] < start[b] - caps[b] - carry[b]:
                    b = other
            todo.remove(b)
            room, more = int(left / footprints[b]), 0
            while more < room and (greedy or more < 1):
                more += 1
            whole[b] += more
            left -= more * footprints[b]
    after = [
        min(max(carry[b] + caps[b] - whole[b], -8.0), 8.0) if caps[b] > 0.0 else carry[b] for b in range(len(caps))
    ]
    return whole, after


@settings(deadline=None)
@given(CLASSES, st.lists(CAPACITY, min_size=1, max_size=6), st.lists(st.floats(-1.0, 1.0), min_size=6, max_size=6))
def test_rounding_agrees_with_one_session_at_a_time(
    classes: tuple[list[float], list[float], list[float]], capacities: list[float], deficits: list[float]
) -> None:
    demand, footprints, residencies = classes
    weights = weights_of(demand, footprints, residencies)
    apportioner = Apportioner()
    carry = deficits[: len(demand)]
    for b, deficit in enumerate(carry):
        apportioner.serve(b, deficit, 0, True, 1.0)
    apportioner.start_pass()
    for capacity in capacities:
        caps = fractional_caps(capacity, weights, footprints, demand)
        expected, carry = naive_round(capacity, caps, footprints, carry)
        assert apportioner.round(capacity, caps, footprints) == expected


@settings(deadline=None)
@given(st.integers(2, 30), st.floats(0.05, 0.9))
def test_a_class_below_one_session_per_replica_gets_its_part_of_the_pool(replicas: int, share: float) -> None:
    apportioner = Apportioner()
    apportioner.round(1.0, [0.0, 0.0], [1.0, 1.0])
    apportioner.start_pass()
    slots = 0
    for _ in range(replicas):
        caps = [share, (1_000.0 - share * 600.0) / 100.0]
        slots += apportioner.round(1_000.0, caps, [600.0, 100.0])[0]
    assert abs(slots - share * replicas) <= 2.0  # the carry at the end


def test_a_waiting_class_earns_a_whole_slot_over_time_and_keeps_it_until_it_is_served() -> None:
    apportioner = Apportioner()
    rounds = []
    for _ in range(12):
        apportioner.serve(0, 0.2, 0, True, 0.5)
        apportioner.serve(1, 8.8, 9, True, 0.5)
        apportioner.start_pass()
        rounds.append(apportioner.round(1_000.0, [0.2, 8.8], [600.0, 100.0])[0])
    first = rounds.index(1)
    assert first > 0
    assert set(rounds[first:]) == {1}


@settings(deadline=None)
@given(CLASSES, CAPACITY)
def test_the_papers_caps_are_at_least_one_and_can_exceed_the_memory(
    classes: tuple[list[float], list[float], list[float]], capacity: float
) -> None:
    demand, footprints, residencies = classes
    weights = weights_of(demand, footprints, residencies)
    if any(weights):
        caps = paper_caps(capacity, weights, footprints)
        assert all(cap >= 1 for cap, n in zip(caps, weights, strict=True) if n > 0)
    assert paper_caps(100.0, [1.0, 1.0], [90.0, 90.0]) == [1, 1]
