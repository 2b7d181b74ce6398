"""What a step computes, who is admitted, who is preempted, and what pause and reset do."""

from __future__ import annotations

import msgspec
import pytest

from tidegate.sim.latency import LatencyModel
from tidegate.sim.replica import Replica, ReplicaConfig, Request

UNIT = LatencyModel(step_s=1.0, prefill_token_s=0.0, attention_pair_s=0.0, decode_seq_s=0.0, kv_token_s=0.0)


def replica(**changes: object) -> Replica:
    config = ReplicaConfig(num_blocks=101, block_size=4, max_model_len=200, latency=UNIT)
    return Replica(msgspec.structs.replace(config, **changes))


def request(id: str, prompt: int, output: int, name: str | None = None, **more: object) -> Request:
    """Requests of one `name` share their tokens."""
    hashes = [(name or id, block) for block in range((prompt + output) // 4)]
    return Request(id, prompt, output, hashes, **more)  # type: ignore[arg-type]


def run(replica: Replica, now_s: float = 0.0) -> float:
    """Until nothing is left to do; the time when it was."""
    while replica.has_work:
        now_s += replica.step(now_s).duration_s
    return now_s


# --- tokens -------------------------------------------------------------------------------------------------------
def test_a_prompt_yields_its_first_token_in_its_last_prefill_step() -> None:
    engine = replica()
    engine.add(request("a", 10, 3))
    first = engine.step(5.0)
    assert (first.prefill_tokens, len(first.outputs)) == (10, 1)
    assert engine.requests["a"].first_token_s == 6.0
    assert run(engine, 6.0) == 8.0
    assert engine.counters.generation_tokens == 3


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = replica(max_num_batched_tokens=8)
    engine.add(request("a", 20, 1))
    chunks = [engine.step(0.0) for _ in range(3)]
    assert [step.prefill_tokens for step in chunks] == [8, 8, 4]
    assert [len(step.outputs) for step in chunks] == [0, 0, 1]


def test_running_sequences_go_before_waiting_prompts() -> None:
    engine = replica(max_num_batched_tokens=8)
    engine.add(request("a", 4, 10))
    engine.step(0.0)
    engine.add(request("b", 20, 1))
    step = engine.step(1.0)
    assert (step.decode_seqs, step.prefill_tokens) == (1, 7)


def test_no_more_sequences_run_than_max_num_seqs() -> None:
    engine = replica(max_num_seqs=2)
    for name in "abc":
        engine.add(request(name, 4, 2))
    engine.step(0.0)
    assert [r.id for r in engine.running] == ["a", "b"]
    run(engine, 1.0)
    assert engine.counters.generation_tokens == 6


def test_a_reply_ends_at_the_models_length() -> None:
    engine = replica(max_model_len=12)
    engine.add(request("a", 10, 50))
    run(engine)
    assert engine.counters.generation_tokens == 2


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves no room"):
        replica(max_model_len=12).add(request("a", 12, 1))


def test_a_model_length_that_the_cache_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len 200"):
        ReplicaConfig(num_blocks=50, block_size=4, max_model_len=200)


# --- the prefix cache ---------------------------------------------------------------------------------------------
def test_the_next_turn_finds_what_the_last_one_computed() -> None:
    engine = replica()
    engine.add(request("t1", 20, 8, "s"))
    run(engine)
    engine.add(request("t2", 40, 1, "s"))
    step = engine.step(0.0)
    assert step.prefill_tokens == 40 - 24  # 28 tokens; the last generated one has no KV: 27 = 6 blocks and 3
    assert engine.counters.prefix_cache_hits == 24


def test_the_last_prompt_token_is_always_computed() -> None:
    engine = replica()
    engine.add(request("a", 16, 1, "s"))
    run(engine)
    engine.add(request("b", 16, 1, "s"))
    assert engine.step(0.0).prefill_tokens == 4


def test_a_prefix_is_found_while_it_is_still_being_computed() -> None:
    engine = replica(max_num_batched_tokens=16)
    engine.add(request("a", 16, 20, "s"))
    engine.step(0.0)
    engine.add(request("b", 17, 1, "s"))
    engine.step(1.0)
    assert engine.counters.prefix_cache_hits == 16


def test_without_prefix_caching_everything_is_computed() -> None:
    engine = replica(enable_prefix_caching=False)
    for id in ("a", "b"):
        engine.add(request(id, 16, 1, "s"))
        assert engine.step(0.0).prefill_tokens == 16


def test_cached_tokens_are_counted_when_the_first_token_comes() -> None:
    engine = replica(max_num_batched_tokens=8)
    engine.add(request("a", 16, 1, "s"))
    engine.step(0.0)
    assert engine.counters.prompt_tokens == 0
    engine.step(1.0)
    assert (engine.counters.prompt_tokens, engine.counters.prompt_tokens_cached) == (16, 0)
    engine.add(request("b", 16, 1, "s"))
    engine.step(2.0)
    assert (engine.counters.prompt_tokens, engine.counters.prompt_tokens_cached) == (32, 12)


# --- memory -------------------------------------------------------------------------------------------------------
def test_a_prompt_that_does_not_fit_waits_and_holds_up_those_behind_it() -> None:
    engine = replica(num_blocks=11, max_model_len=40)
    engine.add(request("big", 28, 4))
    engine.step(0.0)
    engine.add(request("second", 24, 1))
    engine.add(request("small", 4, 1))
    engine.step(1.0)
    assert [r.id for r in engine.running] == ["big"]
    assert [r.id for r in engine.waiting] == ["second", "small"]


def test_out_of_blocks_the_latest_is_preempted_and_computed_again() -> None:
    engine = replica(num_blocks=7, max_model_len=24)
    engine.add(request("a", 8, 12))
    engine.add(request("b", 12, 8))
    now = 0.0
    preempted = []
    for _ in range(3):
        step = engine.step(now)
        now += step.duration_s
        preempted += [r.id for r in step.preempted]
    assert preempted == ["b"]
    run(engine, now)
    assert engine.counters.num_preemptions == 1
    assert engine.counters.generation_tokens == 20
    assert engine.counters.recomputed_tokens > 0
    assert engine.counters.prompt_tokens == 20  # each prompt once


def test_by_priority_the_least_important_is_preempted_whoever_came_first() -> None:
    engine = replica(num_blocks=7, max_model_len=24, scheduling_policy="priority")
    engine.add(request("a", 8, 12, priority=5))
    engine.add(request("b", 12, 8, priority=0))
    preempted = []
    for _ in range(4):
        preempted += [r.id for r in engine.step(0.0).preempted]
    assert preempted == ["a"]
    run(engine)
    assert engine.counters.generation_tokens == 20


def test_by_priority_the_queue_is_ordered_by_priority_then_arrival() -> None:
    engine = replica(scheduling_policy="priority", max_num_seqs=1)
    for id, priority, arrival in (("late", 1, 2.0), ("early", 1, 1.0), ("urgent", 0, 3.0)):
        engine.add(request(id, 4, 1, priority=priority, arrival_s=arrival))
    order = []
    while engine.has_work:
        order += [r.id for r in engine.step(0.0).finished]
    assert order == ["urgent", "early", "late"]


# --- abort, pause, reset ------------------------------------------------------------------------------------------
def test_an_aborted_request_frees_its_blocks_and_leaves_its_prefix_cached() -> None:
    engine = replica()
    engine.add(request("a", 16, 20, "s"))
    engine.step(0.0)
    aborted = engine.abort("a")
    assert aborted is not None
    assert aborted.finish_reason == "abort"
    assert engine.pool.num_free == 100
    assert not engine.has_work
    engine.add(request("b", 17, 1, "s"))
    assert engine.step(1.0).prefill_tokens == 1


def test_aborting_a_waiting_or_unknown_request_touches_nothing_else() -> None:
    engine = replica(max_num_seqs=1)
    engine.add(request("a", 4, 4))
    engine.add(request("b", 4, 4))
    engine.step(0.0)
    assert engine.abort("b") is not None
    assert engine.abort("b") is None
    assert engine.abort("nobody") is None
    run(engine)
    assert engine.counters.generation_tokens == 4


def test_pause_keep_freezes_and_resume_goes_on() -> None:
    engine = replica()
    engine.add(request("a", 4, 5))
    engine.step(0.0)
    engine.pause("keep")
    assert engine.is_paused
    assert not engine.has_work
    assert engine.step(1.0).outputs == []
    engine.resume()
    run(engine, 2.0)
    assert engine.counters.generation_tokens == 5


def test_pause_wait_lets_the_running_end_and_keeps_the_waiting() -> None:
    engine = replica(max_num_seqs=1)
    engine.add(request("a", 4, 5))
    engine.add(request("b", 4, 5))
    engine.step(0.0)
    engine.pause("wait")
    run(engine, 1.0)
    assert [r.id for r in engine.waiting] == ["b"]
    engine.resume()
    run(engine, 9.0)
    assert engine.counters.generation_tokens == 10


def test_pause_abort_ends_all() -> None:
    engine = replica(max_num_seqs=1)
    engine.add(request("a", 4, 5))
    engine.add(request("b", 4, 5))
    engine.step(0.0)
    assert [r.id for r in engine.pause("abort")] == ["a", "b"]
    assert engine.requests == {}


def test_reset_is_refused_while_running_unless_the_running_may_be_preempted() -> None:
    engine = replica()
    engine.add(request("a", 16, 5, "s"))
    engine.step(0.0)
    assert not engine.reset_prefix_cache()
    assert engine.reset_prefix_cache(reset_running_requests=True)
    assert engine.step(1.0).prefill_tokens == 17
    run(engine, 2.0)
    assert engine.counters.generation_tokens == 5


def test_step_time_is_the_sum_of_its_parts() -> None:
    latency = LatencyModel(step_s=1.0, prefill_token_s=0.1, attention_pair_s=0.01, decode_seq_s=10.0, kv_token_s=100.0)
    engine = replica(latency=latency)
    engine.add(request("a", 4, 5))
    assert engine.step(0.0).duration_s == pytest.approx(1.0 + 0.4 + 0.01 * (1 + 2 + 3 + 4))
    assert engine.step(0.0).duration_s == pytest.approx(1.0 + 10.0 + 100.0 * 5)
