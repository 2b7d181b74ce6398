"""Policies x scenarios x seeds, in parallel processes. The same jobs give the same rows at any process count.

Every (scenario, seed) has one more job, the run with unbounded KV: it is what efficiency is taken against.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import msgspec

from tidegate.sim.gate import Recorder
from tidegate.sim.overrides import PolicyChoice, policy_choice
from tidegate.sim.run import UNBOUNDED_POLICY, RunResult, run, unbounded
from tidegate.sim.scenario import Scenario
from tidegate.sim.score import Interval, mean_interval
from tidegate.types import WorkloadClass


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as scripts read it."""

    scenario: str
    policy: str
    seed: int
    replicas: int
    in_flight: int
    contract_per_min: float
    efficiency: float | None  # None: without the unbounded run, or its rate was 0
    hit_rate: float | None
    recomputed_prompt_share: float | None
    tv_pp: float | None
    preemptions: int | None
    hold_p50_s: float | None
    hold_p95_s: float | None
    hold_p95_by_class_s: dict[WorkloadClass, float] = {}  # of the calls that were held; empty: none was
    total_per_min: float  # raw; never ranks
    simulated_s: float
    wall_s: float


class Job(msgspec.Struct, frozen=True):
    scenario: Scenario
    policy: PolicyChoice
    seed: int
    unbounded: bool = False
    observe: bool = False


Progress = Callable[[int, int], None]


def jobs(
    scenarios: Sequence[Scenario], policies: Sequence[PolicyChoice], seeds: Sequence[int], *, observe: bool = False
) -> list[Job]:
    """`observe`: the first seed's runs with a timeline."""
    reference = policy_choice(UNBOUNDED_POLICY)
    return [
        job
        for scenario in scenarios
        for seed in seeds
        for job in (
            Job(unbounded(scenario), reference, seed, unbounded=True),
            *(Job(scenario, policy, seed, observe=observe and seed == seeds[0]) for policy in policies),
        )
    ]


class Comparison(msgspec.Struct, frozen=True):
    rows: list[Row]
    runs: list[RunResult]  # one for each row


def compare(
    scenarios: Sequence[Scenario],
    policies: Sequence[PolicyChoice],
    seeds: Sequence[int],
    *,
    processes: int | None = None,
    progress: Progress = lambda done, total: None,
    observe: bool = False,
    recorder: Recorder | None = None,
) -> Comparison:
    """`recorder`: of the events and decisions of the one run that is asked for."""
    planned = jobs(scenarios, policies, seeds, observe=observe)
    if recorder is not None and len(planned) > 2:
        raise ValueError(f"a recorder takes one run, not {sum(not job.unbounded for job in planned)}")
    results = list(zip(planned, run_all(planned, processes, progress, recorder), strict=True))
    limits = {_key(job, result): result.score.contract_per_min for job, result in results if job.unbounded}
    pairs = [(result, limits[_key(job, result)]) for job, result in results if not job.unbounded]
    return Comparison([row(result, limit) for result, limit in pairs], [result for result, _ in pairs])


def _key(job: Job, result: RunResult) -> tuple[str, int, int]:
    return job.scenario.name, result.in_flight, job.seed


def run_all(
    planned: Sequence[Job], processes: int | None, progress: Progress, recorder: Recorder | None = None
) -> list[RunResult]:
    """In the order of the jobs. Runs share nothing, so where they ran changes nothing."""
    workers = min(processes or os.cpu_count() or 1, len(planned))
    if workers <= 1 or recorder is not None:
        return list(_in_turn(planned, progress, recorder))
    results: dict[int, RunResult] = {}
    # Spawned, not forked: a worker must not inherit threads of whoever called.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(run_job, job): index for index, job in enumerate(planned)}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                results[futures[future]] = future.result()
                progress(done, len(planned))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[index] for index in range(len(planned))]


def _in_turn(planned: Sequence[Job], progress: Progress, recorder: Recorder | None) -> Iterator[RunResult]:
    for done, job in enumerate(planned, start=1):
        yield run_job(job, None if job.unbounded else recorder)
        progress(done, len(planned))


def run_job(job: Job, recorder: Recorder | None = None) -> RunResult:
    choice = job.policy
    return run(
        job.scenario,
        choice.name,
        job.seed,
        choice.params,
        label=choice.label,
        observe=job.observe,
        recorder=recorder,
    )


def row(result: RunResult, limit_per_min: float | None) -> Row:
    score = result.score
    return Row(
        scenario=result.scenario,
        policy=result.policy,
        seed=result.seed,
        replicas=result.replicas,
        in_flight=result.in_flight,
        contract_per_min=score.contract_per_min,
        efficiency=score.contract_per_min / limit_per_min if limit_per_min else None,
        hit_rate=score.hit_rate,
        recomputed_prompt_share=score.recomputed_prompt_share,
        tv_pp=score.tv_pp,
        preemptions=score.preemptions,
        hold_p50_s=score.hold_p50_s,
        hold_p95_s=score.hold_p95_s,
        hold_p95_by_class_s=result.hold_p95_by_class_s,
        total_per_min=score.total_per_min,
        simulated_s=result.simulated_s,
        wall_s=result.wall_s,
    )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one policy in one scenario over seeds."""

    scenario: str
    in_flight: int
    policy: str
    seeds: int
    contract_per_min: Interval
    efficiency: float | None
    hit_rate: float | None
    recomputed_prompt_share: float | None
    tv_pp: float | None
    preemptions: float | None
    hold_p95_s: float | None
    total_per_min: float


def summaries(rows: Iterable[Row]) -> list[Summary]:
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for each in rows:
        groups.setdefault((each.scenario, each.in_flight, each.policy), []).append(each)
    return [_summary(group) for group in groups.values()]


def _summary(rows: Sequence[Row]) -> Summary:
    first = rows[0]
    return Summary(
        scenario=first.scenario,
        in_flight=first.in_flight,
        policy=first.policy,
        seeds=len(rows),
        contract_per_min=mean_interval([each.contract_per_min for each in rows]),
        efficiency=_mean(each.efficiency for each in rows),
        hit_rate=_mean(each.hit_rate for each in rows),
        recomputed_prompt_share=_mean(each.recomputed_prompt_share for each in rows),
        tv_pp=_mean(each.tv_pp for each in rows),
        preemptions=_mean(each.preemptions for each in rows),
        hold_p95_s=_mean(each.hold_p95_s for each in rows),
        total_per_min=sum(each.total_per_min for each in rows) / len(rows),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
