"""Watches one replica: scrapes its numbers, probes its health, and says what it saw as events.

`run` is one task for the life of the replica in the pool; cancel it to stop. What the data path learns on its way
(`connect_failed`, `response_ok`, `saw_empty_abort`) comes in by calls. All thresholds are in `health`; nothing here
decides about requests.

Events: ReplicaSample for each scrape, ReplicaHealth when usability or its reason changes, ReplicaReset when the
replica's caches were lost (restart, sleep, a pause made at the engine), ReplicaResidency from its KV events.

While the gate itself holds the pool paused (`suspend` .. `resume`) nothing counts against the replica: it may be busy
with a weight transfer that a probe must not disturb.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import aiohttp
import msgspec

from tidegate.clock import Clock
from tidegate.config.engines import EnginesConfig
from tidegate.engines import detect
from tidegate.engines.base import EngineAdapter, KvSource, configured_kv_sources
from tidegate.engines.discovery import host_of
from tidegate.engines.health import Health, State, Verdict
from tidegate.engines.kv_events import KvEvents, KvEventsView
from tidegate.engines.probe import Answer, Unanswered, get
from tidegate.engines.prometheus import Reading, parse
from tidegate.types import AnyEvent, ReplicaHealth, ReplicaId, ReplicaReset, ReplicaSample

Sink = Callable[[AnyEvent], None]

_JITTER = 0.1  # of a period, so that scrapes of many replicas spread out
_DETECT_PERIOD_S = 30.0  # an engine that tells nothing of itself is asked again after this
_MAX_METRICS_BYTES = 16 * 2**20


class MonitorView(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as its monitor sees it, for /state and the workers API."""

    url: ReplicaId
    engine: str | None
    state: State
    reason: str
    since_s: float  # in this state
    last_error: str | None
    sample_age_s: float | None
    kv_capacity_tokens: int | None
    engine_paused: bool | None  # None: it does not tell
    suspended: bool
    kv_events: KvEventsView


class ReplicaMonitor:
    def __init__(
        self,
        url: ReplicaId,
        config: EnginesConfig,
        sink: Sink,
        clock: Clock,
        client: aiohttp.ClientSession,
        *,
        last_usable: Callable[[], bool] = lambda: False,
        rng: random.Random | None = None,
    ) -> None:
        """`last_usable` says whether no other replica may take requests."""
        self.url = url
        self.adapter: EngineAdapter | None = None
        self.reading: Reading | None = None
        self.engine_paused: bool | None = None
        self._config = config
        self._sink = sink
        self._clock = clock
        self._client = client
        self._last_usable = last_usable
        self._rng = rng or random.Random()
        self._health = Health(config)
        self._kv_events = KvEvents(url, config, clock, self._capacity_tokens)
        self._read_at_s: float | None = None
        self._detected_at_s: float | None = None
        self._tells_pause = True
        self._suspended = False
        self._scraping = asyncio.Lock()  # readings are taken in the order in which they were made
        self._probed = asyncio.Event()
        self._probe_now = asyncio.Event()
        self._verdict = Verdict(State.STARTING, "starting")
        self._since_s = clock.now_s()

    # --- what the data path and the driver tell -------------------------------------------------------------------
    def connect_failed(self, error: str) -> None:
        if not self._suspended:
            self._health.connect_failed(self._clock.now_s(), error)
            if self._verdict.usable:
                self._probe_now.set()
            self._publish()

    def response_ok(self) -> None:
        """A request was answered, with any status. Cheap: called for each."""
        self._health.response_ok()
        if self._verdict.state is State.HALF_OPEN:
            self._publish()

    def saw_empty_abort(self) -> None:
        """A 200 with finish_reason abort and no text: the replica drains. Not to be told of requests that the gate,
        or somebody through it, aborted."""
        if not self._suspended:
            self._health.empty_abort(self._clock.now_s())
            self._publish()

    def suspend(self) -> None:
        self._suspended = True

    def resume(self) -> None:
        self._suspended = False
        self._set_paused(None)
        self._probe_now.set()

    def caches_cleared(self) -> None:
        """A control call through the gate emptied the replica's prefix cache."""
        self._kv_events.doubt()

    async def wait_probed(self, timeout_s: float) -> Verdict:
        """The verdict after the first probe, or what is known by then."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._probed.wait()
        except TimeoutError:
            pass
        return self._verdict

    @property
    def state(self) -> State:
        return self._verdict.state

    def lost_before_s(self) -> float | None:
        return None if self._suspended else self._health.lost_before_s(self._clock.now_s())

    def view(self) -> MonitorView:
        now_s = self._clock.now_s()
        age_s = None if self._read_at_s is None else now_s - self._read_at_s
        return MonitorView(
            url=self.url,
            engine=self.adapter.name if self.adapter else None,
            state=self._verdict.state,
            reason=self._verdict.reason,
            since_s=now_s - self._since_s,
            last_error=self._health.last_error,
            sample_age_s=age_s,
            kv_capacity_tokens=self._capacity_tokens(),
            engine_paused=self.engine_paused,
            suspended=self._suspended,
            kv_events=self._kv_events.view(),
        )

    # --- the task ---------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._probe_forever())
            tasks.create_task(self._scrape_forever())
            if self._config.kv_events != "off":
                tasks.create_task(self._kv_events.run(self._find_kv_sources, self._sink))

    async def _probe_forever(self) -> None:
        while True:
            self._probe_now.clear()
            await self._probe()
            if self._health.verdict(self._clock.now_s()).usable and not self._verdict.usable:
                await self._scrape()  # whether it restarted must be told before requests go there again
            self._publish()
            self._probed.set()
            try:
                async with asyncio.timeout(self._jittered(self._config.health_period_s)):
                    await self._probe_now.wait()
            except TimeoutError:
                pass

    async def _scrape_forever(self) -> None:
        while True:
            await self._scrape()
            self._publish()
            await asyncio.sleep(self._jittered(self._config.scrape_period_s))

    # --- health -----------------------------------------------------------------------------------------------------
    async def _probe(self) -> None:
        adapter = self.adapter or detect.DEFAULT
        await self._probe_pause(adapter)
        if self.engine_paused:
            self._health.probe_ok()  # it said so
        if self._suspended or self.engine_paused:
            return  # a paused SGLang answers no health probe, and any engine may be busy with weights
        answer = await self._get(adapter.health_path, self._config.health_timeout_s)
        if self._suspended:
            return
        now_s = self._clock.now_s()
        if isinstance(answer, Unanswered):
            if answer.kind is not None:
                self._health.probe_failed(now_s, answer.kind, answer.error)
        elif answer.status >= 500:
            self._health.probe_failed(now_s, "status", f"{adapter.health_path} answered {answer.status}")
        else:
            self._health.probe_ok()

    async def _probe_pause(self, adapter: EngineAdapter) -> None:
        if not self._tells_pause:
            return
        answer = await self._get(adapter.pause_probe_path, self._config.health_timeout_s)
        if isinstance(answer, Unanswered):
            if answer.kind == "connect":
                self._set_paused(None)  # whatever it was, it is gone; the health probe tells why
            return
        was_healthy = self._verdict.usable or self.engine_paused is True
        if answer.status in (401, 403, 404, 405):
            self._tells_pause = False
        self._set_paused(adapter.paused(answer.status, answer.body, was_healthy=was_healthy))

    def _set_paused(self, paused: bool | None) -> None:
        before, self.engine_paused = self.engine_paused, paused
        if self._suspended:
            return  # the gate's own pause
        self._health.paused(bool(paused))
        adapter = self.adapter
        if paused and not before and adapter is not None and adapter.pause_clears_cache:
            self._reset("paused_at_engine")

    # --- numbers ----------------------------------------------------------------------------------------------------
    async def _scrape(self) -> None:
        async with self._scraping:
            answer = await self._get("/metrics", self._config.scrape_timeout_s)
            if isinstance(answer, Unanswered):
                return
            text = answer.body.decode("utf-8", errors="replace") if answer.status == 200 else ""
            adapter = detect.by_metrics(text)
            if adapter is None:
                await self._scrape_without_metrics()
            else:
                self._adopt(adapter)
                self._read(adapter, text)

    def _read(self, adapter: EngineAdapter, text: str) -> None:
        try:
            samples = parse(text, adapter.metric_names)
        except ValueError as error:
            self._health.last_error = f"/metrics is not readable: {error}"
            return
        self._take(adapter.read(samples))

    async def _scrape_without_metrics(self) -> None:
        """An engine started without /metrics: what it is is asked now and then, and its numbers as it offers them."""
        now_s = self._clock.now_s()
        if self.adapter is None and (self._detected_at_s is None or now_s - self._detected_at_s >= _DETECT_PERIOD_S):
            self._detected_at_s = now_s
            self.adapter = await detect.detect(self._client, self.url, self._config.health_timeout_s)
        if self.adapter is None or self.adapter.loads_path is None:
            return
        answer = await self._get(self.adapter.loads_path, self._config.scrape_timeout_s)
        if isinstance(answer, Answer) and answer.status == 200:
            reading = self.adapter.read_loads(answer.body)
            if reading is not None:
                self._take(reading)

    def _adopt(self, adapter: EngineAdapter) -> None:
        if self.adapter is not adapter:
            self.adapter = adapter
            self._tells_pause = True

    def _take(self, reading: Reading) -> None:
        before, self.reading = self.reading, reading
        now_s = self._read_at_s = self._clock.now_s()
        if before is not None and _restarted(before, reading):
            self._tells_pause = True
            self._health.restarted()
            self._kv_events.restarted(reading.started_at_s)
            self._reset("restart")
        if reading.sleeping is not None:
            if reading.sleeping and not (before and before.sleeping):
                self._reset("sleep")
            self._health.sleeping(reading.sleeping)
        self._health.sampled(
            now_s,
            reading.running,
            reading.waiting,
            (reading.prompt_tokens_total, reading.generation_tokens_total),
        )
        self._sink(
            ReplicaSample(
                at_s=now_s,
                replica=self.url,
                kv_capacity_tokens=self._capacity_tokens(),
                kv_used_fraction=reading.kv_used_fraction,
                running=reading.running,
                waiting=reading.waiting,
                prompt_tokens_total=reading.prompt_tokens_total,
                cached_tokens_total=reading.cached_tokens_total,
                generation_tokens_total=reading.generation_tokens_total,
                preemptions_total=reading.preemptions_total,
            )
        )

    def _capacity_tokens(self) -> int | None:
        configured = self._config.kv_capacity_tokens_by_url.get(self.url, self._config.kv_capacity_tokens)
        if configured is not None:
            return configured
        return self.reading.kv_capacity_tokens if self.reading else None

    async def _find_kv_sources(self) -> list[KvSource] | None:
        host = host_of(self.url)
        configured = self._config.kv_event_endpoints.get(self.url)
        if configured is not None:
            return configured_kv_sources(configured, host, self._config.kv_event_ranks)
        if self.adapter is None:
            return None
        answer = await self._get(self.adapter.kv_sources_path, self._config.health_timeout_s)
        if isinstance(answer, Unanswered) or answer.status >= 500:
            return None
        return self.adapter.kv_sources(answer.body, host) if answer.status == 200 else []

    # --- telling ----------------------------------------------------------------------------------------------------
    def _publish(self) -> None:
        if self._suspended:
            return
        now_s = self._clock.now_s()
        verdict = self._health.verdict(now_s, self._last_usable)
        if verdict == self._verdict:
            return
        if verdict.state is not self._verdict.state:
            self._since_s = now_s
        self._verdict = verdict
        self._sink(ReplicaHealth(at_s=now_s, replica=self.url, usable=verdict.usable, reason=verdict.reason))

    def _reset(self, reason: str) -> None:
        if reason != "restart":
            self._kv_events.doubt()
        self._sink(ReplicaReset(at_s=self._clock.now_s(), replica=self.url, reason=reason))

    async def _get(self, path: str, timeout_s: float) -> Answer | Unanswered:
        return await get(
            self._client,
            f"{self.url}{path}",
            timeout_s=timeout_s,
            connect_timeout_s=min(self._config.connect_timeout_s, timeout_s),
            limit_bytes=_MAX_METRICS_BYTES,
        )

    def _jittered(self, period_s: float) -> float:
        return period_s * self._rng.uniform(1 - _JITTER, 1 + _JITTER)


def _restarted(before: Reading, now: Reading) -> bool:
    """Another start time, or a counter that went backwards."""
    if before.started_at_s is not None and now.started_at_s is not None:
        return now.started_at_s > before.started_at_s + 0.5  # the clock's own corrections are smaller
    pairs = (
        (before.prompt_tokens_total, now.prompt_tokens_total),
        (before.generation_tokens_total, now.generation_tokens_total),
    )
    return any(old is not None and new is not None and new < old for old, new in pairs)
