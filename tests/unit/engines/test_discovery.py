"""A replica is its URL: every spelling of it is the same replica, and what cannot be one is refused."""

from __future__ import annotations

import pytest

from tidegate.engines.discovery import DuplicateWorkerUrl, InvalidWorkerUrl, host_of, normalise, normalise_all


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("http://10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("  http://h:8000/  ", "http://h:8000"),
        ("HTTP://Host.Example:80/", "http://host.example"),
        ("https://h:443", "https://h"),
        ("https://h:80", "https://h:80"),
        ("http://h:8000/v1/", "http://h:8000/v1"),
        ("http://h/A/b//", "http://h/A/b"),
        ("http://[2001:DB8:0:0::1]:8000", "http://[2001:db8::1]:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("localhost:30000", "http://localhost:30000"),
        ("vllm-0.vllm.ns.svc.cluster.local:8000", "http://vllm-0.vllm.ns.svc.cluster.local:8000"),
        ("my_service:8000", "http://my_service:8000"),
    ],
)
def test_every_spelling_becomes_one(url: str, canonical: str) -> None:
    assert normalise(url) == canonical
    assert normalise(canonical) == canonical


@pytest.mark.parametrize(
    "url",
    [
        "",
        "   ",
        "http://",
        "http:///path",
        "ftp://h:1",
        "unix:///tmp/s",
        "http://h:0",
        "http://h:70000",
        "http://h:port",
        "http://h h:1",
        "http://h:1/a\r\nX: y",
        "http://h\\x:1",
        "http://user:pw@h:1",
        "http://h:1?x=1",
        "http://h:1#f",
        "http://[::1",
        "http://[zz::1]:1",
        "http://-h:1",
        "http://h\u00e9:1",
        "http://h/" + "a" * 3000,
    ],
)
def test_what_cannot_be_a_base_url_is_refused_with_a_stable_reason(url: str) -> None:
    with pytest.raises(InvalidWorkerUrl) as refused:
        normalise(url)
    assert (refused.value.status, refused.value.reason) == (400, "invalid_worker_url")
    assert len(refused.value.message) < 400


def test_two_spellings_of_one_replica_are_a_duplicate() -> None:
    with pytest.raises(DuplicateWorkerUrl) as refused:
        normalise_all(["http://a:1", "http://b:2", "A:1/"])
    assert refused.value.reason == "duplicate_worker_url"
    assert "A:1/" in refused.value.message


def test_order_is_kept() -> None:
    assert normalise_all(["b:1", "a:1"]) == ["http://b:1", "http://a:1"]


def test_the_host_is_as_sockets_take_it() -> None:
    assert host_of("http://[::1]:8000/x") == "::1"
    assert host_of("http://h:8000") == "h"


def test_a_refused_url_does_not_tell_its_password() -> None:
    with pytest.raises(InvalidWorkerUrl) as refused:
        normalise("http://user:secret@h:1")
    assert "secret" not in refused.value.message
