"""/metrics under vLLM's names, and load reports in response headers."""

from __future__ import annotations

import asyncio
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.engine.conftest import FROZEN, Http, StartEngine, until

from tidegate.engine.server import EngineServer

# Name, type and labels as vLLM 0.32 exports them; each with `engine` and `model_name` besides.
VLLM = {
    "vllm:num_requests_running": ("gauge", ()),
    "vllm:num_requests_waiting": ("gauge", ()),
    "vllm:num_requests_waiting_by_reason": ("gauge", ("reason",)),
    "vllm:engine_sleep_state": ("gauge", ("sleep_state",)),
    "vllm:kv_cache_usage_perc": ("gauge", ()),
    "vllm:prefix_cache_queries": ("counter", ()),
    "vllm:prefix_cache_hits": ("counter", ()),
    "vllm:num_preemptions": ("counter", ()),
    "vllm:prompt_tokens": ("counter", ()),
    "vllm:prompt_tokens_by_source": ("counter", ("source",)),
    "vllm:prompt_tokens_cached": ("counter", ()),
    "vllm:generation_tokens": ("counter", ()),
    "vllm:request_success": ("counter", ("finished_reason",)),
    "vllm:request_prompt_tokens": ("histogram", ("le",)),
    "vllm:request_generation_tokens": ("histogram", ("le",)),
    "vllm:iteration_tokens_total": ("histogram", ("le",)),
    "vllm:time_to_first_token_seconds": ("histogram", ("le",)),
    "vllm:inter_token_latency_seconds": ("histogram", ("le",)),
    "vllm:e2e_request_latency_seconds": ("histogram", ("le",)),
    "vllm:request_queue_time_seconds": ("histogram", ("le",)),
    "vllm:request_prefill_time_seconds": ("histogram", ("le",)),
    "vllm:request_decode_time_seconds": ("histogram", ("le",)),
}


async def test_names_types_and_labels_are_vllms(engine: EngineServer, http: Http) -> None:
    families = {
        family.name: family for family in text_string_to_metric_families(await http.text(f"{engine.url}/metrics"))
    }
    for name, (kind, labels) in VLLM.items():
        family = families[name]
        assert family.type == kind, name
        sample = family.samples[0]
        assert set(sample.labels) == {"engine", "model_name", *labels}, name
        assert (sample.labels["engine"], sample.labels["model_name"]) == ("0", "m")
    info = families["vllm:cache_config_info"].samples[0].labels
    assert (info["num_gpu_blocks"], info["block_size"], info["kv_cache_size_tokens"]) == ("1024", "16", "16384")


async def test_counters_add_up(engine: EngineServer, http: Http) -> None:
    url = f"{engine.url}/v1/completions"
    for _ in range(2):
        await http.post(url, {"prompt": [1] * 40, "max_tokens": 5, "ignore_eos": True})
    assert await http.metric(engine, "vllm:prompt_tokens_total") == 80
    assert await http.metric(engine, "vllm:prompt_tokens_cached_total") == 32
    assert await http.metric(engine, "vllm:prompt_tokens_by_source_total") == 80
    assert await http.metric(engine, "vllm:generation_tokens_total") == 10
    assert await http.metric(engine, "vllm:request_success_total") == 2
    assert await http.metric(engine, "vllm:e2e_request_latency_seconds_count") == 2
    assert await http.metric(engine, "vllm:inter_token_latency_seconds_count") == 8


async def test_usage_and_queues_show_running_and_waiting(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(time_scale=FROZEN, max_num_seqs=1)
    url = f"{engine.url}/v1/completions"
    body = {"prompt": [1] * 160, "max_tokens": 5}
    asks = [asyncio.create_task(http.post(url, body)) for _ in range(3)]
    await until(lambda: engine.core.unfinished == 3)
    assert await http.metric(engine, "vllm:num_requests_running") == 1
    assert await http.metric(engine, "vllm:num_requests_waiting") == 2
    assert await http.metric(engine, "vllm:num_requests_waiting_by_reason") == 2
    assert await http.metric(engine, "vllm:kv_cache_usage_perc") == pytest.approx(10 / 1023)
    await http.post(f"{engine.url}/abort_requests", {})
    await asyncio.gather(*asks)


async def test_times_are_model_times(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(time_scale=5000.0)
    await http.post(f"{engine.url}/v1/completions", {"prompt": [1], "max_tokens": 41, "ignore_eos": True})
    step_s = 0.0248  # one sequence, a short context
    itl = await http.metric(engine, "vllm:inter_token_latency_seconds_sum") / 40
    assert itl == pytest.approx(step_s, rel=0.02)
    assert await http.metric(engine, "vllm:request_decode_time_seconds_sum") == pytest.approx(40 * step_s, rel=0.02)
    assert await http.metric(engine, "tidegate_engine_time_scale") == 5000.0


async def test_load_reports_come_when_asked_for(engine: EngineServer, http: Http) -> None:
    async def report(wanted: str | None, path: str = "/v1/completions", stream: bool = False) -> str | None:
        headers = {} if wanted is None else {"endpoint-load-metrics-format": wanted}
        body = {"prompt": "a", "messages": [], "max_tokens": 2, "stream": stream}
        async with http.session.post(engine.url + path, json=body, headers=headers) as response:
            await response.read()
            assert response.status == 200
            return response.headers.get("endpoint-load-metrics")

    for path in ("/v1/completions", "/v1/chat/completions"):
        for stream in (False, True):
            text = await report("TEXT", path, stream)
            assert text is not None
            assert text.startswith("TEXT named_metrics.kv_cache_usage_perc=")
            assert "named_metrics.num_requests_waiting=" in text
    as_json = await report("json")
    assert as_json is not None
    assert set(json.loads(as_json.removeprefix("JSON "))["named_metrics"]) == {
        "kv_cache_usage_perc",
        "num_requests_waiting",
    }
    assert await report(None) is None
    assert await report("XML") is None
