"""Replies that say "aborted" before they say anything, and what is taken for one wrongly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.proxy.metering import ANTHROPIC, JSON, OPENAI, RESPONSES, SGLANG, SSE, Watch, events, meter_of, relay

from tidegate.proxy.usage import MAX_KEPT_BYTES

EMPTY_ABORTS: dict[str, tuple[str, Any]] = {
    "completions": ("/v1/completions", {"choices": [{"text": "", "finish_reason": "abort"}], "usage": OPENAI}),
    "chat": (
        "/v1/chat/completions",
        {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": []}, "finish_reason": "abort"}]},
    ),
    "generate": ("/inference/v1/generate", {"choices": [{"token_ids": [], "finish_reason": "abort"}]}),
    "responses": ("/v1/responses", {"status": "cancelled", "output": [], "usage": RESPONSES}),
    "messages": ("/v1/messages", {"type": "message", "content": [], "stop_reason": None, "usage": ANTHROPIC}),
}
EMPTY_ABORT_STREAMS: dict[str, tuple[str, bytes]] = {
    "done at once": ("/v1/completions", events()),
    "usage alone": ("/v1/completions", events({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 0}})),
    "done after a preamble": (
        "/v1/chat/completions",
        events({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}),
    ),
    "completions": ("/v1/completions", events({"choices": [{"text": "", "finish_reason": "abort"}]})),
    "chat": (
        "/v1/chat/completions",
        events(
            {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
            {"choices": [{"delta": {"content": ""}, "finish_reason": "abort"}]},
        ),
    ),
    "generate": ("/inference/v1/generate", events({"choices": [{"token_ids": [], "finish_reason": "abort"}]})),
    "messages": (
        "/v1/messages",
        b"event: message_start\n"
        + events(
            {"type": "message_start", "message": {"content": []}},
            {"type": "message_delta", "delta": {"stop_reason": None}},
        ),
    ),
}


@pytest.mark.parametrize("shape", EMPTY_ABORTS)
def test_an_abort_without_text_goes_to_another_replica(shape: str) -> None:
    path, reply = EMPTY_ABORTS[shape]
    for pieces in ([], [1, 20]):
        meter = meter_of(path)
        assert relay(meter, json.dumps(reply).encode(), JSON, pieces) == "retry"
        assert meter.wants_retry


@pytest.mark.parametrize("shape", EMPTY_ABORT_STREAMS)
def test_a_stream_that_begins_with_an_abort_goes_to_another_replica(shape: str) -> None:
    path, body = EMPTY_ABORT_STREAMS[shape]
    for pieces in ([], [3, 30], list(range(1, len(body)))):
        assert relay(meter_of(path), body, SSE, pieces) == "retry"


@pytest.mark.parametrize("shape", EMPTY_ABORTS)
def test_an_abort_that_somebody_asked_for_is_delivered(shape: str) -> None:
    path, reply = EMPTY_ABORTS[shape]
    meter = meter_of(path, Watch(blame_replicas=False))
    assert relay(meter, json.dumps(reply).encode()) == "pass"


def test_an_abort_call_that_comes_after_the_head_is_honoured_too() -> None:
    watch = Watch()
    meter = meter_of(watch=watch)
    assert meter.response_head(200, JSON) == "wait"
    meter.response_body(json.dumps(EMPTY_ABORTS["completions"][1]).encode())
    watch.blame_replicas = False
    assert meter.response_end() == "pass"


def test_what_a_first_replica_said_does_not_count_on_the_second() -> None:
    meter = meter_of()
    assert relay(meter, json.dumps(EMPTY_ABORTS["completions"][1]).encode()) == "retry"
    meter.begin_anew()
    assert relay(meter, events({"choices": [{"text": "a"}]}), SSE) == "pass"
    assert not meter.aborted
    assert not meter.wants_retry
    assert meter.usage().completion_tokens == 2


def test_an_abort_with_text_passes_and_is_not_taken_for_a_result() -> None:
    whole = {"choices": [{"text": "some", "finish_reason": "abort"}], "usage": OPENAI}
    for padding in ("", "p" * 2 * MAX_KEPT_BYTES):
        meter = meter_of()
        assert relay(meter, json.dumps({**whole, "pad": padding}).encode()) == "pass"
        meter.usage()
        assert meter.aborted
    stream = events({"choices": [{"text": "some"}]}, {"choices": [{"text": "", "finish_reason": "abort"}]})
    for pieces in ([], list(range(1, len(stream)))):
        meter = meter_of()
        assert relay(meter, stream, SSE, pieces) == "pass"
        meter.usage()
        assert meter.aborted


@pytest.mark.parametrize(
    "choice",
    [
        {"message": {"content": "abort"}, "finish_reason": "stop"},
        {"message": {"content": None, "tool_calls": [{"function": {"name": "abort"}}]}, "finish_reason": "abort"},
        {"message": {"content": "", "reasoning_content": "hm"}, "finish_reason": "abort"},
        {"text": "", "finish_reason": "stop"},
    ],
    ids=["text about it", "a tool call", "reasoning", "an honest empty reply"],
)
def test_what_is_not_an_empty_abort_passes(choice: dict[str, Any]) -> None:
    body = json.dumps({"choices": [choice], "usage": OPENAI}).encode()
    assert relay(meter_of("/v1/chat/completions"), body) == "pass"


@pytest.mark.parametrize("pieces", [[], [5], [20, 60]])
@pytest.mark.parametrize(
    "message",
    [
        "cannot schedule new futures after shutdown",
        "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    ],
)
def test_a_500_of_an_engine_that_has_ended_goes_to_another_replica(message: str, pieces: list[int]) -> None:
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    meter = meter_of("/v1/chat/completions")
    assert relay(meter, json.dumps({"error": error}).encode(), JSON, pieces, status=500) == "retry"


@pytest.mark.parametrize("body", [b"Internal Server Error", b'{"error": {"message": "boom"}}', b"", b"[1]"])
def test_any_other_500_passes(body: bytes) -> None:
    assert relay(meter_of("/v1/chat/completions"), body, JSON, status=500) == "pass"


def test_a_500_that_quotes_the_shutdown_passes() -> None:
    error = {"message": "prompt: cannot schedule new futures after shutdown", "code": 500}
    assert relay(meter_of(), json.dumps({"error": error}).encode(), status=500) == "pass"


def test_sglangs_answer_to_an_abort_call_passes() -> None:
    meta = {**SGLANG, "finish_reason": {"type": "abort", "message": "Abort by request"}, "completion_tokens": 0}
    meter = meter_of("/generate")
    assert relay(meter, json.dumps({"text": "", "meta_info": meta}).encode()) == "pass"
    assert meter.aborted


def test_pings_of_a_stream_are_not_kept_back() -> None:
    for ping in (b": ping\n\n", b'event: ping\ndata: {"type": "ping"}\n\n'):
        meter = meter_of("/v1/messages")
        assert meter.response_head(200, SSE) == "wait"
        assert meter.response_body(ping) == "pass"


def test_the_first_token_of_a_stream_is_not_kept_back() -> None:
    meter = meter_of("/v1/chat/completions")
    assert meter.response_head(200, SSE) == "wait"
    assert meter.response_body(b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n') == "wait"
    assert meter.response_body(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n') == "pass"


@given(st.binary(max_size=300), st.sampled_from([JSON, SSE]), st.sampled_from(sorted(EMPTY_ABORTS)))
def test_no_bytes_of_a_replica_break_the_meter(body: bytes, headers: Any, shape: str) -> None:
    meter = meter_of(EMPTY_ABORTS[shape][0])
    relay(meter, body, headers, [len(body) // 2])
    meter.usage()
