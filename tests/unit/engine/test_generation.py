"""Replies: what they depend on, and where they end."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tidegate.engine import tokenizer
from tidegate.engine.generation import Generation, Sampling
from tidegate.engine.hashing import chain, root

PROMPT = tokenizer.encode("a prompt of some words")


def generate(prompt: bytes = PROMPT, *, key: bytes = b"key", **sampling: Any) -> Generation:
    values = Sampling(max_tokens=20, ignore_eos=True, temperature=0.0)
    return Generation(
        "id",
        prompt,
        chain(prompt, 4, root(None), 0, len(prompt) // 16),
        msgspec.structs.replace(values, **sampling),
        reply_key=key + prompt,
        mean_output_tokens=10,
        limit_tokens=1000,
        block_size=4,
    )


def whole(generation: Generation) -> list[int]:
    return generation.tokens_out(0, generation.output_tokens)


async def test_the_reply_depends_on_the_prompt_and_the_key() -> None:
    assert whole(generate()) == whole(generate())
    assert whole(generate()) != whole(generate(PROMPT + tokenizer.pack([99])))
    assert whole(generate()) != whole(generate(key=b"other"))


async def test_a_longer_limit_extends_the_same_reply() -> None:
    short, long = whole(generate(max_tokens=5)), whole(generate(max_tokens=500))
    assert len(long) == 500
    assert long[:5] == short


async def test_ignoring_the_end_generates_max_tokens() -> None:
    generation = generate(max_tokens=300)
    assert (generation.output_tokens, generation.finish_reason) == (300, "length")
    assert tokenizer.EOS not in whole(generation)


async def test_a_reply_that_ends_by_itself_ends_with_the_end_token() -> None:
    lengths = []
    for number in range(200):
        generation = generate(key=str(number).encode(), max_tokens=None, ignore_eos=False)
        assert generation.finish_reason == "stop"
        assert whole(generation)[-1] == tokenizer.EOS
        assert tokenizer.EOS not in whole(generation)[:-1]
        assert generation.text_out(0, generation.output_tokens) == tokenizer.decode(whole(generation)[:-1])
        lengths.append(generation.output_tokens)
    assert 7 < sum(lengths) / len(lengths) < 14  # the mean is 10


async def test_max_tokens_cuts_a_reply_off() -> None:
    for number in range(50):
        generation = generate(key=str(number).encode(), max_tokens=3, ignore_eos=False)
        assert generation.output_tokens <= 3
        if generation.finish_reason == "length":
            assert tokenizer.EOS not in whole(generation)


async def test_min_tokens_keeps_it_going() -> None:
    for number in range(50):
        generation = generate(key=str(number).encode(), max_tokens=100, min_tokens=40, ignore_eos=False)
        assert generation.output_tokens >= 40


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_it_and_is_left_out_unless_asked_for(include: bool) -> None:
    text = generate().text_out(0, 20)
    stop = text[20:26]  # spans two tokens
    generation = generate(stop=(stop,), include_stop=include)
    assert (generation.finish_reason, generation.stop_reason) == ("stop", stop)
    end = text.find(stop)
    assert generation.text_out(0, generation.output_tokens) == text[: end + len(stop) if include else end]
    assert tokenizer.decode(whole(generation)).find(stop) == end  # the tokens keep it


async def test_a_stop_string_is_not_streamed_piece_by_piece() -> None:
    text = generate().text_out(0, 20)
    generation = generate(stop=(text[20:26],))
    pieces = [generation.text_out(i, i + 1) for i in range(generation.output_tokens)]
    assert "".join(pieces) == text[: text.find(text[20:26])]


async def test_a_stop_token_ends_it() -> None:
    ids = whole(generate())
    generation = generate(stop_token_ids=(ids[6],))
    assert generation.stop_reason == ids[6]
    assert whole(generation) == ids[: ids.index(ids[6]) + 1]


async def test_the_first_of_several_stops_counts() -> None:
    ids, text = whole(generate()), generate().text_out(0, 20)
    generation = generate(stop=(text[40:44], text[12:16]), stop_token_ids=(ids[15],))
    assert generation.stop_reason == text[12:16]


async def test_generated_blocks_have_the_hashes_that_the_next_prompt_has() -> None:
    generation = generate(max_tokens=30)
    blocks = (generation.prompt_tokens + 30) // 4
    for upto in range(len(generation.hashes), blocks + 1):
        generation.grow_hashes(upto) if upto > len(generation.hashes) else None
    again = PROMPT + tokenizer.pack(whole(generation))
    assert generation.hashes == chain(again, 4, root(None), 0, blocks)
    assert generation.block_tokens(0, blocks) == tokenizer.unpack(again)[: 4 * blocks]


async def test_a_chat_reply_begins_without_white_space() -> None:
    generation = Generation(
        "id", PROMPT, [], Sampling(max_tokens=3, ignore_eos=True), reply_key=b"k", mean_output_tokens=10,
        limit_tokens=100, block_size=4, bare_first=True,
    )  # fmt: skip
    assert not generation.text_out(0, 3).startswith(" ")


async def test_logprobs_are_probabilities_and_the_same_each_time() -> None:
    first, second = ([generate().logprob(i) for i in range(20)] for _ in range(2))
    assert first == second
    assert all(-3.0 <= value <= 0.0 for value in first)
    assert len(set(first)) > 3
