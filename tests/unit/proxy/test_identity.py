"""Who a request is: the order of places that may name its session, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.errors import InvalidBody, InvalidSession
from tidegate.proxy.identity import INFERENCE_PATHS, SESSION_HEADERS, Identifier, Identity
from tidegate.proxy.seam import RequestHead

CHAT = b"/v1/chat/completions"


def head(headers: dict[str, str] | None = None, method: str = "POST", path: bytes = CHAT) -> RequestHead:
    lines = [(name.encode("latin-1"), value.encode()) for name, value in (headers or {}).items()]
    return RequestHead(method, path, lines, 100)


def identify(headers: dict[str, str] | None = None, body: Any = None, path: bytes = CHAT, **options: Any) -> Identity:
    """As the driver does: the body only if it is wanted."""
    identifier, asked = Identifier(**options), head(headers, path=path)
    data = body if isinstance(body, bytes) else json.dumps(body if body is not None else {"prompt": "x"}).encode()
    wanted = identifier.wants_body(asked)
    return identifier.identify(asked, data if wanted else None)


def test_headers_are_looked_at_in_the_documented_order() -> None:
    names = [name.decode() for name in SESSION_HEADERS]
    for first in range(len(names)):
        backwards = {name: f"by {name}" for name in reversed(names[first:])}
        assert identify(backwards).session == f"by {names[first]}"


@pytest.mark.parametrize("name", ["X-Session-ID", "x_session_id", "X_SESSION-Id", "x-smg-routing-key", "thread_id"])
def test_case_and_underscores_of_a_header_do_not_matter(name: str) -> None:
    assert identify({name: "s"}).session == "s"


def test_configured_headers_come_first() -> None:
    found = identify({"X-Session-ID": "builtin", "My_Rollout": "own"}, session_headers=("my-rollout",))
    assert found.session == "own"


def test_a_request_id_is_never_a_session_even_if_configured() -> None:
    assert identify({"X-Request-ID": "r"}).session is None
    assert identify({"X-Request-ID": "r"}, session_headers=("x-request-id",)).session is None


def test_the_first_of_two_headers_of_one_name_counts() -> None:
    twice = RequestHead("POST", CHAT, [(b"X-Session-ID", b"first"), (b"x-session-id", b"second")], 1)
    assert Identifier().identify(twice, None).session == "first"


def test_an_empty_header_names_nothing() -> None:
    assert identify({"X-Session-ID": "  ", "thread-id": "t"}).session == "t"


BODY_PLACES: list[dict[str, Any]] = [
    {"session_id": "s"},
    {"session_params": {"session_id": "s"}},
    {"session_params": {"id": "s"}},
    {"vllm_xargs": {"session_id": "s"}},
    {"vllm_xargs": {"agentic_context": {"session_id": "s", "program_id": "p"}}},
    {"vllm_xargs": {"agentic_context": {"program_id": "s"}}},
    {"vllm_xargs": {"agentic_context": "s"}},
    {"program_id": "s"},
    {"metadata": {"session_id": "s"}},
]


@pytest.mark.parametrize("body", BODY_PLACES, ids=lambda body: json.dumps(body)[:40])
@pytest.mark.parametrize("path", sorted(INFERENCE_PATHS))
def test_bodies_name_the_session_on_every_inference_path(path: str, body: dict[str, Any]) -> None:
    assert identify(body={"prompt": [1, 2, 3], **body}, path=path.encode()).session == "s"


def test_places_in_a_body_are_looked_at_in_the_documented_order() -> None:
    everything: dict[str, Any] = {
        "metadata": {"session_id": "metadata"},
        "program_id": "program_id",
        "vllm_xargs": {"agentic_context": {"session_id": "context"}, "session_id": "xargs"},
        "session_params": {"id": "params.id", "session_id": "params.session_id"},
        "session_id": "session_id",
    }
    found = []
    for drop in (
        lambda: everything.pop("session_id"),
        lambda: everything["session_params"].pop("session_id"),
        lambda: everything.pop("session_params"),
        lambda: everything["vllm_xargs"].pop("session_id"),
        lambda: everything.pop("vllm_xargs"),
        lambda: everything.pop("program_id"),
        lambda: everything.pop("metadata"),
    ):
        found.append(identify(body=everything).session)
        drop()
    assert found == ["session_id", "params.session_id", "params.id", "xargs", "context", "program_id", "metadata"]
    assert identify(body=everything).session is None


def test_user_names_the_session_only_if_switched_on() -> None:
    assert identify(body={"user": "u"}).session is None
    assert identify(body={"user": "u"}, user_is_session=True).session == "u"


def test_a_numbered_session_is_text_and_a_boolean_none() -> None:
    assert identify(body={"session_id": 12}).session == "12"
    assert identify(body={"session_id": True}).session is None


@pytest.mark.parametrize("odd", [None, [], 1.5, {"a": 1}, "", [{"session_id": "x"}]])
def test_keys_of_other_shapes_name_nothing_and_break_nothing(odd: Any) -> None:
    body = dict.fromkeys(("session_id", "session_params", "vllm_xargs", "program_id", "metadata", "user"), odd)
    body["sampling_params"] = odd
    assert identify(body=body, user_is_session=True) == Identity(None, None, None)


def test_class_and_group_come_from_headers_and_else_from_the_body_that_was_read() -> None:
    headers = {"X-Session-ID": "s", "X-Workload-Class": "agentic", "X_Group_ID": "g"}
    assert identify(headers) == Identity("s", "agentic", "g", in_own_header=True)
    for place in ("vllm_xargs", "metadata"):
        found = identify(body={place: {"workload_class": "rlvr", "group_id": 7, "session_id": "s"}})
        assert found == Identity("s", "rlvr", "7")
    found = identify(body={"sampling_params": {"extra_args": {"workload_class": "rlhf", "group_id": "g"}}})
    assert found == Identity(None, "rlhf", "g")
    assert identify({"X-Workload-Class": "header"}, {"metadata": {"workload_class": "body"}}).workload == "header"


def test_a_body_is_not_wanted_when_a_header_names_the_session() -> None:
    assert not Identifier().wants_body(head({"X-Session-ID": "s"}))
    assert Identifier().wants_body(head())
    assert not Identifier(read_bodies=False).wants_body(head())


def test_a_compressed_body_is_left_alone() -> None:
    compressed = {"Content-Encoding": "gzip"}
    assert not Identifier().wants_body(head(compressed))
    # a policy may have wanted the bytes for its own ends: they are still not ours to decode
    assert Identifier().identify(head(compressed), b"\x1f\x8b\x00").session is None


@pytest.mark.parametrize("value", ["true", "True", " 1 "])
def test_the_final_header_marks_the_last_request(value: str) -> None:
    assert identify({"x-dynamo-session-id": "s", "x-dynamo-session-final": value}).final
    assert not identify({"x-dynamo-session-id": "s", "x-dynamo-session-final": "false"}).final


@pytest.mark.parametrize("session", ["x" * 257, "é" * 129, "a\tb", "a\x7fb", "a\x85b"])
@pytest.mark.parametrize("place", ["header", "body"])
def test_long_ids_and_control_characters_are_refused(session: str, place: str) -> None:
    with pytest.raises(InvalidSession) as refused:
        identify({"X-Session-ID": session}) if place == "header" else identify(body={"session_id": session})
    assert (refused.value.status, refused.value.reason) == (400, "invalid_session_id")


@pytest.mark.parametrize("session", ["x" * 256, "é" * 128, "with space", "日本語"])
def test_any_other_text_up_to_256_bytes_is_an_id(session: str) -> None:
    assert identify({"X-Session-ID": session}).session == session
    assert identify(body={"session_id": session}).session == session


def test_a_bad_class_or_group_is_refused_under_its_own_reason() -> None:
    with pytest.raises(InvalidSession) as refused:
        identify({"X-Workload-Class": "x" * 300})
    assert refused.value.reason == "invalid_workload_class"
    with pytest.raises(InvalidSession) as refused:
        identify({"X-Group-ID": "a\x01"})
    assert refused.value.reason == "invalid_group_id"


def test_header_bytes_that_are_not_utf_8_are_taken_byte_by_byte() -> None:
    found = Identifier().identify(RequestHead("POST", CHAT, [(b"X-Session-ID", b"\xe9")], 1), None)
    assert found.session == "é"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b'{"a": 1} x', b"\xff"])
def test_a_body_that_had_to_be_read_and_is_no_json_object_is_refused(body: bytes) -> None:
    for headers in ({}, {"Content-Type": "application/json; charset=utf-8"}):
        with pytest.raises(InvalidBody) as refused:
            identify(headers, body)
        assert (refused.value.status, refused.value.reason) == (400, "invalid_json")


def test_a_body_that_does_not_claim_to_be_json_is_the_replicas_to_judge() -> None:
    assert identify({"Content-Type": "multipart/form-data; boundary=x"}, b"--x").session is None


def test_an_unread_body_is_never_judged() -> None:
    assert identify({"X-Session-ID": "s"}, b"{").session == "s"


def test_a_spelling_remembered_for_one_name_does_not_leak_to_another() -> None:
    identifier = Identifier()
    for number in range(10_000):  # more names than are remembered
        identifier.identify(head({f"x-noise-{number}": "n"}), None)
    assert identifier.identify(head({"X-sEsSiOn-Id": "s", "X-Session": "no"}), None).session == "s"


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"user":' + b"[" * 200_000])
def test_a_body_too_deep_to_decode_is_the_clients_fault(body: bytes) -> None:
    with pytest.raises(InvalidBody):
        identify(body=body)
