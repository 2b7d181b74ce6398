"""A closed-loop load of sessions on a live endpoint: any OpenAI-compatible router or engine.

K sessions are in flight; whenever one ends, the trainer releases the next (see `sim.workload`). All K start at once, as
a trainer's do. Two ways to stop:

- a measured window of `duration_s` after `warmup_s`; sessions still open at its end are cut off and count as open;
- a fixed number of sessions, run to their ends; the window is the whole run.

Durations are wall seconds; everything in the result is in model time, wall time x the engines' time scale. The driver
shares the machine with what it measures, so its own CPU use in the window is part of the result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec

from tidegate.bench.client import ClientOptions, RolloutClient
from tidegate.bench.scrape import EngineFacts, EngineTotals, engine_facts, engine_totals, hold_buckets
from tidegate.errors import ConfigError
from tidegate.sim.prompts import TokenStreams
from tidegate.sim.score import Score, SessionRecord, Window, hold_percentiles, score
from tidegate.sim.workload import DeficitRelease, SessionPlan, SessionStream, Workload

# Below vLLM's own 5 s: a connection that the server is closing would fail a request.
KEEP_ALIVE_S = 4.0
# A target that fails every session must not be hammered, and a run of nothing but failures is no measurement.
FAILED_SESSION_WAIT_S = 0.5
MAX_FAILURES_IN_A_ROW = 100


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    client: ClientOptions
    concurrency: int
    duration_s: float = 60.0
    warmup_s: float = 15.0
    sessions: int | None = None  # a fixed number instead of a window
    engine_urls: tuple[str, ...] = ()
    seed: int = 0
    vocab_size: int = 2048


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    score: Score
    errors: dict[str, int]
    outputs_guessed: int
    engines: EngineTotals | None  # gained in the window
    engine_hit_rate: float | None  # the engines' own count, lookups of the driver's and any other client's
    time_scale: float
    requests_per_wall_s: float
    driver_cpu_share: float  # CPU seconds of this process per wall second
    sessions: list[SessionRecord]


class LoadDriver:
    """One run. `progress` is called with the sessions ended so far, a few times a second."""

    def __init__(self, workload: Workload, options: LoadOptions) -> None:
        self._workload = workload
        self._options = options
        self._stream = SessionStream(workload, DeficitRelease(workload.shares))
        self._released = 0
        self._failures_in_a_row = 0
        self._open: dict[int, tuple[SessionPlan, float]] = {}
        self.ended: list[SessionRecord] = []

    async def run(self, sampler: Callable[[RolloutClient], Awaitable[None]] | None = None) -> LoadResult:
        """`sampler` runs beside the load and is cancelled at its end."""
        options = self._options
        async with http_session() as http:
            streams = TokenStreams(options.seed, options.vocab_size)
            client = RolloutClient(http, options.client, streams)
            load = asyncio.gather(*(self._rollouts(client) for _ in range(options.concurrency)))
            beside = asyncio.ensure_future(sampler(client)) if sampler else None
            try:
                result = await self._measure(http, client, load)
            finally:
                await _cancelled(load)
                if beside is not None:
                    await _cancelled(beside)
                await client.settle()
        return result

    async def _measure(
        self, http: aiohttp.ClientSession, client: RolloutClient, load: asyncio.Future[list[None]]
    ) -> LoadResult:
        options = self._options
        if options.sessions is None:
            await _sleep_beside(load, options.warmup_s)
        start = await self._edge(http, client)
        if options.sessions is None:
            await _sleep_beside(load, options.duration_s)
        else:
            await load
        return self._result(client, start, await self._edge(http, client))

    async def _edge(self, http: aiohttp.ClientSession, client: RolloutClient) -> _Edge:
        at_s, cpu_s = client.now_s(), time.process_time()
        options = self._options
        engines, holds = await asyncio.gather(
            engine_totals(http, options.engine_urls), hold_buckets(http, options.client.url)
        )
        return _Edge(at_s=at_s, cpu_s=cpu_s, engines=engines, holds=holds)

    async def _rollouts(self, client: RolloutClient) -> None:
        limit = self._options.sessions
        while limit is None or self._released < limit:
            number = self._released
            self._released += 1
            plan = self._stream.next_session()
            started_s = client.now_s()
            self._open[number] = (plan, started_s)
            completed = await client.run(plan)
            del self._open[number]
            self.ended.append(
                SessionRecord(workload=plan.workload, started_s=started_s, ended_s=client.now_s(), completed=completed)
            )
            await self._check_failures(client, completed)

    async def _check_failures(self, client: RolloutClient, completed: bool) -> None:
        if completed:
            self._failures_in_a_row = 0
            return
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            kinds = ", ".join(f"{kind} x{count}" for kind, count in client.errors.most_common(3))
            raise ConfigError(f"{self._failures_in_a_row} sessions in a row failed: {kinds}", reason="target_failed")
        await asyncio.sleep(FAILED_SESSION_WAIT_S)

    def _result(self, client: RolloutClient, start: _Edge, end: _Edge) -> LoadResult:
        scale = self._options.client.time_scale
        window = Window(start.at_s, end.at_s)
        engines = end.engines.since(start.engines) if self._options.engine_urls else None
        still_open = [
            SessionRecord(workload=plan.workload, started_s=at_s, ended_s=None) for plan, at_s in self._open.values()
        ]
        sessions = [*self.ended, *still_open]
        wall_s = window.length_s / scale
        return LoadResult(
            score=score(
                sessions,
                client.requests,
                self._workload.shares,
                window,
                holds_s=_hold_percentiles(start, end, scale),
                preemptions=None if engines is None else engines.preemptions,
            ),
            errors=dict(client.errors),
            outputs_guessed=client.outputs_guessed,
            engines=engines,
            engine_hit_rate=_ratio(engines),
            time_scale=scale,
            requests_per_wall_s=sum(r.ended_s in window for r in client.requests) / wall_s,
            driver_cpu_share=(end.cpu_s - start.cpu_s) / wall_s,
            sessions=sessions,
        )


class _Edge(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    cpu_s: float
    engines: EngineTotals
    holds: dict[float, float] | None


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has to know of its target before it starts."""

    model: str
    facts: EngineFacts


async def inspect_target(url: str, engine_urls: tuple[str, ...], model: str | None) -> Target:
    async with http_session() as http:
        facts = await engine_facts(http, engine_urls)
        return Target(model=model or await _served_model(http, url), facts=facts)


def http_session() -> aiohttp.ClientSession:
    """No limit on connections and no timeouts: a gate may hold a request for as long as it likes."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None),
    )


async def _served_model(http: aiohttp.ClientSession, url: str) -> str:
    try:
        async with http.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(total=30)) as response:
            models = msgspec.json.decode(await response.read())
            return str(models["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, LookupError, TypeError) as error:
        raise ConfigError(f"{url}/v1/models names no model ({error!r}); give one", reason="target_failed") from error


async def _sleep_beside(load: asyncio.Future[list[None]], for_s: float) -> None:
    """Sleep while the load runs; its failure ends the sleep."""
    done, _ = await asyncio.wait([load], timeout=for_s)
    if done:
        load.result()


async def _cancelled(task: asyncio.Future[list[None]] | asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # seen here; the run's own error is raised by whoever waits for it


def _hold_percentiles(start: _Edge, end: _Edge, time_scale: float) -> tuple[float, float] | None:
    return None if end.holds is None else hold_percentiles(start.holds or {}, end.holds, time_scale)


def _ratio(engines: EngineTotals | None) -> float | None:
    if engines is None or engines.cached_tokens is None or not engines.prompt_tokens:
        return None
    return engines.cached_tokens / engines.prompt_tokens
