"""From a request body to generations: what all inference APIs share, whatever their shape."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from msgspec import Struct

from tidegate.engine import tokenizer
from tidegate.engine.core import EngineCore
from tidegate.engine.generation import Generation, Sampling
from tidegate.engine.http import Call, Refusal


class StreamOptions(Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SharedFields(Struct, kw_only=True):
    """Fields that vLLM takes in chat, completions and responses alike; unknown ones are ignored, as vLLM does."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    temperature: float | None = None
    seed: int | None = None
    n: int | None = 1
    return_token_ids: bool | None = False
    cache_salt: str | None = None
    priority: int = 0
    session_id: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    request_id: str | None = None

    def sampling(self, *, max_tokens: int | None, logprobs: int | None) -> Sampling:
        stop = self.stop or ()
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop=self.include_stop_str_in_output,
            temperature=1.0 if self.temperature is None else self.temperature,
            seed=self.seed,
            n=1 if self.n is None else self.n,
            logprobs=logprobs,
        )


def session_of(call: Call, body: SharedFields) -> str | None:
    """vLLM's order."""
    if body.session_id:
        return body.session_id
    if header := call.header(b"x-session-id"):
        return header
    extra = (body.vllm_xargs or {}).get("session_id")
    return extra if isinstance(extra, str) and extra else None


class Job:
    """The sequences of one request: for each prompt, its `n` choices."""

    def __init__(self, id: str, generations: list[Generation], changed: asyncio.Event, prompts: int) -> None:
        self.id = id
        self.created = int(time.time())
        self.generations = generations
        self.changed = changed
        self.prompts = prompts

    async def finished(self) -> None:
        while not all(generation.done for generation in self.generations):
            await self.changed.wait()
            self.changed.clear()

    async def deltas(self) -> AsyncIterator[tuple[int, Generation, int, int]]:
        """(choice, generation, first, end) for each piece of a stream; the last piece of each is `done`."""
        sent = [0] * len(self.generations)
        open_ = set(range(len(self.generations)))
        while open_:
            self.changed.clear()
            for index in sorted(open_):
                generation = self.generations[index]
                first, end = sent[index], generation.delivered
                if generation.done:
                    open_.discard(index)
                if end > first or generation.done:
                    sent[index] = end
                    yield index, generation, first, end
            if open_:
                await self.changed.wait()

    def usage(self) -> dict[str, Any]:
        """Prompts count once, whatever the number of choices."""
        choices = len(self.generations) // self.prompts
        firsts = self.generations[::choices]
        return usage(
            sum(generation.prompt_tokens for generation in firsts),
            sum(generation.delivered for generation in self.generations),
            sum(generation.cached_tokens or 0 for generation in firsts),
        )


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if cached_tokens is not None:
        shape["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return shape


def check_model(core: EngineCore, model: str | None) -> None:
    if model and model != core.config.served_model_name:
        raise Refusal(
            f"The model `{model}` does not exist. Valid aliases: {core.config.served_model_name}.",
            status=404,
            kind="NotFoundError",
            param="model",
        )


def check_length(core: EngineCore, prompt: bytes, max_tokens: int | None) -> None:
    tokens = tokenizer.count(prompt)
    limit = core.config.model_len
    if not tokens:
        raise Refusal("The decoder prompt cannot be empty", param="prompt")
    if max_tokens is not None and max_tokens < 1:
        raise Refusal(f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    if tokens + (1 if max_tokens is None else max_tokens) > limit:
        asked = "" if max_tokens is None else f" and {max_tokens} output tokens were requested"
        raise Refusal(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {tokens} input "
            f"tokens{asked}. Please reduce the length of the input prompt.",
            param="input_tokens",
        )


def check_queue(core: EngineCore, sequences: int) -> None:
    limit = core.config.max_num_queued_reqs
    if limit is not None and core.unfinished + sequences > limit:
        core.metrics.rejected["max_num_queued_reqs"] += 1
        raise Refusal(
            "The engine is currently busy and cannot accept new requests. Please try again later or on a different "
            "instance.",
            status=503,
            kind="Service Unavailable",
        )


def start(
    core: EngineCore,
    prompts: list[bytes],
    sampling: Sampling,
    *,
    id: str,
    session: str | None,
    salt: str | None = None,
    priority: int = 0,
    chat: bool = False,
    streaming: bool = False,
) -> Job:
    if sampling.n < 1:
        raise Refusal(f"n must be at least 1, got {sampling.n}.", param="n")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise Refusal(
            f"min_tokens must be less than or equal to max_tokens={sampling.max_tokens}, got {sampling.min_tokens}.",
            param="min_tokens",
        )
    for prompt in prompts:
        check_length(core, prompt, sampling.max_tokens)
    check_queue(core, len(prompts) * sampling.n)
    changed = asyncio.Event()
    generations = [
        core.submit(
            prompt,
            sampling,
            id=id if len(prompts) == 1 else f"{id}-{index}",
            choice=choice,
            salt=salt,
            session=session,
            priority=priority,
            chat=chat,
            streaming=streaming,
            changed=changed,
        )
        for index, prompt in enumerate(prompts)
        for choice in range(sampling.n)
    ]
    return Job(id, generations, changed, len(prompts))


@contextlib.contextmanager
def attended(core: EngineCore, call: Call, job: Job) -> Iterator[None]:
    """While the answer is being made: a client that leaves, or an answer that fails, ends the job's sequences."""

    def abort() -> None:
        for generation in job.generations:
            core.abort(generation.id)

    watch = call.on_disconnect(abort)
    try:
        yield
    finally:
        watch.cancel()
        abort()


def new_id(prefix: str, given: str | None) -> str:
    return f"{prefix}-{given or uuid.uuid4().hex}"


def pack_ids(ids: Sequence[object]) -> bytes:
    """Checked by packing them: a prompt of ids holds nothing else."""
    try:
        return tokenizer.pack(ids)  # type: ignore[arg-type]
    except OverflowError as error:
        raise Refusal("Token id is out of vocabulary", param="prompt") from error
    except TypeError as error:
        raise Refusal("A prompt of token ids holds nothing but ids", param="prompt") from error


def top_candidates(generation: Generation, index: int, count: int) -> list[tuple[int, float]]:
    """The sampled token first, then `count - 1` others, each less likely than the one before."""
    id = generation.tokens_out(index, index + 1)[0]
    logprob = generation.logprob(index)
    others = [(tokenizer.WORDS[(id * 31 + rank * 977) & 4095], logprob - 0.5 * rank) for rank in range(1, count)]
    return [(id, logprob), *others]
