"""Measures live, idle engines for `sim.fit`: cold prompts one by one and many at once, and sequences that decode side
by side.

Any OpenAI-compatible endpoint that takes token ids as a prompt. Prompts are random ids, so that nothing is cached; the
end-of-sequence token is ignored, so that every answer has the length that was asked for.

Engines that share a host slow each other down: cores, memory bandwidth, caches. Where several are given, all are
measured at once, each under the same load as the others, which is how a pool runs them; they are taken to be alike.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from statistics import fmean, median

import aiohttp
import msgspec

from tidegate.errors import ConfigError
from tidegate.sim.fit import Decode, Joined, Measurements, Prefill
from tidegate.sim.prompts import TokenStreams

REPEATS = 3
SHORT_OUTPUT, LONG_OUTPUT = 8, 40  # tokens; the difference of the two is pure decoding
SEQUENCES = (1, 4, 16)
SHORT_PROMPT = 32
JOINED = (1, 4, 8)  # prompts
JOINED_PROMPT = 64  # tokens: little beside what a prompt costs by itself
BEHIND_S = 0.005  # a request that is sent so much later comes into an engine that computes the one before


class Probe:
    """One engine. Its number keeps its prompts apart from the others': a shared cache must not know them."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, *, model: str, vocab_size: int, seed: int, number: int = 0
    ) -> None:
        self._http = http
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._streams = TokenStreams(seed, vocab_size)
        self._number = number
        self._made = 0

    async def prefill_s(self, prompt: int) -> float:
        """A cold prompt, to its first token."""
        return await self.together(self.prompts(1, prompt), 1)

    async def joined_s(self, prompts: int, blocker: int) -> float:
        """The step that computes these prompts. They come while the engine computes a longer one, so that it finds all
        of them when that is done."""
        short = self.prompts(prompts, JOINED_PROMPT)
        before = asyncio.ensure_future(self._answered(self.prompts(1, blocker), 1))
        await asyncio.sleep(BEHIND_S)
        last_s = await self._answered(short, 1)
        return last_s - await before

    async def decode_s(self, cached: Sequence[Sequence[int]]) -> float:
        """A step with all of these in it, whose prompts were sent before."""
        short_s = await self.together(cached, SHORT_OUTPUT)
        long_s = await self.together(cached, LONG_OUTPUT)
        return (long_s - short_s) / (LONG_OUTPUT - SHORT_OUTPUT)

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Never sent before."""
        first = self._made
        self._made += count
        return [self._streams.ids(f"fit/{self._number}/{first + n}", tokens) for n in range(count)]

    async def together(self, prompts: Sequence[Sequence[int]], output: int) -> float:
        began_s = time.perf_counter()
        return await self._answered(prompts, output) - began_s

    async def _answered(self, prompts: Sequence[Sequence[int]], output: int) -> float:
        """When the last was."""
        await asyncio.gather(*(self._post(prompt, output) for prompt in prompts))
        return time.perf_counter()

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
    urls: Sequence[str],
    *,
    model: str | None,
    longest_prompt: int,
    budget_tokens: int,
    vocab_size: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> Measurements:
    """`budget_tokens`: the engines' max_num_batched_tokens."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        probes = [
            Probe(
                http,
                url,
                model=model or await _served_model(http, url),
                vocab_size=vocab_size,
                seed=seed,
                number=number,
            )
            for number, url in enumerate(urls)
        ]
        return await _measure(probes, longest_prompt, budget_tokens, progress)


async def _measure(
    probes: Sequence[Probe], longest_prompt: int, budget_tokens: int, progress: Callable[[int, int], None]
) -> Measurements:
    lengths = [n for n in (64, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768) if n < longest_prompt]
    lengths.append(longest_prompt)
    long_prompt = min(longest_prompt, 2048)
    shapes = [(d, SHORT_PROMPT) for d in SEQUENCES] + [(d, long_prompt) for d in SEQUENCES[:2]]
    total = len(lengths) + len(JOINED) + len(shapes)
    seen = Measurements([], [], [])
    # A prompt of one full step leaves no room in it, so what comes behind it has the next one.
    blocker = min(longest_prompt, budget_tokens)

    def done() -> None:
        progress(len(seen.prefills) + len(seen.joined) + len(seen.decodes), total)

    # The first request of an engine compiles and connects, and as many as will ever be open at once do.
    await asyncio.gather(*(probe.together(probe.prompts(SEQUENCES[-1], SHORT_PROMPT), 2) for probe in probes))
    for tokens in lengths:
        seen.prefills.append(Prefill(tokens, await _at_once([partial(each.prefill_s, tokens) for each in probes])))
        done()
    for prompts in JOINED:
        seconds = await _at_once([partial(each.joined_s, prompts, blocker) for each in probes])
        seen.joined.append(Joined(prompts, JOINED_PROMPT, seconds))
        done()
    for sequences, tokens in shapes:
        cached = [each.prompts(sequences, tokens) for each in probes]
        await asyncio.gather(*(each.together(prompts, 1) for each, prompts in zip(probes, cached, strict=True)))
        seconds = await _at_once(
            [partial(each.decode_s, prompts) for each, prompts in zip(probes, cached, strict=True)]
        )
        context = tokens + (SHORT_OUTPUT + LONG_OUTPUT) // 2
        seen.decodes.append(Decode(sequences, sequences * context, seconds))
        done()
    return seen


async def _at_once(measurements: Sequence[Callable[[], Awaitable[float]]]) -> float:
    """Their mean, each under the load of the others; the median over repeats."""
    return median([fmean(await asyncio.gather(*(each() for each in measurements))) for _ in range(REPEATS)])


async def _served_model(http: aiohttp.ClientSession, url: str) -> str:
    base = url.rstrip("/").removesuffix("/v1")
    try:
        async with http.get(f"{base}/v1/models") as response:
            return str(msgspec.json.decode(await response.read())["data"][0]["id"])
    except (aiohttp.ClientError, msgspec.DecodeError, LookupError, TypeError) as error:
        raise ConfigError(f"{base}/v1/models names no model ({error!r}); give one", reason="target_failed") from error
