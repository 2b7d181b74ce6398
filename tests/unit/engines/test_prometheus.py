"""A scrape as raw facts: absent is None, engines add up, ranks repeat."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.engines import detect
from tidegate.engines.prometheus import parse
from tidegate.engines.sglang import SglangAdapter
from tidegate.engines.vllm import VllmAdapter

DATA = Path(__file__).parents[2] / "data" / "engines"
VLLM, SGLANG = VllmAdapter(), SglangAdapter()


def read(text: str, adapter: VllmAdapter | SglangAdapter = VLLM):
    return adapter.read(parse(text, adapter.metric_names))


def test_a_recorded_vllm_scrape_gives_every_field() -> None:
    reading = read((DATA / "metrics_vllm.txt").read_text())
    assert reading.kv_capacity_tokens == 16384
    assert reading.kv_used_fraction == 0.0
    assert (reading.running, reading.waiting, reading.preemptions_total) == (0, 0, 0)
    assert (reading.prompt_tokens_total, reading.cached_tokens_total, reading.generation_tokens_total) == (996, 320, 34)
    assert reading.sleeping is False
    assert reading.started_at_s == 1795960310.11


def test_an_sglang_scrape_gives_every_field() -> None:
    reading = read((DATA / "metrics_sglang.txt").read_text(), SGLANG)
    assert reading.kv_capacity_tokens == 131072
    assert reading.kv_used_fraction == 0.5
    assert (reading.running, reading.waiting, reading.preemptions_total) == (7, 2, 5)
    assert (reading.prompt_tokens_total, reading.cached_tokens_total, reading.generation_tokens_total) == (
        1500,
        750,
        77,
    )
    assert reading.started_at_s is None


def test_an_absent_series_is_none_and_not_0() -> None:
    reading = read("vllm:num_requests_running 2.0\n")
    assert reading.running == 2
    assert reading.waiting is None
    assert reading.kv_used_fraction is None
    assert reading.kv_capacity_tokens is None
    assert reading.cached_tokens_total is None
    assert reading.sleeping is None


def test_a_series_whose_name_only_begins_alike_is_not_taken() -> None:
    text = 'vllm:num_requests_waiting_by_reason{reason="capacity"} 7.0\nvllm:num_requests_running_total 9.0\n'
    reading = read(text)
    assert reading.waiting is None
    assert reading.running is None


@pytest.mark.parametrize("name", ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"])
def test_old_and_new_names_of_kv_use_are_read(name: str) -> None:
    assert read(f'{name}{{engine="0"}} 0.25\n').kv_used_fraction == 0.25


@pytest.mark.parametrize("suffix", ["", "_total"])
def test_counters_are_read_with_and_without_total(suffix: str) -> None:
    text = f"vllm:prompt_tokens{suffix} 10\nvllm:prompt_tokens_cached{suffix} 4\nvllm:generation_tokens{suffix} 3\n"
    reading = read(text + f"vllm:num_preemptions{suffix} 1\n")
    assert (reading.prompt_tokens_total, reading.cached_tokens_total) == (10, 4)
    assert (reading.generation_tokens_total, reading.preemptions_total) == (3, 1)


def test_releases_without_cached_prompt_tokens_give_look_ups_and_hits_as_a_pair() -> None:
    reading = read(
        "vllm:prompt_tokens_total 100\nvllm:gpu_prefix_cache_queries_total 300\nvllm:gpu_prefix_cache_hits_total 150\n"
    )
    assert (reading.prompt_tokens_total, reading.cached_tokens_total) == (300, 150)


def test_engines_of_one_url_add_up_and_fractions_average() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{e}"}} {e + 1}\nvllm:kv_cache_usage_perc{{engine="{e}"}} {e / 2}\n'
        f'vllm:cache_config_info{{block_size="16",engine="{e}",num_gpu_blocks="100"}} 1.0\n'
        for e in range(2)
    )
    reading = read(text)
    assert reading.running == 3
    assert reading.kv_used_fraction == 0.25
    assert reading.kv_capacity_tokens == 3200


def test_ranks_of_one_engine_repeat_and_do_not_add_up() -> None:
    text = "".join(f'sglang:num_running_reqs{{dp_rank="0",tp_rank="{rank}"}} 5.0\n' for rank in range(8))
    assert read(text, SGLANG).running == 5


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        ('block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="1200"', 1200),
        ('block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="None"', 1600),
        ('block_size="16",num_gpu_blocks="100"', 1600),
        ('block_size="16",num_gpu_blocks="None"', None),
        ('num_gpu_blocks="100"', None),
        ('block_size="16",num_gpu_blocks="0"', None),
    ],
)
def test_vllm_capacity_is_tokens_or_blocks_times_size_or_unknown(labels: str, tokens: int | None) -> None:
    assert read(f"vllm:cache_config_info{{{labels}}} 1.0\n").kv_capacity_tokens == tokens


def test_capacity_is_unknown_while_one_engine_does_not_tell_its_own() -> None:
    text = (
        'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100"} 1.0\n'
        'vllm:cache_config_info{engine="1",block_size="16",num_gpu_blocks="None"} 1.0\n'
    )
    assert read(text).kv_capacity_tokens is None


def test_sglang_capacity_falls_back_to_the_slots_of_the_pool() -> None:
    pool = "sglang:kv_available_tokens 10\nsglang:kv_evictable_tokens 20\n"
    assert read(pool + "sglang:kv_used_tokens 30\n", SGLANG).kv_capacity_tokens == 60
    assert read(pool, SGLANG).kv_capacity_tokens is None


def test_a_value_that_is_no_number_is_unknown() -> None:
    assert read("sglang:token_usage NaN\n", SGLANG).kv_used_fraction is None


@pytest.mark.parametrize("blocks", ["9" * 5000, "9" * 20, "٤", "-4", "1e999"])
def test_a_capacity_that_is_no_count_is_unknown(blocks: str) -> None:
    labels = f'block_size="16",num_gpu_blocks="{blocks}",kv_cache_size_tokens="None"'
    assert read(f"vllm:cache_config_info{{{labels}}} 1\n").kv_capacity_tokens is None


def test_a_total_too_large_to_be_counted_is_unknown() -> None:
    assert read("vllm:prompt_tokens_total 1e308\n").prompt_tokens_total is None


def test_any_sleeping_engine_makes_the_replica_sleep() -> None:
    state = 'vllm:engine_sleep_state{{engine="{}",sleep_state="awake"}} {}\n'
    assert read(state.format(0, 1.0) + state.format(1, 0.0)).sleeping is True
    assert read(state.format(0, 1.0) + state.format(1, 1.0)).sleeping is False


@pytest.mark.parametrize("line", ["vllm:num_requests_running{engine=", "vllm:num_requests_running abc"])
def test_unreadable_wanted_lines_are_an_error(line: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse(line + "\n", VLLM.metric_names)


def test_unreadable_lines_of_no_interest_are_passed_over() -> None:
    assert read("other{{{ x\nvllm:num_requests_running 1\n").running == 1


def test_the_engine_is_known_by_the_prefix_of_its_names() -> None:
    vllm = detect.by_metrics((DATA / "metrics_vllm.txt").read_text())
    sglang = detect.by_metrics((DATA / "metrics_sglang.txt").read_text())
    assert vllm is not None
    assert vllm.name == "vllm"
    assert sglang is not None
    assert sglang.name == "sglang"
    assert detect.by_metrics("process_start_time_seconds 1\n") is None
