"""Control calls in one engine's words, and what they are in the other's."""

from __future__ import annotations

import pytest

from tidegate.engines.base import ControlCall
from tidegate.engines.detect import ADAPTERS
from tidegate.engines.dialects import understood


def told(path: str, query: str = "", body: bytes = b"") -> list[tuple[str, str, str, bytes | None]]:
    """What the engine that does not speak so is called with."""
    wish = understood(path, query, body)
    assert wish is not None
    (other,) = (adapter for name, adapter in ADAPTERS.items() if name != wish.spoken)
    return [(call.method, call.path, call.query, call.body) for call in other.calls(wish.action, wish.options)]


@pytest.mark.parametrize(
    ("path", "query", "body", "called"),
    [
        ("/pause", "", b"", [("POST", "/pause_generation", "", b'{"mode":"abort"}')]),
        ("/pause", "mode=wait", b"", [("POST", "/pause_generation", "", b'{"mode":"in_place"}')]),
        (
            "/pause",
            "mode=keep&clear_cache=true",
            b"",
            [("POST", "/pause_generation", "", b'{"mode":"in_place"}'), ("POST", "/flush_cache", "", None)],
        ),
        ("/resume", "", b"", [("POST", "/continue_generation", "", b"{}")]),
        ("/is_paused", "", b"", [("GET", "/ready", "", None)]),
        ("/reset_prefix_cache", "", b"", [("POST", "/flush_cache", "", None)]),
        ("/abort_requests", "", b"{}", [("POST", "/abort_request", "", b'{"abort_all":true}')]),
        ("/abort_requests", "", b'{"request_ids":["a"]}', [("POST", "/abort_request", "", b'{"rid":"a"}')]),
        ("/sleep", "level=1", b"", [("POST", "/release_memory_occupation", "", b"{}")]),
        ("/wake_up", "", b"", [("POST", "/resume_memory_occupation", "", b"{}")]),
    ],
)
def test_vllms_words_reach_sglang_in_its_own(
    path: str, query: str, body: bytes, called: list[tuple[str, str, str, bytes | None]]
) -> None:
    assert told(path, query, body) == called


@pytest.mark.parametrize(
    ("path", "body", "called"),
    [
        ("/pause_generation", b"", ("POST", "/pause", "mode=abort&clear_cache=false", None)),
        ("/pause_generation", b'{"mode":"retract"}', ("POST", "/pause", "mode=keep&clear_cache=false", None)),
        ("/pause_generation", b'{"mode":"in_place"}', ("POST", "/pause", "mode=keep&clear_cache=false", None)),
        ("/continue_generation", b"{}", ("POST", "/resume", "", None)),
        ("/flush_cache", b"", ("POST", "/reset_prefix_cache", "", None)),
        ("/abort_request", b'{"abort_all":true}', ("POST", "/abort_requests", "", b"{}")),
        ("/abort_request", b'{"rid":"a"}', ("POST", "/abort_requests", "", b'{"request_ids":["a"]}')),
        ("/release_memory_occupation", b"{}", ("POST", "/sleep", "", None)),
    ],
)
def test_sglangs_words_reach_vllm_in_its_own(
    path: str, body: bytes, called: tuple[str, str, str, bytes | None]
) -> None:
    assert told(path, "", body) == [called]


@pytest.mark.parametrize("path", ["/update_weights", "/update_weights_from_disk", "/start_profile", "/collective_rpc"])
def test_what_only_one_engine_knows_is_left_as_it_came(path: str) -> None:
    assert understood(path, "", b"{}") is None


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff", b"null"])
def test_a_body_that_cannot_be_read_is_taken_for_an_empty_one(body: bytes) -> None:
    wish = understood("/pause_generation", "", body)
    assert wish is not None
    assert wish.options["mode"] == "abort"


@pytest.mark.parametrize("path", ["/abort_request", "/abort_requests"])
@pytest.mark.parametrize("body", [b"[1]", b'{"rid": "a', b"\xff", b"null", b"[" * 100_000])
def test_an_abort_that_cannot_be_read_is_not_one_of_all_requests(path: str, body: bytes) -> None:
    assert understood(path, "", body) is None


def test_an_abort_of_no_named_request_is_not_one_of_all_of_them() -> None:
    wish = understood("/abort_request", "", b'{"rid": [""]}')
    assert wish is not None
    assert [adapter.calls(wish.action, wish.options) for adapter in ADAPTERS.values()] == [(), ()]


def test_a_call_has_a_method_and_a_path() -> None:
    for adapter in ADAPTERS.values():
        for action in ("pause", "resume", "is_paused", "reset_prefix_cache", "abort_all", "sleep", "wake_up"):
            calls = adapter.calls(action, {})  # type: ignore[arg-type]
            assert calls
            assert all(isinstance(call, ControlCall) and call.path.startswith("/") for call in calls)
