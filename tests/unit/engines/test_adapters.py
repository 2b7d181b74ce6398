"""What adapters know: controls in each engine's spelling, which calls leave caches cold, where KV events come from."""

from __future__ import annotations

import msgspec
import pytest

from tidegate.engines.base import configured_kv_sources, reachable_endpoint
from tidegate.engines.sglang import SglangAdapter
from tidegate.engines.vllm import VllmAdapter

VLLM, SGLANG = VllmAdapter(), SglangAdapter()


@pytest.mark.parametrize(
    ("path", "query", "body", "cold"),
    [
        ("/pause", "", b"", True),
        ("/pause", "mode=keep", b"", True),
        ("/pause", "mode=abort&clear_cache=false", b"", False),
        ("/reset_prefix_cache", "", b"", True),
        ("/sleep", "", b"", True),
        ("/sleep", "level=0", b"", False),
        ("/update_weights", "", b'{"update_info":{}}', True),
        ("/collective_rpc", "", b'{"method":"update_weights_from_path"}', True),
        ("/collective_rpc", "", b'{"method":"profile"}', False),
        ("/resume", "", b"", False),
        ("/abort_requests", "", b"{}", False),
    ],
)
def test_calls_that_leave_vllm_cold(path: str, query: str, body: bytes, cold: bool) -> None:
    assert VLLM.goes_cold(path, query, body) is cold


@pytest.mark.parametrize(
    ("path", "body", "cold"),
    [
        ("/flush_cache", b"", True),
        ("/update_weights_from_disk", b'{"model_path":"m"}', True),
        ("/update_weights_from_distributed", b'{"flush_cache":false}', False),
        ("/update_weights_from_tensor", b"not json", True),
        ("/release_memory_occupation", b"{}", True),
        ("/pause_generation", b'{"mode":"retract"}', False),
        ("/continue_generation", b"{}", False),
    ],
)
def test_calls_that_leave_sglang_cold(path: str, body: bytes, cold: bool) -> None:
    assert SGLANG.goes_cold(path, "", body) is cold


def test_actions_in_each_engines_spelling() -> None:
    (pause,) = VLLM.calls("pause", {"mode": "keep"})
    assert (pause.method, pause.path, pause.query) == ("POST", "/pause", "mode=keep")
    (pause,) = SGLANG.calls("pause", {"mode": "keep"})
    assert (pause.path, msgspec.json.decode(pause.body or b"")) == ("/pause_generation", {"mode": "in_place"})
    (abort,) = VLLM.calls("abort", {"ids": "a,b"})
    assert msgspec.json.decode(abort.body or b"") == {"request_ids": ["a", "b"]}
    assert [call.body for call in SGLANG.calls("abort", {"ids": "a,b"})] == [b'{"rid":"a"}', b'{"rid":"b"}']
    (abort,) = SGLANG.calls("abort_all", {})
    assert msgspec.json.decode(abort.body or b"") == {"abort_all": True}


def test_sglang_flushes_after_a_pause_only_when_asked_to() -> None:
    assert [call.path for call in SGLANG.calls("pause", {"clear_cache": "true"})] == [
        "/pause_generation",
        "/flush_cache",
    ]
    assert [call.path for call in SGLANG.calls("pause", {"clear_cache": "false"})] == ["/pause_generation"]


def test_vllm_tells_a_pause_only_where_its_path_is_there() -> None:
    assert VLLM.paused(200, b'{"is_paused":true}', was_healthy=True) is True
    assert VLLM.paused(200, b'{"is_paused":false}', was_healthy=True) is False
    assert VLLM.paused(404, b'{"detail":"Not Found"}', was_healthy=True) is None
    assert VLLM.paused(200, b"<html>", was_healthy=True) is None


def test_sglang_not_ready_is_a_pause_only_if_it_was_healthy() -> None:
    assert SGLANG.paused(200, b"", was_healthy=True) is False
    assert SGLANG.paused(503, b"", was_healthy=True) is True
    assert SGLANG.paused(503, b"", was_healthy=False) is None
    assert SGLANG.paused(404, b"", was_healthy=True) is None


def test_vllm_names_its_publishers_by_rank() -> None:
    body = (
        b'{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":'
        b'"tcp://127.0.0.1:5657","buffer_steps":10000,"topic":"kv"},"1":{"enable_kv_cache_events":true,"publisher":'
        b'"zmq","endpoint":"tcp://*:5558","replay_endpoint":null,"topic":"kv"}}'
    )
    first, second = VLLM.kv_sources(body, "10.0.0.7")
    assert (first.rank, first.endpoint, first.replay_endpoint, first.topic) == (
        0,
        "tcp://10.0.0.7:5557",
        "tcp://127.0.0.1:5657",
        "kv",
    )
    assert (second.rank, second.endpoint, second.replay_endpoint) == (1, "tcp://10.0.0.7:5558", None)


@pytest.mark.parametrize("body", [b"{}", b"[]", b"not json", b'{"0":{"publisher":"null","endpoint":"tcp://*:1"}}'])
def test_no_publisher_means_no_source(body: bytes) -> None:
    assert VLLM.kv_sources(body, "h") == []


def test_sglang_gives_a_base_port_and_the_number_of_ranks() -> None:
    body = (
        b'{"model_path":"m","kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"topic":"",'
        b'"block_size":64,"dp_size":2,"replay_endpoint_port_base":5600},"internal_states":[{}]}'
    )
    sources = SGLANG.kv_sources(body, "2001:db8::1")
    assert [source.endpoint for source in sources] == ["tcp://[2001:db8::1]:5557", "tcp://[2001:db8::1]:5558"]
    assert [source.replay_endpoint for source in sources] == ["tcp://[2001:db8::1]:5600", "tcp://[2001:db8::1]:5601"]
    assert SGLANG.kv_sources(b'{"kv_events":null}', "h") == []


def test_sglang_without_metrics_tells_its_load() -> None:
    body = (
        b'{"loads":[{"dp_rank":0,"num_running_reqs":1,"num_waiting_reqs":2,"max_total_num_tokens":100,"token_usage":0.5,'
        b'"gen_throughput":1.0},{"dp_rank":1,"num_running_reqs":3,"num_waiting_reqs":0,"max_total_num_tokens":100,'
        b'"token_usage":0.0}]}'
    )
    reading = SGLANG.read_loads(body)
    assert reading is not None
    assert (reading.running, reading.waiting, reading.kv_capacity_tokens, reading.kv_used_fraction) == (4, 2, 200, 0.25)
    assert reading.prompt_tokens_total is None
    assert SGLANG.read_loads(b'{"loads":[]}') is None


@pytest.mark.parametrize(
    ("endpoint", "reachable"),
    [
        ("tcp://*:5557", "tcp://h:5558"),
        ("tcp://0.0.0.0:5557", "tcp://h:5558"),
        ("tcp://[::]:5557", "tcp://h:5558"),
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
        ("ipc:///tmp/kv", "ipc:///tmp/kv"),
        ("inproc://kv", None),
        ("tcp://*:0", None),
        ("tcp://nonsense", None),
        ("", None),
    ],
)
def test_wildcards_become_the_replicas_host(endpoint: str, reachable: str | None) -> None:
    assert reachable_endpoint(endpoint, "h", port_offset=1) == reachable


def test_configured_endpoints_are_moved_by_rank() -> None:
    first, second = configured_kv_sources("tcp://*:5557, tcp://*:5600", "h", 2)
    assert (first.endpoint, first.replay_endpoint) == ("tcp://h:5557", "tcp://h:5600")
    assert (second.endpoint, second.replay_endpoint) == ("tcp://h:5558", "tcp://h:5601")
    assert configured_kv_sources("tcp://*:5557", "h", 1)[0].replay_endpoint is None
