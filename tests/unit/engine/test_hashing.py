"""Block hashes chain, and remembering the last prompt changes none of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.engine.hashing import PromptHashes, chain, root
from tidegate.engine.tokenizer import pack


def fresh(tokens: bytes, salt: str | None) -> list[object]:
    return chain(tokens, 4, root(salt), 0, len(tokens) // 16)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), max_size=40),
            st.sampled_from([None, "v1", "v2"]),
            st.sampled_from([None, "s1", "s2"]),
        )
    )
)
def test_remembered_hashes_are_those_computed_anew(prompts: list[tuple[list[int], str | None, str | None]]) -> None:
    remembered = PromptHashes(4, capacity=2)
    for ids, salt, session in prompts:
        tokens = pack(ids)
        hashes = remembered.of(tokens, salt, session)
        assert hashes == fresh(tokens, salt)
        hashes.append(b"the caller's own")


def test_a_hash_stands_for_its_whole_prefix() -> None:
    one, other = fresh(pack([1] * 8), None), fresh(pack([2] * 4 + [1] * 4), None)
    assert one[1] != other[1]


def test_a_salt_keeps_prefixes_apart() -> None:
    tokens = pack([1] * 8)
    assert set(fresh(tokens, "a")).isdisjoint(fresh(tokens, "b"))
    assert set(fresh(tokens, "a")).isdisjoint(fresh(tokens, None))
