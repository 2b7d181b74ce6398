"""working_set's idle discount: how long an idle session's KV is worth keeping, and who dozes."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from tests.unit.policy.shell import Shell, held, placed

from tidegate.policy.estimators import IdleGaps
from tidegate.policy.params import CoreParams, LedgerParams, ReplicaParams, WorkingSetParams
from tidegate.policy.working_set import WorkingSetPolicy
from tidegate.policy.working_set_idle import GAPS_KNOWN, patience_s
from tidegate.types import ReplicaSample


def gaps(*values_s: float) -> IdleGaps:
    found = IdleGaps(LedgerParams())
    for value_s in values_s:
        found.record(value_s)
    return found


def cost(values_s: list[float], patience: float, refill_s: float) -> float:
    return sum(min(gap_s, patience) + refill_s * (gap_s > patience) for gap_s in values_s) / len(values_s)


def test_an_unknown_class_is_given_the_time_that_its_prefill_takes() -> None:
    assert patience_s(gaps(), 7.0) == 7.0
    assert patience_s(gaps(*[1000.0] * (GAPS_KNOWN - 1)), 7.0) == 7.0


def test_short_tools_are_waited_for_and_not_for_ever() -> None:
    assert 15.0 <= patience_s(gaps(*[0.5, 1.0, 2.0] * 40), 13.0) <= 16.0


def test_tools_slower_than_the_prefill_are_not_waited_for() -> None:
    assert patience_s(gaps(*[60.0] * 100), 13.0) == 0.0


def test_a_tail_is_given_up_where_it_begins() -> None:
    patience = patience_s(gaps(*[1.0] * 90, *[600.0] * 10), 13.0)
    assert 1.0 <= patience < 2.0


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("refill_s", [0.5, 5.0, 50.0])
def test_no_other_patience_costs_much_less(seed: int, refill_s: float) -> None:
    random = Random(seed)
    shape, scale_s = random.uniform(0.3, 2.0), random.uniform(0.5, 60.0)
    values_s = [random.weibullvariate(scale_s, shape) for _ in range(2000)]
    best = min(cost(values_s, x, refill_s) for x in [0.0, inf, *(0.05 * 1.1**j for j in range(120))])
    assert cost(values_s, patience_s(gaps(*values_s), refill_s), refill_s) <= 1.1 * best + 0.05


def pool(prefill_tokens_per_s: int | None) -> Shell:
    """One replica of 1,000 tokens; `first` and `second` hold 450 each; nobody's gaps are known."""
    params = CoreParams(working_set=WorkingSetParams(), replica=ReplicaParams(stale_after_s=1e9))
    shell = Shell("working_set", 1, capacity=1000, params=params)
    if prefill_tokens_per_s is not None:
        for at_s in (0.0, 1.0):
            total = int(at_s * prefill_tokens_per_s)
            shell.send(ReplicaSample(at_s=at_s, replica="http://r0", prompt_tokens_total=total))
    shell.turn("first", prompt=100, completion=10)
    shell.turn("second", prompt=100, completion=10)
    shell.turn("first", prompt=400, completion=50)
    shell.turn("second", prompt=400, completion=50)
    return shell


def dormant(shell: Shell) -> int:
    policy = shell.scheduler.policy
    assert isinstance(policy, WorkingSetPolicy)
    return sum(working_set.dormant for working_set in policy.sets)


def test_a_dozing_session_makes_room_for_a_new_one() -> None:
    shell = pool(prefill_tokens_per_s=100)  # D = 10 s
    held(shell.arrive("third", prompt_tokens=300))
    assert not placed(shell.tick(9.0))
    assert dormant(shell) == 0
    assert [place.session for place in placed(shell.tick(2.0))] == ["third"]
    assert dormant(shell) == 2


def test_it_claims_again_in_its_old_rank_when_it_comes_back() -> None:
    shell = pool(prefill_tokens_per_s=100)
    shell.tick(11.0)
    shell.turn("third", prompt=300, completion=50)
    assert dormant(shell) == 2
    shell.turn("first", prompt=460, completion=10)
    shell.turn("second", prompt=460, completion=10)
    assert dormant(shell) == 0
    assert held(shell.arrive("third", prompt_tokens=400)).reason == "not_resident"


def test_nobody_dozes_while_the_prefill_rate_is_unknown() -> None:
    shell = pool(prefill_tokens_per_s=None)
    shell.tick(500.0)
    assert dormant(shell) == 0


def test_a_dozing_session_that_ends_leaves_no_trace() -> None:
    shell = pool(prefill_tokens_per_s=100)
    shell.tick(11.0)
    shell.finish("first")
    shell.finish("second")
    assert dormant(shell) == 0
    shell.scheduler.ledger.check()
