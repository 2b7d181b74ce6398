#!/usr/bin/env python3
"""How fast the simulator is, and what it holds in memory.

speed    replica-seconds per CPU second of one core, scenario steady: with the scheduler's share of the time beside it,
         since the production one runs inside
kernel   bare events per CPU second, against simpy's on the same pattern: timers that set themselves again
scale    1,000 replicas with 100,000 sessions in flight: peak memory

make bench-sim                                                          # all, on the compiled build
.venv/bin/python bench/simulator.py [--speed] [--kernel] [--scale]      # all, where none is named
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import msgspec

from tidegate.policy.params import CoreParams
from tidegate.policy.scheduler import Scheduler
from tidegate.sim import kernel as kernel_module
from tidegate.sim.cluster import Cluster
from tidegate.sim.kernel import Kernel
from tidegate.sim.run import run, unbounded
from tidegate.sim.scenario import Scenario
from tidegate.sim.scenarios import scenario
from tidegate.types import AnyEvent

ROUNDS = 3
KERNEL_EVENTS = 300_000
TIMERS = 1000
SCALE_S = 10.0  # of model time: all sessions have started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("speed", "kernel", "scale"):
        parser.add_argument(f"--{name}", action="store_true")
    chosen = [name for name, wanted in vars(parser.parse_args()).items() if wanted]
    if len(chosen) == 1:
        {"speed": speed, "kernel": kernel, "scale": scale}[chosen[0]]()
        return
    for name in chosen or ["speed", "kernel", "scale"]:  # each in a process of its own: memory is a peak
        subprocess.run([sys.executable, __file__, f"--{name}"], check=True)


def speed() -> None:
    print(f"  compiled: {not kernel_module.__file__.endswith('.py')}")
    print(f"  {'scenario steady, 4 replicas':34} {'replica-s per CPU s':26} scheduler  kernel events per CPU s")
    for policy in ("sticky_least_loaded", "static_cap", "misa_t"):
        case = msgspec.structs.replace(scenario("steady"), warmup_s=300.0, duration_s=900.0)
        for label, each in ((policy, case), (f"{policy}, unbounded KV", unbounded(case))):
            rates, events = [], []
            for _ in range(ROUNDS):
                began_s = time.process_time()
                result = run(each, policy)
                spent_s = time.process_time() - began_s
                rates.append(result.simulated_s * result.replicas / spent_s)
                events.append(result.events / spent_s)
            share = scheduler_share(each, policy)
            print(f"  {label:34} {spread(rates, ',.0f'):26} {100 * share:6.0f} % {median(events):26,.0f}", flush=True)


def scheduler_share(case: Scenario, policy: str) -> float:
    """Of the CPU time, in Scheduler.handle: what a fresh scheduler spends on the events of the run."""
    events: list[AnyEvent] = []
    began_s = time.process_time()
    run(case, policy, recorder=lambda event, decisions: events.append(event))
    spent_s = time.process_time() - began_s
    scheduler = Scheduler(policy)
    began_s = time.process_time()
    for event in events:
        scheduler.handle(event)
    return (time.process_time() - began_s) / spent_s


def kernel() -> None:
    rates = [(rate_of(ours), rate_of(simpys)) for _ in range(ROUNDS)]
    for name, column in (("tidegate", 0), ("simpy", 1)):
        print(f"  {name:10} {spread([rate[column] for rate in rates], ',.0f')} events per CPU second")
    print(f"  ratio      {spread([ours / theirs for ours, theirs in rates], '.2f')}")


def spread(values: list[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def rate_of(drive: Callable[[], None]) -> float:
    began_s = time.process_time()
    drive()
    return KERNEL_EVENTS / (time.process_time() - began_s)


def ours() -> None:
    kernel = Kernel()
    for number in range(TIMERS):
        kernel.every(1.0 + number / TIMERS, lambda: None)
    while kernel.events < KERNEL_EVENTS:
        kernel.run(kernel.now_s + 1.0)


def simpys() -> None:
    import simpy

    env = simpy.Environment()

    def timer(period_s: float) -> Iterator[object]:
        while True:
            yield env.timeout(period_s)

    for number in range(TIMERS):
        env.process(timer(1.0 + number / TIMERS))
    for _ in range(KERNEL_EVENTS):
        env.step()


def scale() -> None:
    steady = scenario("steady")
    spec = msgspec.structs.replace(steady.replicas[0], count=1000)
    trainer = msgspec.structs.replace(steady.trainer, in_flight=100_000)
    case = msgspec.structs.replace(steady, replicas=(spec,), trainer=trainer)
    began_s = time.process_time()
    cluster = Cluster(case, "static_cap", CoreParams(), 0)
    cluster.run(SCALE_S)
    spent_s = time.process_time() - began_s
    used_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    view = cluster.gate.scheduler.view(SCALE_S)
    print(
        f"  1,000 replicas, 100,000 sessions ({view.live:,} live, {view.held:,} held), {SCALE_S:.0f} s: "
        f"{used_mib:,.0f} MiB at most, {spent_s:.0f} CPU s, {1000 * SCALE_S / spent_s:,.0f} replica-s per CPU s"
    )


if __name__ == "__main__":
    main()
