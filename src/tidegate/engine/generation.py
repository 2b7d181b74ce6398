"""One sequence to generate: the prompt's tokens, what it replies, and how far it has come.

A reply is a stream of words drawn from a hash of what may change it: the engine's seed, the prompt's tokens and, unless
the temperature is 0, the request's own seed or a fresh one. It is the same whatever was cached, preempted or batched
with it. It ends by itself after a length drawn from the same hash, unless the request ignores the end; `stop` strings
and `stop_token_ids` are looked for in the stream. So the whole reply is known before its first token is due, and only
its pace is simulated.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from hashlib import shake_128

from msgspec import Struct

from tidegate.engine import tokenizer
from tidegate.engine.hashing import chain, root
from tidegate.sim.blocks import BlockHash
from tidegate.sim.replica import FinishReason, Request


class Sampling(Struct, frozen=True, kw_only=True):
    """What of a request's sampling parameters has a meaning here."""

    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    temperature: float = 1.0
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None  # how many alternatives; None: no logprobs


class Generation(Request):
    __slots__ = (
        "bare_first", "block_size", "changed", "delivered", "done", "eos_at", "last_token_s", "out", "parent_hash",
        "prompt", "salt", "sampling", "stop_reason", "stream", "stream_bytes", "streaming", "text_limit",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        prompt: bytes,
        hashes: list[BlockHash],
        sampling: Sampling,
        *,
        reply_key: bytes,
        mean_output_tokens: int,
        limit_tokens: int,
        block_size: int,
        salt: str | None = None,
        bare_first: bool = False,
        streaming: bool = False,
        changed: asyncio.Event | None = None,
        session: str | None = None,
        priority: int = 0,
        arrival_s: float = 0.0,
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.salt = salt
        self.block_size = block_size
        self.bare_first = bare_first
        self.stream = shake_128(reply_key)
        self.stream_bytes = b""
        self.out = array("I")  # tokens drawn so far; `delivered` of them are the client's
        self.stop_reason: int | str | None = None
        self.eos_at: int | None = None  # where it ends by itself
        self.text_limit: int | None = None  # characters before a stop string
        length, reason = self._length(mean_output_tokens, limit_tokens)
        super().__init__(
            id,
            tokenizer.count(prompt),
            length,
            hashes,
            session=session,
            priority=priority,
            arrival_s=arrival_s,
            finish_reason=reason,
        )
        self.parent_hash = hashes[-1] if hashes else root(salt)
        self.delivered = 0
        self.last_token_s = 0.0
        self.streaming = streaming
        # Set at the end and, for streams, when tokens were delivered; shared by the choices of a request.
        self.changed = changed if changed is not None else asyncio.Event()
        self.done = False

    # --- the reply --------------------------------------------------------------------------------------------
    def _length(self, mean_tokens: int, limit_tokens: int) -> tuple[int, FinishReason]:
        sampling = self.sampling
        limit = limit_tokens if sampling.max_tokens is None else min(limit_tokens, sampling.max_tokens)
        own = limit + 1
        if not sampling.ignore_eos:  # geometric, by inversion, from a draw apart from those of the words
            draw = (int.from_bytes(shake_128(self.stream.digest(16) + b"length").digest(7), "big") + 1) / (2**56 + 1)
            own = max(1, sampling.min_tokens, math.ceil(-math.log(draw) * mean_tokens))
        length = min(own, limit)
        if sampling.stop or sampling.stop_token_ids:
            stopped = self._find_stop(length)
            if stopped is not None:
                return stopped, "stop"
        if own > limit:
            return limit, "length"
        self.eos_at = own - 1
        if len(self.out) > self.eos_at:
            self.out[self.eos_at] = tokenizer.EOS
        return own, "stop"

    def _find_stop(self, length: int) -> int | None:
        """Tokens up to and including the first stop, if it comes within `length`."""
        self._draw(length)
        best: int | None = None
        for position, id in enumerate(self.out[:length]):
            if position >= self.sampling.min_tokens and id in self.sampling.stop_token_ids:
                best, self.stop_reason = position + 1, id
                break
        text = tokenizer.decode(self.out[: best or length])
        for stop in self.sampling.stop:
            at = text.find(stop) if stop else -1
            tokens = self._tokens_to(at + len(stop)) if at >= 0 else 0
            if at >= 0 and tokens >= self.sampling.min_tokens and (best is None or tokens <= best):
                best, self.stop_reason = tokens, stop
                self.text_limit = at + len(stop) if self.sampling.include_stop else at
        return best

    def _tokens_to(self, chars: int) -> int:
        """How many tokens the first `chars` characters of the reply take (they are ASCII)."""
        first = len(tokenizer.piece(self.out[0]))
        return 1 if chars <= first else 1 + -(-(chars - first) // tokenizer.WORD_BYTES)

    def _draw(self, tokens: int) -> None:
        have = len(self.out)
        if have >= tokens:
            return
        tokens = max(tokens, 2 * have, 64)  # the stream is drawn from its start each time: grow by doubling
        self.stream_bytes = self.stream.digest(2 * tokens)
        words = tokenizer.WORDS
        drawn = array("H", self.stream_bytes[2 * have :])
        self.out.extend([words[draw & 4095] for draw in drawn])
        if have == 0 and self.bare_first:
            self.out[0] = tokenizer.BARE_WORDS[drawn[0] & 4095]
        if self.eos_at is not None and have <= self.eos_at < len(self.out):
            self.out[self.eos_at] = tokenizer.EOS

    def tokens_out(self, first: int, end: int) -> list[int]:
        self._draw(end)
        return self.out[first:end].tolist()

    def text_out(self, first: int, end: int) -> str:
        """Of the tokens `first..end`, without a stop string and what follows it."""
        text = tokenizer.decode(self.tokens_out(first, end))
        if self.text_limit is None:
            return text
        before = len(tokenizer.piece(self.out[0])) + tokenizer.WORD_BYTES * (first - 1) if first else 0
        return text[: max(0, self.text_limit - before)]

    def logprob(self, index: int) -> float:
        """Of the sampled token: in (-3, 0], from the draw's other bits."""
        self._draw(index + 1)
        return -(self.stream_bytes[2 * index + 1] >> 4) / 5

    # --- block hashes of generated blocks ---------------------------------------------------------------------
    def grow_hashes(self, blocks: int) -> None:
        first = len(self.hashes)
        width = self.block_size * tokenizer.TOKEN_BYTES
        end_tokens = blocks * self.block_size - self.prompt_tokens
        self._draw(end_tokens)
        begin_tokens = first * self.block_size - self.prompt_tokens
        if begin_tokens < 0:  # the block in which the prompt ends
            tokens = self.prompt[first * width :] + self.out[:end_tokens].tobytes()
        else:
            tokens = self.out[begin_tokens:end_tokens].tobytes()
        parent = self.parent_hash
        assert isinstance(parent, bytes)
        self.hashes += chain(tokens, self.block_size, parent, 0, blocks - first)
        self.parent_hash = self.hashes[-1]

    def block_tokens(self, first: int, blocks: int) -> list[int]:
        """Token ids of a range of blocks, for KV events."""
        begin, end = first * self.block_size, (first + blocks) * self.block_size
        width = tokenizer.TOKEN_BYTES
        ids = tokenizer.unpack(self.prompt[begin * width : end * width])
        if end > self.prompt_tokens:
            ids += self.tokens_out(max(begin - self.prompt_tokens, 0), end - self.prompt_tokens)
        return ids
