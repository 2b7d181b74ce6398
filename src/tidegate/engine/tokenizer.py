"""A byte-level tokenizer without a vocabulary file: any text has tokens, and any token has bytes.

A token is up to three printable ASCII bytes (or up to three others, two after white space), with one white space byte
before them if there is one. White space therefore always begins a token, and since every word of a reply is a white
space and three letters, the tokens of prompt + reply + more text are the tokens of the parts, one after the other: a
multi-turn conversation repeats its prefix exactly, token for token, whether it comes back as text or as ids.

The id of a token is its bytes read as a number, after those of the shorter tokens (four bytes are ASCII: seven bits
each); ids below `NUM_SPECIAL` are marks of the chat template. Ids are 32-bit: `bytes` of them is how the engine keeps
token sequences.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

EOS = 0
TURN = 1  # begins a message; the role's name follows
SEP = 2  # ends the role's name
NUM_SPECIAL = 16
_FIRST = tuple(NUM_SPECIAL + before for before in (0, 0, 2**8, 2**8 + 2**16, 2**8 + 2**16 + 2**24))  # by length
VOCAB_SIZE = _FIRST[4] + 2**28
TOKEN_BYTES = 4

_WHITE = rb"[ \t\r\n]"
_OTHER = rb"[^ \t\r\n\x21-\x7e]"
_PIECE = re.compile(rb"%b?[\x21-\x7e]{1,3}|%b%b{1,2}|%b{1,3}|%b" % (_WHITE, _WHITE, _OTHER, _OTHER, _WHITE))
_SPECIAL_TEXT = {EOS: b"<|end|>", TURN: b"<|turn|>", SEP: b"<|sep|>"}


def pack(ids: Iterable[int]) -> bytes:
    """OverflowError if an id is negative or does not fit."""
    return array("I", ids).tobytes()


def unpack(tokens: bytes) -> list[int]:
    return array("I", tokens).tolist()


def count(tokens: bytes) -> int:
    return len(tokens) // TOKEN_BYTES


@lru_cache(maxsize=65536)
def _id(piece: bytes) -> int:
    if len(piece) == 4:
        return _FIRST[4] + (piece[0] << 21 | piece[1] << 14 | piece[2] << 7 | piece[3])
    return _FIRST[len(piece)] + int.from_bytes(piece, "big")


@lru_cache(maxsize=65536)
def piece(id: int) -> bytes:
    """The bytes of a token. Ids outside the vocabulary decode as something, not as an error: callers may send ids of
    another tokenizer."""
    if id < NUM_SPECIAL:
        return b""
    id = NUM_SPECIAL + (id - NUM_SPECIAL) % (VOCAB_SIZE - NUM_SPECIAL)
    if id >= _FIRST[4]:
        id -= _FIRST[4]
        return bytes((id >> 21, id >> 14 & 127, id >> 7 & 127, id & 127))
    length = 3 if id >= _FIRST[3] else 2 if id >= _FIRST[2] else 1
    return (id - _FIRST[length]).to_bytes(length, "big")


@lru_cache(maxsize=2048)  # messages of running conversations: each turn sends all of them again
def encode(text: str) -> bytes:
    return pack(map(_id, _PIECE.findall(text.encode("utf-8", "surrogatepass"))))


def decode(ids: Iterable[int], *, special: bool = False) -> str:
    parts = [_SPECIAL_TEXT.get(id, b"") if special and id < NUM_SPECIAL else piece(id) for id in ids]
    return b"".join(parts).decode("utf-8", "replace")


def _text_of(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):  # content parts: text as it is, anything else as its JSON
        parts = [
            part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else _canonical(part)
            for part in content
        ]
        return "".join(parts)
    return _canonical(content)


def _canonical(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def encode_chat(messages: Sequence[dict[str, Any]], tools: Any = None, *, generate: bool = True) -> bytes:
    """The chat template: <turn>role<sep>content<end> for each message, then <turn>assistant<sep>."""
    out: list[bytes] = []
    if tools:
        out += [_head("tools"), encode(_canonical(tools)), _END]
    for message in messages:
        out += [_head(str(message.get("role", "user"))), encode(_text_of(message.get("content")))]
        out += [
            encode(f"\n{key} {_canonical(message[key])}")
            for key in ("tool_calls", "tool_call_id", "name")
            if message.get(key)
        ]
        out.append(_END)
    if generate:
        out.append(_head("assistant"))
    return b"".join(out)


_END = pack([EOS])


@lru_cache(maxsize=256)
def _head(role: str) -> bytes:
    return pack([TURN]) + encode(role) + pack([SEP])


_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"


def _word(draw: int) -> bytes:
    """Three letters for 12 bits: the third follows from the other two."""
    first, second = divmod(draw, 64)
    return bytes((_LETTERS[first], _LETTERS[second], _LETTERS[(7 * first + 13 * second + 5) % 64]))


# The vocabulary of replies: 4096 words, each one token; after a space, or at the very beginning of a chat message.
WORDS: tuple[int, ...] = tuple(_id(b" " + _word(draw)) for draw in range(4096))
BARE_WORDS: tuple[int, ...] = tuple(_id(_word(draw)) for draw in range(4096))
WORD_BYTES = 4
