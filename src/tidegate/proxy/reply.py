"""A whole, small reply: its usage and how it finished, decoded at once. The decoder skips everything else.

For replies that the relay keeps back anyway (`aborts`) this costs a tenth of scanning them. Anything that does not
have one of the known shapes gives None, and is scanned.
"""

from __future__ import annotations

from typing import Any

import msgspec


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class ReplyUsage(msgspec.Struct):
    """OpenAI's, Responses', Anthropic's `usage`, and SGLang's `meta_info`."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cached_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    finish_reason: Any = None  # SGLang's, an object

    def counts(self) -> tuple[int | None, int | None, int | None]:
        """Prompt, completion and cached tokens. Anthropic counts cached prompt tokens apart from its input tokens."""
        prompt, completion, cached = self.prompt_tokens, self.completion_tokens, self.cached_tokens
        if completion is None:
            completion = self.output_tokens
        if prompt is None and self.input_tokens is not None:
            prompt = self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        details = self.prompt_tokens_details or self.input_tokens_details
        if details is not None:
            cached = details.cached_tokens
        elif cached is None:
            cached = self.cache_read_input_tokens
        return prompt, completion, cached


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class Reply(msgspec.Struct):
    usage: ReplyUsage | None = None
    meta_info: ReplyUsage | None = None
    choices: tuple[_Choice, ...] = ()
    status: Any = None  # Responses
    stop_reason: Any = ...  # Messages; null in one that did not finish

    @property
    def aborted(self) -> bool:
        """The replica ended it: some choice, or what stands for that in the other shapes."""
        for choice in self.choices:
            if choice.finish_reason == "abort":
                return True
        meta = self.meta_info
        if meta is not None and isinstance(meta.finish_reason, dict) and meta.finish_reason.get("type") == "abort":
            return True
        return self.status == "cancelled" or self.stop_reason is None


_decoder = msgspec.json.Decoder(Reply)


def decode(body: bytes) -> Reply | None:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
