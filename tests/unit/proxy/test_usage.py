"""What an exchange cost, from the bytes that passed, in whatever pieces they came."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.proxy.seam import RequestHead
from tidegate.proxy.tokens import TokenRatios
from tidegate.proxy.usage import MAX_KEPT_BYTES, PROGRESS_TOKENS, Usage, UsageMeter

JSON = [(b"Content-Type", b"application/json")]
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]


class Watch:
    """Stands for the driver: a clock that stands still, and who is to blame for an abort."""

    def __init__(self, blame_replicas: bool = True) -> None:
        self.ratios = TokenRatios()
        self.progress: list[int] = []
        self.blame_replicas = blame_replicas

    def now_s(self) -> float:
        return 5.0

    def progressed(self, meter: UsageMeter, completion_tokens: int) -> None:
        self.progress.append(completion_tokens)

    def aborts_are_the_replicas(self, meter: UsageMeter) -> bool:
        return self.blame_replicas


def meter_of(path: str = "/v1/completions", watch: Watch | None = None, request_bytes: int = 1000) -> UsageMeter:
    meter = UsageMeter(RequestHead("POST", path.encode(), [], request_bytes), watch or Watch())
    meter.request_body(b"x" * request_bytes)
    return meter


def relay(
    meter: UsageMeter, body: bytes, headers: Any = JSON, pieces: list[int] | None = None, status: int = 200
) -> str:
    """The last verdict that counts: of the first `pass` or `retry`, or of the end."""
    verdict: str = meter.response_head(status, headers)
    for start, end in zip([0, *(pieces or [])], [*(pieces or []), len(body)], strict=True):
        if start < end:
            said = meter.response_body(body[start:end])
            verdict = said if verdict == "wait" else verdict
            if verdict == "retry":
                return verdict
    said = meter.response_end()
    return said if verdict == "wait" else verdict


def events(*objects: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(o).encode() + b"\n\n" for o in objects) + b"data: [DONE]\n\n"


OPENAI = {"prompt_tokens": 120, "completion_tokens": 30, "total_tokens": 150}
CACHED = {**OPENAI, "prompt_tokens_details": {"cached_tokens": 96}}
RESPONSES = {
    "input_tokens": 120,
    "input_tokens_details": {"cached_tokens": 96},
    "output_tokens": 30,
    "output_tokens_details": {"reasoning_tokens": 7},
    "total_tokens": 150,
}
ANTHROPIC = {"input_tokens": 20, "output_tokens": 30, "cache_read_input_tokens": 96, "cache_creation_input_tokens": 4}
SGLANG = {"id": "x", "finish_reason": {"type": "stop"}, "prompt_tokens": 120, "completion_tokens": 30}
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


# --- aborts before any text ------------------------------------------------------------------------------------------
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


def test_a_reply_too_deep_to_decode_is_estimated() -> None:
    assert relay(meter_of(), b'{"a":' + b"[" * 16_000) == "pass"
