"""Any text comes back from its tokens, and a conversation's prefix is its prefix, token for token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.engine import tokenizer


@given(st.text())
def test_text_survives(text: str) -> None:
    ids = tokenizer.unpack(tokenizer.encode(text))
    assert tokenizer.decode(ids) == text
    assert all(tokenizer.NUM_SPECIAL <= id < tokenizer.VOCAB_SIZE for id in ids)


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_any_ids_decode(ids: list[int]) -> None:
    assert isinstance(tokenizer.decode(ids), str)
    assert tokenizer.unpack(tokenizer.pack(ids)) == ids


@given(st.text(), st.lists(st.integers(0, 4095)), st.text())
def test_a_reply_inside_a_longer_text_keeps_its_tokens(before: str, draws: list[int], after: str) -> None:
    reply = [tokenizer.WORDS[draw] for draw in draws]
    text = tokenizer.decode(reply)
    joined = tokenizer.encode(before + text + after)
    assert joined == tokenizer.encode(before) + tokenizer.pack(reply) + tokenizer.encode(after) or not draws


def test_english_takes_about_one_token_for_three_characters() -> None:
    text = "The quick brown fox jumps over the lazy dog while the engine counts every token that it is given. " * 20
    assert 2.5 < len(text) / tokenizer.count(tokenizer.encode(text)) < 4.5


def test_the_next_turns_prompt_begins_with_this_ones_prompt_and_reply() -> None:
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
    reply = [tokenizer.BARE_WORDS[7], tokenizer.WORDS[9]]
    prompt = tokenizer.encode_chat(asked)
    again = tokenizer.encode_chat(
        [*asked, {"role": "assistant", "content": tokenizer.decode(reply)}, {"role": "user", "content": "more"}]
    )
    assert again.startswith(prompt + tokenizer.pack([*reply, tokenizer.EOS]))


def test_messages_that_differ_in_anything_have_other_tokens() -> None:
    variants = [
        [{"role": "user", "content": "a"}],
        [{"role": "system", "content": "a"}],
        [{"role": "user", "content": [{"type": "text", "text": "b"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}],
        [{"role": "tool", "content": "a", "tool_call_id": "1"}],
    ]
    assert len({tokenizer.encode_chat(messages) for messages in variants}) == len(variants)


def test_text_parts_are_the_text() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert tokenizer.encode_chat([{"role": "user", "content": parts}]) == tokenizer.encode_chat(
        [{"role": "user", "content": "a b"}]
    )
