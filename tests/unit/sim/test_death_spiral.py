"""A closed loop of multi-turn sessions: full speed while their KV fits, collapse a little beyond it."""

from __future__ import annotations

import heapq
import random

import pytest

from tidegate.sim.latency import CPU_TINY
from tidegate.sim.replica import Replica, ReplicaConfig, Request

BLOCK = 32
TURNS = 12
FIRST_TOKENS = 1000
GENERATED_TOKENS = 24
PAUSE_S = 0.5


def closed_loop(sessions: int, *, kv_tokens: int = 16_384, until_s: float = 300.0) -> tuple[float, float, float]:
    """Turns a second, hit rate, and the average of the usage gauge."""
    replica = Replica(
        ReplicaConfig(
            num_blocks=kv_tokens // BLOCK,
            block_size=BLOCK,
            max_model_len=8192,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            latency=CPU_TINY,
        )
    )
    rng = random.Random(1)
    due: list[tuple[float, int, int, int]] = [(rng.random(), 0, loop, FIRST_TOKENS) for loop in range(sessions)]
    heapq.heapify(due)
    generation = [0] * sessions
    serial = turns_done = 0
    now_s = usage_s = 0.0
    turn_of: dict[str, tuple[int, int]] = {}
    while now_s < until_s:
        while due and due[0][0] <= now_s:
            _, turn, loop, context = heapq.heappop(due)
            blocks = (context + GENERATED_TOKENS) // BLOCK
            request = Request(
                str(serial), context, GENERATED_TOKENS, [(loop, generation[loop], block) for block in range(blocks)]
            )
            turn_of[request.id] = (loop, turn)
            serial += 1
            replica.add(request)
        if not replica.has_work:
            now_s = due[0][0]
            continue
        step_s = _step(replica, now_s, turn_of, due, generation, rng)
        now_s += step_s
        usage_s += replica.pool.usage * step_s
        turns_done = serial - len(replica.requests)
    counters = replica.counters
    return turns_done / now_s, counters.prompt_tokens_cached / counters.prompt_tokens, usage_s / now_s


def _step(
    replica: Replica,
    now_s: float,
    turn_of: dict[str, tuple[int, int]],
    due: list[tuple[float, int, int, int]],
    generation: list[int],
    rng: random.Random,
) -> float:
    step = replica.step(now_s)
    for request in step.finished:
        loop, turn = turn_of.pop(request.id)
        context = request.tokens + rng.randint(100, 300)
        if turn + 1 == TURNS:
            turn, context = -1, FIRST_TOKENS
            generation[loop] += 1
        heapq.heappush(due, (now_s + step.duration_s + PAUSE_S, turn + 1, loop, context))
    return step.duration_s


def test_below_the_knee_sessions_find_their_prefix() -> None:
    for sessions in (1, 2, 4):
        _, hit_rate, _ = closed_loop(sessions)
        assert hit_rate == pytest.approx(0.88, abs=0.02)


def test_throughput_grows_to_the_knee_and_collapses_beyond_it() -> None:
    rates = {sessions: closed_loop(sessions)[0] for sessions in (1, 4, 5, 8, 12)}
    assert rates[1] < rates[4] < rates[5]
    assert rates[8] < 0.65 * rates[5]
    assert rates[12] < 0.55 * rates[5]


def test_far_beyond_the_knee_nothing_is_found_and_usage_does_not_show_it() -> None:
    _, hit_rate, usage = closed_loop(16)
    assert hit_rate < 0.05
    assert usage < 0.9


def test_a_cache_twice_as_large_moves_the_knee() -> None:
    assert closed_loop(8)[1] < 0.5
    assert closed_loop(8, kv_tokens=32_768)[1] > 0.85


def test_the_same_run_gives_the_same_result() -> None:
    assert closed_loop(7) == closed_loop(7)
