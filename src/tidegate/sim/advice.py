"""How many rollouts to run, under which policy: from runs at several numbers of sessions in flight.

The number to run is the smallest at which the policy's contract rate is within `CLOSE` of its best: more sessions in
flight add staleness and memory, and nothing else. The gain is that of the policy at its number over the other at the
number that is best for it, seed by seed, with a bootstrap interval: what is left of the gain when the rival is tuned.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidegate.sim.compare import Row
from tidegate.sim.scenario import Scenario
from tidegate.sim.score import Interval, mean_interval, ratio_interval

CLOSE = 0.97
# Around the scenario's own number, in steps that tell a knee within a quarter.
FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    in_flight: int
    contract_per_min: Interval
    efficiency: float | None
    gain: Interval | None  # of the best policy over this one at its best number; None: it is the best


def populations(scenario: Scenario) -> list[Scenario]:
    numbers = sorted({max(1, round(factor * scenario.trainer.in_flight)) for factor in FACTORS})
    return [
        msgspec.structs.replace(scenario, trainer=msgspec.structs.replace(scenario.trainer, in_flight=number))
        for number in numbers
    ]


def advise(rows: Sequence[Row]) -> list[Advice]:
    """Best policy first."""
    by_policy: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        by_policy.setdefault(row.policy, {}).setdefault(row.in_flight, []).append(row)
    numbers = {policy: _number_to_run(runs) for policy, runs in by_policy.items()}
    ranked = sorted(by_policy, key=lambda policy: -_mean(by_policy[policy][numbers[policy]]))
    best = ranked[0]
    best_rates = _rates(by_policy[best][numbers[best]])
    return [
        _advice(policy, numbers[policy], by_policy[policy], None if policy == best else best_rates) for policy in ranked
    ]


def _number_to_run(runs: dict[int, list[Row]]) -> int:
    top = max(_mean(rows) for rows in runs.values())
    return min(number for number, rows in runs.items() if _mean(rows) >= CLOSE * top)


def _advice(policy: str, number: int, runs: dict[int, list[Row]], best_rates: list[float] | None) -> Advice:
    rows = runs[number]
    known = [row.efficiency for row in rows if row.efficiency is not None]
    own_best = _rates(runs[max(runs, key=lambda number: _mean(runs[number]))])
    return Advice(
        policy=policy,
        in_flight=number,
        contract_per_min=mean_interval(_rates(rows)),
        efficiency=sum(known) / len(known) if known else None,
        gain=ratio_interval(best_rates, own_best) if best_rates is not None and any(own_best) else None,
    )


def _rates(rows: Sequence[Row]) -> list[float]:
    return [row.contract_per_min for row in sorted(rows, key=lambda row: row.seed)]


def _mean(rows: Sequence[Row]) -> float:
    return sum(row.contract_per_min for row in rows) / len(rows)
