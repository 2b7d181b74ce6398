"""What goes on from what: prompts and replies of every path, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.server.conversation import prompt_of
from tidegate.server.lineage import Sequence
from tidegate.server.replies import replies_of

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}
USER = {"role": "user", "content": "hello"}


def prompt(path: str, body: Any) -> Sequence:
    found = prompt_of(path, json.dumps(body).encode())
    assert found is not None
    return found


def sse(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def chunks(*deltas: Any, index: int = 0) -> list[Any]:
    return [{"choices": [{"index": index, "delta": delta}]} for delta in deltas]


TURNS: dict[str, tuple[str, Any, bytes, Any]] = {
    # path, first body, reply, second body
    "generate": (
        GENERATE,
        {"token_ids": [1, 2]},
        json.dumps({"choices": [{"token_ids": [3, 4]}]}).encode(),
        {"token_ids": [1, 2, 3, 4, 5]},
    ),
    "generate stream": (
        GENERATE,
        {"token_ids": [1, 2]},
        sse({"choices": [{"token_ids": [3]}]}, {"choices": [{"token_ids": [4]}]}, {"choices": [], "usage": {}}),
        {"token_ids": [1, 2, 3, 4, 5]},
    ),
    "completions of ids": (
        COMPLETIONS,
        {"prompt": [1, 2]},
        json.dumps({"choices": [{"text": "x", "token_ids": [3]}]}).encode(),
        {"prompt": [1, 2, 3, 9]},
    ),
    "completions of text": (
        COMPLETIONS,
        {"prompt": "Once"},
        json.dumps({"choices": [{"text": " upon ü"}]}).encode(),
        {"prompt": "Once upon ü a time"},
    ),
    "completions stream": (
        COMPLETIONS,
        {"prompt": "Once"},
        sse({"choices": [{"index": 0, "text": " up"}]}, {"choices": [{"index": 0, "text": "on"}]}),
        {"prompt": "Once upon a time"},
    ),
    "sglang ids": ("/generate", {"input_ids": [1]}, b'{"text":"x","output_ids":[2]}', {"input_ids": [1, 2, 3]}),
    "sglang text": ("/generate", {"text": "a"}, b'{"text":"b","output_ids":[2]}', {"text": "abc"}),
    "sglang stream": (
        "/generate",
        {"input_ids": [1]},
        sse({"text": "x", "output_ids": [2]}, {"text": "xy", "output_ids": [2, 3]}),
        {"input_ids": [1, 2, 3, 4]},
    ),
    "chat": (
        CHAT,
        {"messages": [USER]},
        json.dumps({"choices": [{"message": {"role": "assistant", "content": "hi", "refusal": None}}]}).encode(),
        {"messages": [USER, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]},
    ),
    "chat in parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
        json.dumps({"choices": [{"message": {"content": "hi", "reasoning_content": "hm"}}]}).encode(),
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}, USER]},
    ),
    "chat with a call": (
        CHAT,
        {"messages": [USER]},
        json.dumps({"choices": [{"message": {"content": None, "tool_calls": [CALL]}}]}).encode(),
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{**CALL, "id": "other"}]},
                {"role": "tool", "tool_call_id": "other", "content": "x"},
            ]
        },
    ),
    "chat stream": (
        CHAT,
        {"messages": [USER]},
        sse(*chunks({"role": "assistant", "content": ""}, {"content": "h"}, {"content": "i"}, {})),
        {"messages": [USER, {"role": "assistant", "content": "hi"}, USER]},
    ),
    "chat stream with a call": (
        CHAT,
        {"messages": [USER]},
        sse(
            *chunks(
                {"role": "assistant"},
                {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "ls", "arguments": '{"a"'}}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
            )
        ),
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, USER]},
    ),
    "messages": (
        "/v1/messages",
        {"system": "be brief", "messages": [USER]},
        json.dumps(
            {"content": [{"type": "text", "text": "hi"}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
        ).encode(),
        {
            "system": "be brief",
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "hi"},
                        {"type": "tool_use", "id": "t", "name": "f", "input": {}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]},
            ],
        },
    ),
    "messages stream": (
        "/v1/messages",
        {"messages": [USER]},
        sse(
            {"type": "message_start", "message": {}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "h"}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "i"}},
            {
                "type": "content_block_start",
                "index": 1,
                "content_block": {"type": "tool_use", "name": "f", "input": {}},
            },
            {
                "type": "content_block_delta",
                "index": 1,
                "delta": {"type": "input_json_delta", "partial_json": '{"a":1}'},
            },
        ),
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "hi"}, {"type": "tool_use", "name": "f", "input": {"a": 1}}],
                },
                USER,
            ]
        },
    ),
    "responses": (
        "/v1/responses",
        {"input": "hello"},
        json.dumps(
            {
                "output": [
                    {"type": "reasoning", "content": []},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                ]
            }
        ).encode(),
        {
            "input": [
                USER,
                {"role": "assistant", "content": "hi"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ]
        },
    ),
    "responses stream": (
        "/v1/responses",
        {"input": [USER]},
        sse(
            {"type": "response.created", "response": {"output": []}},
            {
                "type": "response.completed",
                "response": {"output": [{"type": "message", "role": "assistant", "content": "hi"}]},
            },
        ),
        {"input": [USER, {"role": "assistant", "content": "hi"}, USER]},
    ),
}


@pytest.mark.parametrize("turn", TURNS)
def test_a_second_turn_goes_on_from_the_first_and_its_reply(turn: str) -> None:
    path, first, reply, second = TURNS[turn]
    before, after = prompt(path, first), prompt(path, second)
    (added,) = replies_of(path, before.kind, reply)
    assert after.kind == before.kind
    assert after.data.startswith(before.data + added)
    assert len(after.data) > len(before.data + added)
    assert len(added) % before.unit_bytes == 0


def test_each_choice_is_a_reply() -> None:
    body = {"choices": [{"index": 1, "token_ids": [4]}, {"index": 0, "token_ids": [3]}]}
    assert len(replies_of(GENERATE, b"ids", json.dumps(body).encode())) == 2
    both = sse(*chunks({"content": "b"}, index=1), *chunks({"content": "a"}, index=0))
    assert len(replies_of(CHAT, b"chat", both)) == 2


def test_a_stream_that_was_cut_counts_up_to_the_cut() -> None:
    whole = sse({"choices": [{"token_ids": [3]}]}, {"choices": [{"token_ids": [4]}]})
    assert replies_of(GENERATE, b"ids", whole[:-30]) == [b"\x03\0\0\0"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {"token_ids": []}),
        (GENERATE, {"token_ids": [-1]}),
        (GENERATE, {"token_ids": ["a"]}),
        (GENERATE, {"token_ids": [2**40]}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (COMPLETIONS, {"prompt": [[1], [2]]}),
        (COMPLETIONS, {"prompt": ""}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": "hello"}),
        (CHAT, {}),
        ("/v1/responses", {"input": 3}),
        ("/generate", [1]),
    ],
)
def test_what_is_no_prompt_or_a_batch_is_nobodys_turn(path: str, body: Any) -> None:
    assert prompt_of(path, json.dumps(body).encode()) is None


def test_another_system_prompt_is_another_conversation() -> None:
    one, other = (prompt("/v1/messages", {"system": text, "messages": [USER]}) for text in ("a", "b"))
    assert one.kind != other.kind


def test_messages_differ_by_who_says_them_and_by_what_else_they_have() -> None:
    told = [
        {"role": "user", "content": "x"},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": "x", "name": "bob"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
    ]
    assert len({prompt(CHAT, {"messages": [message]}).data for message in told}) == len(told)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "content", "type", "text", "token_ids", "delta", "index", "output"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    JSON_VALUES,
    st.booleans(),
    st.sampled_from([CHAT, COMPLETIONS, GENERATE, "/generate", "/v1/messages", "/v1/responses"]),
)
def test_no_shape_of_a_reply_is_a_fault(value: Any, stream: bool, path: str) -> None:
    body = sse(value) if stream else json.dumps(value).encode()
    for kind in (b"ids", b"text", b"chat"):
        assert all(isinstance(reply, bytes) and reply for reply in replies_of(path, kind, body))


@given(st.binary(max_size=60))
def test_no_bytes_are_a_fault(body: bytes) -> None:
    assert replies_of(CHAT, b"chat", body) == []
    prompt_of(CHAT, body)


@given(JSON_VALUES, st.sampled_from(["messages", "input", "prompt", "token_ids", "input_ids", "text", "system"]))
def test_no_shape_of_a_prompt_is_a_fault(value: Any, key: str) -> None:
    for path in (CHAT, COMPLETIONS, GENERATE, "/generate", "/v1/messages", "/v1/responses"):
        prompt_of(path, json.dumps({key: value}).encode())
