"""How each API carries a prompt, and where its reply keeps what the driver wants to know.

| name        | path                     | prompt                | output that continues the session |
|-------------|--------------------------|-----------------------|-----------------------------------|
| completions | /v1/completions          | `prompt`, token ids   | `token_ids` (return_token_ids)    |
| generate    | /inference/v1/generate   | `token_ids`           | `token_ids`                       |
| sglang      | /generate                | `input_ids`           | `output_ids`                      |
| chat        | /v1/chat/completions     | `messages`            | `message.content`                 |

Every session generates exactly the planned number of tokens (ignore_eos), so that the work offered is the same under
every policy.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")

Api: TypeAlias = Literal["completions", "generate", "sglang", "chat"]

PATHS: dict[Api, str] = {
    "completions": "/v1/completions",
    "generate": "/inference/v1/generate",
    "sglang": "/generate",
    "chat": "/v1/chat/completions",
}


class Reply(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    output_ids: list[int] | None = None
    text: str | None = None
    finish_reason: str = ""


class BadReply(Exception):
    """A 200 that is not a result; the message is its kind, for counting."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None


class _OpenAI(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class _Finish(msgspec.Struct):
    type: str = ""


class _Meta(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: _Finish | None = None


class _Sglang(msgspec.Struct):
    output_ids: list[int] | None = None
    text: str | None = None
    meta_info: _Meta = msgspec.field(default_factory=_Meta)


_openai = msgspec.json.Decoder(_OpenAI)
_sglang = msgspec.json.Decoder(_Sglang)


def request_body(
    api: Api, model: str, prompt: bytes, max_tokens: int, *, stream: bool, program: str | None = None
) -> bytes:
    """`prompt` is a transcript's JSON without its brackets; `program` is told to vllm-router's program scheduling."""
    encoded_model = msgspec.json.encode(model)
    if api == "sglang":
        sampling = b'{"max_new_tokens":%d,"ignore_eos":true,"temperature":1.0}' % max_tokens
        return b'{"input_ids":[%b],"sampling_params":%b}' % (prompt, sampling)
    options = b',"stream":true,"stream_options":{"include_usage":true}' if stream else b""
    if program is not None:  # as text: vLLM takes no objects in there
        context = msgspec.json.encode(msgspec.json.encode({"program_id": program}).decode())
        options += b',"vllm_xargs":{"agentic_context":%b}' % context
    if api == "generate":
        sampling = b'{"max_tokens":%d,"ignore_eos":true,"temperature":1.0}' % max_tokens
        return b'{"model":%b,"token_ids":[%b],"sampling_params":%b%b}' % (encoded_model, prompt, sampling, options)
    common = b'"max_tokens":%d,"ignore_eos":true,"temperature":1.0%b' % (max_tokens, options)
    if api == "chat":
        return b'{"model":%b,"messages":[%b],%b}' % (encoded_model, prompt, common)
    return b'{"model":%b,"prompt":[%b],"return_token_ids":true,%b}' % (encoded_model, prompt, common)


def read_reply(api: Api, body: bytes) -> Reply:
    if api == "sglang":
        return _read_sglang(body)
    reply = _decode(_openai, body)
    if reply.usage is None or not reply.choices:
        raise BadReply("no_usage")
    choice = reply.choices[0]
    text = choice.text if choice.message is None else choice.message.content
    return _checked(
        Reply(
            prompt_tokens=reply.usage.prompt_tokens,
            output_tokens=reply.usage.completion_tokens,
            cached_tokens=_cached(reply.usage),
            output_ids=choice.token_ids,
            text=text,
            finish_reason=choice.finish_reason or "",
        )
    )


class StreamReader:
    """Server-sent events of a streamed reply, joined into one Reply."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._saw_ids = False
        self._text: list[str] = []
        self._finish_reason = ""
        self._usage: _Usage | None = None

    def line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = _decode(_openai, data)
        self._usage = event.usage or self._usage
        for choice in event.choices[:1]:
            if choice.token_ids is not None:
                self._saw_ids = True
                self._ids += choice.token_ids
            text = choice.text if choice.delta is None else choice.delta.content
            if text:
                self._text.append(text)
            self._finish_reason = choice.finish_reason or self._finish_reason

    def reply(self) -> Reply:
        if self._usage is None:
            raise BadReply("no_usage")
        return _checked(
            Reply(
                prompt_tokens=self._usage.prompt_tokens,
                output_tokens=self._usage.completion_tokens,
                cached_tokens=_cached(self._usage),
                output_ids=self._ids if self._saw_ids else None,
                text="".join(self._text),
                finish_reason=self._finish_reason,
            )
        )


def _read_sglang(body: bytes) -> Reply:
    reply = _decode(_sglang, body)
    meta = reply.meta_info
    return _checked(
        Reply(
            prompt_tokens=meta.prompt_tokens,
            output_tokens=meta.completion_tokens,
            cached_tokens=meta.cached_tokens,
            output_ids=reply.output_ids,
            text=reply.text,
            finish_reason="" if meta.finish_reason is None else meta.finish_reason.type,
        )
    )


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise BadReply("not_json") from error


def _cached(usage: _Usage) -> int | None:
    return None if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens


def _checked(reply: Reply) -> Reply:
    # A draining vLLM answers 200 with an empty text and this reason: no result.
    if reply.finish_reason == "abort":
        raise BadReply("finish_abort")
    return reply
