"""Measures a live, idle engine for `sim.fit`: cold prompts one by one, and sequences that decode side by side.

Any OpenAI-compatible endpoint that takes token ids as a prompt. Prompts are random ids, so that nothing is cached; the
end-of-sequence token is ignored, so that every answer has the length that was asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from tidegate.errors import ConfigError
from tidegate.sim.fit import Decode, Prefill
from tidegate.sim.prompts import TokenStreams

REPEATS = 3
SHORT_OUTPUT, LONG_OUTPUT = 8, 40  # tokens; the difference of the two is pure decoding
SEQUENCES = (1, 4, 16)
SHORT_PROMPT = 32


class Measurements(msgspec.Struct, frozen=True):
    prefills: list[Prefill]
    decodes: list[Decode]


class Probe:
    def __init__(self, http: aiohttp.ClientSession, url: str, model: str, vocab_size: int, seed: int) -> None:
        self._http = http
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._streams = TokenStreams(seed, vocab_size)
        self._number = 0

    async def measure(self, longest_prompt: int, progress: Callable[[int, int], None]) -> Measurements:
        lengths = [n for n in (64, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768) if n < longest_prompt]
        lengths.append(longest_prompt)
        long_prompt = min(longest_prompt, 2048)
        shapes = [(d, SHORT_PROMPT) for d in SEQUENCES] + [(d, long_prompt) for d in SEQUENCES[:2]]
        total = len(lengths) + len(shapes)
        await self._ask(SHORT_PROMPT, 2)  # the first request of an engine compiles and connects
        prefills, decodes = [], []
        for prompt in lengths:
            prefills.append(Prefill(prompt, min([await self._ask(prompt, 1) for _ in range(REPEATS)])))
            progress(len(prefills), total)
        for sequences, prompt in shapes:
            decodes.append(await self._decode(sequences, prompt))
            progress(len(prefills) + len(decodes), total)
        return Measurements(prefills, decodes)

    async def _decode(self, sequences: int, prompt: int) -> Decode:
        """Steps with everybody in them: the prompts are sent twice, and the second time are cached."""
        first = self._number
        self._number += sequences
        prompts = [self._prompt(first + n, prompt) for n in range(sequences)]
        await self._together(prompts, SHORT_OUTPUT)
        short_s = min([await self._together(prompts, SHORT_OUTPUT) for _ in range(REPEATS)])
        long_s = min([await self._together(prompts, LONG_OUTPUT) for _ in range(REPEATS)])
        context = prompt + (SHORT_OUTPUT + LONG_OUTPUT) // 2
        return Decode(sequences, sequences * context, (long_s - short_s) / (LONG_OUTPUT - SHORT_OUTPUT))

    async def _together(self, prompts: Sequence[Sequence[int]], output: int) -> float:
        began_s = time.perf_counter()
        await asyncio.gather(*(self._post(prompt, output) for prompt in prompts))
        return time.perf_counter() - began_s

    async def _ask(self, prompt: int, output: int) -> float:
        self._number += 1
        ids = self._prompt(self._number, prompt)
        began_s = time.perf_counter()
        await self._post(ids, output)
        return time.perf_counter() - began_s

    def _prompt(self, number: int, tokens: int) -> list[int]:
        return self._streams.ids(f"fit/{number}", tokens)

    async def _post(self, prompt: Sequence[int], output: int) -> None:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": output,
            "min_tokens": output,
            "ignore_eos": True,
            "temperature": 0,
        }
        try:
            async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
                answer = await response.read()
                if response.status != 200:
                    raise ConfigError(
                        f"{self._url}: {response.status}: {answer[:200].decode(errors='replace')}",
                        reason="target_failed",
                    )
        except aiohttp.ClientError as error:
            raise ConfigError(f"{self._url}: {error}", reason="target_failed") from error
        made = msgspec.json.decode(answer)["usage"]["completion_tokens"]
        if made != output:
            raise ConfigError(f"{self._url} made {made} tokens where {output} were asked for", reason="target_failed")


async def measure(
    url: str,
    *,
    model: str | None,
    longest_prompt: int,
    vocab_size: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> Measurements:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        probe = Probe(http, url, model or await _served_model(http, url), vocab_size, seed)
        return await probe.measure(longest_prompt, progress)


async def _served_model(http: aiohttp.ClientSession, url: str) -> str:
    base = url.rstrip("/").removesuffix("/v1")
    try:
        async with http.get(f"{base}/v1/models") as response:
            return str(msgspec.json.decode(await response.read())["data"][0]["id"])
    except (aiohttp.ClientError, msgspec.DecodeError, LookupError, TypeError) as error:
        raise ConfigError(f"{base}/v1/models names no model ({error!r}); give one", reason="target_failed") from error
