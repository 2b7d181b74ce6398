from __future__ import annotations

import pytest

from tidegate.proxy.chunked import LAST_CHUNK, ChunkedDecoder, InvalidChunk, encode

INVALID = [
    b"g\r\n",
    b"\r\n",
    b" 5\r\nhello\r\n",
    b"5 \r\nhello\r\n",
    b"+5\r\nhello\r\n",
    b"0x5\r\nhello\r\n",
    b"5\nhello\n",
    b"5\rhello",
    b"5\r\nhelloX\r\n",
    b"5\r\nhelloXX",
    b"5\r\nhello\n0\r\n\r\n",
    b"5\r\nhello0\r\n\r\n",
    b"1" * 16 + b"\r\n",
    b"5;a\x00\r\nhello\r\n",
    b"5;a\nb\r\nhello\r\n",
    b"5;" + b"a" * 5000,
    b"5;" + b"a" * 5000 + b"\r\nhello\r\n",
    b"0\r\nno colon\r\n\r\n",
    b"0\r\n folded: x\r\n\r\n",
    b"0\r\nA: \x00\r\n\r\n",
    b"0\r\nA: b\n\r\n\r\n",
    b"0\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
]


@pytest.mark.parametrize("data", INVALID)
@pytest.mark.parametrize("step", [1, 100_000])
def test_anything_but_the_coding_is_refused(data: bytes, step: int) -> None:
    decoder = ChunkedDecoder()

    def feed() -> None:
        for at in range(0, len(data), step):
            decoder.feed(data[at : at + step])

    with pytest.raises(InvalidChunk):
        feed()


def test_payload_extensions_and_trailers() -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(b"5;name=value\r\nhello\r\nA\r\n0123456789\r\n0\r\nX: y\r\n\r\nGET /") == b"hello0123456789"
    assert decoder.done
    assert decoder.rest == b"GET /"


def test_encoding_is_undone_by_decoding() -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(encode(b"a" * 300) + encode(b"b") + LAST_CHUNK) == b"a" * 300 + b"b"
    assert (decoder.done, decoder.rest) == (True, b"")
