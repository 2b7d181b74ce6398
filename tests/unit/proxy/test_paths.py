"""Spellings of one path."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.proxy.identity import INFERENCE_PATHS
from tidegate.proxy.paths import normalised


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat%2Fcompletions", "/v1/chat/completions"),
        ("/v1/%63hat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1//chat/completions", "/v1/chat/completions"),
        ("/v1/./chat/x/../completions", "/v1/chat/completions"),
        ("/../generate", "/generate"),
        ("/v1/chat%252Fcompletions", "/v1/chat%2Fcompletions"),  # decoded once, as servers do
        ("/V1/completions", "/V1/completions"),
        ("*", "/*"),
        ("/", "/"),
        ("", "/"),
        ("/%ff%zz", "/\xff%zz"),
    ],
)
def test_spellings_of_one_path(path: str, known: str) -> None:
    assert normalised(path) == known


@st.composite
def respelled(draw: st.DrawFn) -> tuple[str, str]:
    path = draw(st.sampled_from(sorted(INFERENCE_PATHS)))
    spelled = ""
    for character in path:
        choices = [character, f"%{ord(character):02x}", f"%{ord(character):02X}"]
        if character == "/":
            choices += ["//", "/./", "/x/../"]
        spelled += draw(st.sampled_from(choices))
    return path, spelled + draw(st.sampled_from(["", "/", "//", "/.", "%2f"]))


@given(respelled())
def test_no_spelling_of_an_inference_path_is_missed(case: tuple[str, str]) -> None:
    path, spelled = case
    assert normalised(spelled) == path


@given(st.text(st.characters(min_codepoint=33, max_codepoint=255)))
def test_what_is_normal_stays_so_but_for_its_percent_signs(path: str) -> None:
    once = normalised(path)
    assert once.startswith("/")
    if "%" not in once:
        assert normalised(once) == once
