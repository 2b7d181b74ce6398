"""What an exchange cost, from the bytes that passed, in whatever pieces they came."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.proxy.metering import (
    ANTHROPIC,
    CACHED,
    JSON,
    OPENAI,
    RESPONSES,
    SGLANG,
    SSE,
    Watch,
    events,
    meter_of,
    relay,
)

from tidegate.proxy.usage import MAX_KEPT_BYTES, PROGRESS_TOKENS, Usage

BIG = {"content": [{"token": "prompt_tokens", "top_logprobs": [{"_tokens": -1.5, "usage": -2}]}] * 400}

SHAPES: dict[str, tuple[str, Any, Usage]] = {
    "chat": (
        "/v1/chat/completions",
        {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": CACHED},
        Usage(120, 30, 96, False),
    ),
    "completions without details": (
        "/v1/completions",
        {"choices": [{"text": "x", "finish_reason": "length"}], "usage": {**OPENAI, "prompt_tokens_details": None}},
        Usage(120, 30, None, False),
    ),
    "usage before a long prompt_token_ids": (
        "/v1/chat/completions",
        {"choices": [{"message": {"content": "x"}}], "usage": CACHED, "prompt_token_ids": list(range(9000))},
        Usage(120, 30, 96, False),
    ),
    "log probabilities of 40 KB": (
        "/v1/chat/completions",
        {"choices": [{"message": {"content": "x"}, "logprobs": BIG, "finish_reason": "stop"}], "usage": CACHED},
        Usage(120, 30, 96, False),
    ),
    "responses": (
        "/v1/responses",
        {"status": "completed", "max_output_tokens": 999, "output": [{"type": "message"}], "usage": RESPONSES},
        Usage(120, 30, 96, False),
    ),
    "messages": (
        "/v1/messages",
        {"type": "message", "content": [{"text": "x"}], "stop_reason": "end_turn", "usage": ANTHROPIC},
        Usage(120, 30, 96, False),
    ),
    "generate of vLLM": (
        "/inference/v1/generate",
        {"choices": [{"token_ids": list(range(30)), "finish_reason": "stop"}], "usage": CACHED},
        Usage(120, 30, 96, False),
    ),
    "generate of SGLang": (
        "/generate",
        {"text": "x", "meta_info": {**SGLANG, "cached_tokens": 96}},
        Usage(120, 30, 96, False),
    ),
    "generate of SGLang, logprobs before the counts": (
        "/generate",
        {"meta_info": {"output_token_logprobs": [[-0.5, 17, None]] * 3000, **SGLANG, "cached_tokens": 96}},
        Usage(120, 30, 96, False),
    ),
    "generate of SGLang, a batch": (
        "/generate",
        [{"text": "x", "meta_info": {**SGLANG, "cached_tokens": 96}}] * 3,
        Usage(360, 90, 288, False),
    ),
}

STREAMS: dict[str, tuple[str, bytes, Usage]] = {
    "chat with include_usage": (
        "/v1/chat/completions",
        events({"choices": [{"delta": {"content": "a"}}], "usage": None}, {"choices": [], "usage": CACHED}),
        Usage(120, 30, 96, False),
    ),
    "continuous usage": (
        "/v1/completions",
        events(*({"choices": [{"text": "a"}], "usage": {**CACHED, "completion_tokens": n}} for n in (1, 2, 30))),
        Usage(120, 30, 96, False),
    ),
    "responses": (
        "/v1/responses",
        events(
            {"type": "response.created", "response": {"usage": None, "max_output_tokens": 999}},
            {"type": "response.output_text.delta", "delta": "prompt_tokens"},
            {"type": "response.completed", "response": {"usage": RESPONSES}},
        ),
        Usage(120, 30, 96, False),
    ),
    "messages": (
        "/v1/messages",
        events(
            {"type": "message_start", "message": {"usage": {**ANTHROPIC, "output_tokens": 0}}},
            {"type": "content_block_delta", "delta": {"text": "x"}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 30}},
        ),
        Usage(120, 30, 96, False),
    ),
    "SGLang, cumulative": (
        "/generate",
        events(*({"text": "x", "meta_info": {**SGLANG, "completion_tokens": n}} for n in (1, 2, 30))),
        Usage(120, 30, None, False),
    ),
}


@pytest.mark.parametrize("spaced", [True, False], ids=["spaced", "compact"])
@pytest.mark.parametrize("shape", SHAPES)
def test_usage_of_a_whole_reply(shape: str, spaced: bool) -> None:
    path, reply, usage = SHAPES[shape]
    body = json.dumps(reply, separators=(", ", ": ") if spaced else (",", ":")).encode()
    for headers in (JSON, [*JSON, (b"Content-Length", str(len(body)).encode())]):
        meter = meter_of(path)
        assert relay(meter, body, headers) == "pass"
        assert meter.usage() == usage
        assert not meter.aborted


@pytest.mark.parametrize("shape", STREAMS)
def test_usage_of_a_stream(shape: str) -> None:
    path, body, usage = STREAMS[shape]
    meter = meter_of(path)
    assert relay(meter, body, SSE) == "pass"
    assert meter.usage() == usage


ALL = {**{k: (p, json.dumps(r).encode(), JSON, u) for k, (p, r, u) in SHAPES.items()}}
ALL |= {f"stream {k}": (p, b, SSE, u) for k, (p, b, u) in STREAMS.items()}


@given(shape=st.sampled_from(sorted(ALL)), data=st.data())
def test_usage_does_not_depend_on_how_the_bytes_are_cut(shape: str, data: st.DataObject) -> None:
    path, body, headers, usage = ALL[shape]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    if len(body) < 2000 and data.draw(st.booleans()):
        cuts = list(range(1, len(body)))
    meter = meter_of(path)
    assert relay(meter, body, headers, cuts) == "pass"
    assert meter.usage() == usage


@given(cut=st.integers(0, 6000), size=st.integers(4000, 6000))
def test_a_count_cut_by_a_large_chunk_is_whole_and_counted_once(cut: int, size: int) -> None:
    """Around the size from which chunks are no longer joined to the carry."""
    item = {"meta_info": {"pad": "p" * size, "prompt_tokens": 1234567, "completion_tokens": 89, "cached_tokens": 5}}
    body = json.dumps([item, item, item]).encode()
    meter = meter_of("/generate")
    relay(meter, body, JSON, sorted({min(cut + n * 4097, len(body)) for n in range(4)}))
    assert meter.usage() == Usage(3 * 1234567, 3 * 89, 15, False)


def test_text_that_looks_like_usage_is_not_usage() -> None:
    tricky = 'x "usage": {"prompt_tokens": 1, "completion_tokens": 2} "cached_tokens": 3'
    reply = {
        "usage": CACHED,
        "choices": [{"message": {"content": tricky}, "finish_reason": "stop"}],
        "pad": "p" * 20000,
    }
    meter = meter_of()
    relay(meter, json.dumps(reply).encode())
    assert meter.usage() == Usage(120, 30, 96, False)


def test_ids_are_counted_where_there_is_no_usage() -> None:
    path = "/inference/v1/generate"
    for body, headers in (
        (json.dumps({"choices": [{"token_ids": list(range(17))}, {"token_ids": [1]}]}).encode(), JSON),
        (events({"choices": [{"token_ids": [1, 2]}]}, {"choices": [{"token_ids": list(range(16))}]}), SSE),
        (events({"prompt_token_ids": [1, 2, 3], "choices": [{"token_ids": list(range(18))}, {"token_ids": []}]}), SSE),
    ):
        for pieces in ([], list(range(1, len(body)))):
            meter = meter_of(path)
            relay(meter, body, headers, pieces)
            usage = meter.usage()
            assert (usage.completion_tokens, usage.estimated) == (18, True)


def test_a_stream_without_usage_is_estimated_from_its_events() -> None:
    meter = meter_of()
    relay(meter, events(*({"choices": [{"text": "a"}]} for _ in range(40))), SSE)
    usage = meter.usage()
    assert usage.estimated
    assert usage.completion_tokens == 41  # [DONE] is an event too
    assert usage.prompt_tokens == 200  # of 1000 bytes


def test_a_compressed_reply_is_estimated_and_not_looked_into() -> None:
    body = gzip.compress(json.dumps(SHAPES["chat"][1]).encode())
    meter = meter_of("/v1/chat/completions")
    assert relay(meter, body, [*JSON, (b"Content-Encoding", b"gzip")]) == "pass"
    usage = meter.usage()
    assert usage.estimated
    assert usage.completion_tokens
    assert usage.cached_tokens is None


def test_an_error_reply_teaches_nothing() -> None:
    meter = meter_of()
    assert meter.response_head(400, JSON) == "pass"
    meter.response_body(b'{"error": {"message": "prompt too long"}}')
    meter.response_end()
    assert meter.usage() == Usage(None, None, None, True)


def test_a_stream_that_breaks_is_counted_up_to_the_break() -> None:
    meter = meter_of()
    meter.response_head(200, SSE)
    meter.response_body(events(*({"choices": [{"text": "a"}]} for _ in range(9))))
    assert meter.usage().completion_tokens == 10


def test_prompt_lengths_are_learned_per_path_and_size() -> None:
    watch = Watch()
    for _ in range(60):
        meter = meter_of("/v1/completions", watch, request_bytes=6000)
        relay(meter, json.dumps({"usage": {"prompt_tokens": 1000, "completion_tokens": 1}}).encode())
        meter.usage()
    assert watch.ratios.estimate("/v1/completions", 6000) == 1000
    assert watch.ratios.estimate("/v1/completions", None) == 1000
    assert watch.ratios.estimate("/v1/chat/completions", 6000) == 1200  # another path keeps its prior
    assert watch.ratios.estimate("/v1/chat/completions", 0) == 1


def test_a_growing_stream_reports_at_a_bounded_rate() -> None:
    watch = Watch()
    meter = meter_of(watch=watch)
    meter.response_head(200, SSE)
    for _ in range(1000):
        meter.response_body(b'data: {"choices": [{"text": "a"}]}\n\n')
    assert watch.progress == [PROGRESS_TOKENS * n for n in range(1, 1000 // PROGRESS_TOKENS + 1)]


def test_the_load_report_of_the_replica_is_kept() -> None:
    meter = meter_of()
    meter.response_head(200, [*JSON, (b"Endpoint-Load-Metrics", b"TEXT x=1")])
    assert meter.load_report == b"TEXT x=1"


def test_a_reply_too_deep_to_decode_is_estimated() -> None:
    assert relay(meter_of(), b'{"a":' + b"[" * 16_000) == "pass"


# --- counts that cannot be -------------------------------------------------------------------------------------------
IMPLAUSIBLE = {
    "negative": {"prompt_tokens": -5, "completion_tokens": -1},
    "absurd": {"prompt_tokens": 10**11, "completion_tokens": 10**11},
    "beyond 64 bits": {"prompt_tokens": 10**30, "completion_tokens": 10**30},
    "text": {"prompt_tokens": "120", "completion_tokens": "30"},
    "fractions": {"prompt_tokens": 120.5, "completion_tokens": 30.5},
    "booleans": {"prompt_tokens": True, "completion_tokens": False},
    "objects": {"prompt_tokens": {"a": 1}, "completion_tokens": [1]},
    "null": {"prompt_tokens": None, "completion_tokens": None},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", IMPLAUSIBLE)
def test_counts_that_cannot_be_are_not_believed(kind: str, stream: bool) -> None:
    watch = Watch()
    meter = meter_of(watch=watch)
    reply = {"choices": [{"text": "some", "finish_reason": "stop"}], "usage": IMPLAUSIBLE[kind]}
    relay(meter, events(reply) if stream else json.dumps(reply).encode(), SSE if stream else JSON)
    usage = meter.usage()
    assert usage.estimated
    assert usage.prompt_tokens == 200  # of 1000 bytes, by the prior: nothing was learned
    assert usage.completion_tokens is not None
    assert 0 <= usage.completion_tokens < 100
    assert watch.ratios.estimate("/v1/completions", 1000) == 200


@pytest.mark.parametrize("cached", [121, -1, 10**11])
@pytest.mark.parametrize("padding", [0, 2 * MAX_KEPT_BYTES], ids=["decoded", "scanned"])
def test_more_cached_than_there_was_to_find_is_unknown(cached: int, padding: int) -> None:
    meter = meter_of()
    usage = {**OPENAI, "prompt_tokens_details": {"cached_tokens": cached}}
    relay(meter, json.dumps({"choices": [{"text": "x" * padding}], "usage": usage}).encode())
    assert meter.usage() == Usage(120, 30, None, False)
    assert meter.implausible or cached < 0  # a scan sees digits only


def test_a_batch_may_count_as_many_tokens_as_it_has_bytes() -> None:
    meter = meter_of(request_bytes=40_000_000)
    relay(meter, json.dumps({"usage": {"prompt_tokens": 30_000_000, "completion_tokens": 3}}).encode())
    assert meter.usage() == Usage(30_000_000, 3, None, False)
    assert not meter.implausible


def test_a_stream_does_not_grow_by_what_cannot_be() -> None:
    watch = Watch()
    meter = meter_of(watch=watch)
    meter.response_head(200, SSE)
    event = b'data: {"choices":[{"text":"a"}],"usage":{"completion_tokens":99999999999}}\n\n'
    for _ in range(2 * PROGRESS_TOKENS):
        meter.response_body(event)
    assert watch.progress
    assert max(watch.progress) <= 2 * PROGRESS_TOKENS
