"""RolloutScheduler: what a trainer imports.

    async with RolloutScheduler("http://gate:8080", mixture={"agentic": 0.3, "rlvr": 0.7}) as gate:
        async with gate.session(workload="agentic") as s:           # waits for a slot
            client = AsyncOpenAI(base_url=s.base_url, default_headers=s.headers, api_key="none")
            ...                                                     # turns
        # the gate has been told that the session is over, whichever way the block was left

How many sessions may be in flight is the gate's advice (feed.py), of which class the next one is the mixture's
(slots.py). Without a gate (`base_url` None, or nobody answers) it is a plain limiter of `sessions`.

Structured: what it starts (the poll of the advice, finish calls) lives in its `async with` and has ended when that is
left. Everything may be cancelled at any await: a slot is given back, a session finished, exactly once. It belongs to
the event loop that it was entered on; asyncio, or anyio on top of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from tidegate.client.courier import Courier
from tidegate.client.driver import Done, Driver, Source
from tidegate.client.errors import GateError, GateRefused, SchedulerClosed
from tidegate.client.feed import Feed
from tidegate.client.gate_api import GateApi, transient
from tidegate.client.limiter import Limiter
from tidegate.client.pausing import Callback, Pausing
from tidegate.client.progress import ProgressBar
from tidegate.client.session import SessionContext
from tidegate.client.sessions import Sessions
from tidegate.client.shielded import finish_first
from tidegate.client.slots import Label, Limits, Slots
from tidegate.client.stats import Stats

T = TypeVar("T")

log = logging.getLogger("tidegate.client")

POLL_S = 5.0  # advice moves with residencies; it is lost for as long when a replica dies
CLOSE_S = 5.0  # for finish calls that are under way when the scheduler is left
RESUME_S = 60.0  # for a resume on the way out of an error; replicas answer at once, or not at all


class RolloutScheduler:
    def __init__(
        self,
        base_url: str | None,
        *,
        mixture: Mapping[str, float] | None = None,
        sessions: int | Mapping[str, int] = 64,
        max_sessions: int | None = None,
        part: float = 1.0,
        poll_s: float = POLL_S,
        on_pause: Callback | None = None,
        on_resume: Callback | None = None,
        progress: bool = False,
        headers: Mapping[str, str] | None = None,
        close_s: float = CLOSE_S,
    ) -> None:
        """`base_url`: of the gate, with or without /v1; None: there is none.
        `mixture`: the share of the rollouts that each class shall have; scaled to a sum of 1, and told to the gate.
        `sessions`: at most so many in flight while there is no advice; by class, if it is a mapping.
        `max_sessions`: never more, whatever is advised.
        `part`: of the pool that is this scheduler's, 0 to 1; a trainer of 8 processes gives each 1 / 8, because the
        gate advises for all of them together.
        `poll_s`: seconds between two looks at the advice.
        `on_pause`, `on_resume`: called (awaited, if async) when the pool is paused for new weights and goes on.
        `progress`: a progress bar on stderr.
        `headers`: with each call to the gate, an Authorization say; they are not in a session's headers.
        `close_s`: seconds that leaving the scheduler waits for finish calls at most.
        ValueError: a mixture, number or URL that is none."""
        fixed = _fixed_limits(sessions)
        if max_sessions is not None and max_sessions < 1:
            raise ValueError(f"at most {max_sessions} sessions")
        if poll_s <= 0:
            raise ValueError(f"a poll every {poll_s} s")
        if not 0 < part <= 1:
            raise ValueError(f"a part of {part} of the sessions")
        self._api = None if base_url is None else GateApi(base_url, headers=headers)
        self._slots = Slots(_at_most(fixed, max_sessions), mixture)
        self._limiter = Limiter(self._slots)
        self._pausing = Pausing(self._api, self._limiter, on_pause, on_resume)
        self._courier = None if self._api is None else Courier(self._api)
        self._sessions = Sessions(self._limiter, self._courier, self.base_url, self._show)
        self._feed = None if self._api is None else self._make_feed(self._api, fixed, part, max_sessions, poll_s)
        self._bar = ProgressBar(self.stats) if progress else None
        self._polling: asyncio.Task[None] | None = None
        self._close_s = close_s
        self._entered = False

    def _make_feed(self, api: GateApi, fixed: Limits, part: float, max_sessions: int | None, poll_s: float) -> Feed:
        return Feed(
            api,
            fixed,
            part=part,
            max_sessions=max_sessions,
            poll_s=poll_s,
            set_limits=self._limiter.set_limits,
            tell_mixture=self._tell_mixture,
            observed_pause=self._pausing.observe,
        )

    # --- life --------------------------------------------------------------------------------------------------
    async def __aenter__(self) -> RolloutScheduler:
        """Asks for the advice once, so that the first session knows its limit; a gate that is away only takes a moment.
        GateRefused: it does not take the mixture."""
        if self._entered:
            raise RuntimeError("a scheduler is entered once; make another one")
        self._entered = True
        if self._bar is not None:
            self._bar.start()
        try:
            if self._api is not None and self._feed is not None:
                await self._api.open()
                await self._tell_mixture_first()
                await self._feed.poll()
                self._polling = asyncio.create_task(self._feed.run(), name="advice")
        except BaseException:
            await finish_first(self._close(), self._close_s + 1.0)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await finish_first(self._close(), self._close_s + 1.0)

    async def _close(self) -> None:
        self._limiter.close()
        try:
            if self._polling is not None:
                self._polling.cancel()
                await asyncio.gather(self._polling, return_exceptions=True)
            if self._courier is not None:
                await self._courier.settle(self._close_s)
        finally:
            if self._api is not None:
                await self._api.close()
            if self._bar is not None:
                self._bar.stop()

    # --- sessions ----------------------------------------------------------------------------------------------
    def session(
        self,
        workload: str | None = None,
        *,
        group: str | None = None,
        expected_tokens: int | None = None,
        id: str | None = None,
    ) -> SessionContext:
        """`async with` it: waits for a slot of the class, gives the Session, and finishes it on every way out.

        `workload` None: with a mixture, whichever class is owed most (`session.workload` says which); without one, a
        session without a class. `group`: sessions of one prompt, a GRPO group. `expected_tokens`: how large its context
        will become, if you know. `id`: instead of one made here. SchedulerClosed: too late."""
        if not self._entered:
            raise SchedulerClosed("enter the scheduler first: `async with RolloutScheduler(...) as gate`")
        among = frozenset(self._slots.shares) if workload is None and self._slots.shares else None
        return SessionContext(self._sessions, workload, group, expected_tokens, id, among=among)

    def next_class(self) -> str:
        """The class that the mixture is owed most now: for a trainer that draws its prompts before it opens sessions.
        Each call counts as a session of that class; open one for each. ValueError: there is no mixture."""
        return self._slots.pick()

    async def run(self, rollouts: Mapping[str, Source[T]], done: Done[T], *, sessions: int | None = None) -> int:
        """Run rollouts of several classes in the order of the mixture, as many at once as may be in flight.

        `rollouts`: by class, an iterable or async iterator of `async def rollout(session)`, or of `Rollout`s. A class
        that has no more leaves its part to the others. `done`: called (awaited, if async) with each `Outcome`; a
        rollout that raised is one of them. `sessions`: at most so many; None: until there are no more rollouts. Returns
        how many were started. ValueError: the classes are not those of the mixture."""
        unknown = rollouts.keys() ^ self._slots.shares.keys() if self._slots.shares else set()
        if unknown:
            raise ValueError(f"classes of the rollouts and of the mixture differ in {', '.join(sorted(unknown))}")
        if self._bar is not None:
            self._bar.total = sessions
        driver = Driver[T](self._limiter, lambda among: SessionContext(self._sessions, among=among), done)
        return await driver.run(rollouts, sessions)

    @property
    def base_url(self) -> str | None:
        """For OpenAI clients: ends in /v1. None: there is no gate."""
        return None if self._api is None else f"{self._api.root}/v1"

    def stats(self) -> Stats:
        slots = self._slots
        return Stats(
            source="fixed" if self._feed is None else self._feed.source,
            limit=slots.limits.sessions,
            in_flight=slots.total,
            paused=self._pausing.paused,
            unfinished=0 if self._courier is None else self._courier.unfinished,
            classes=self._sessions.by_class(),
            tv_distance=self._sessions.tv_distance(),
        )

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.update()

    # --- the mixture -------------------------------------------------------------------------------------------
    async def set_mixture(self, mixture: Mapping[str, float]) -> None:
        """Another contract, from now on: nothing is owed from before. ValueError: it is none. GateError: the gate has
        not heard of it; here it holds already, and the gate is told again when it has restarted."""
        self._slots.set_mixture(mixture)
        self._limiter.grant()
        await self._tell_mixture()

    async def _tell_mixture(self) -> bool:
        if self._api is None or not self._slots.shares:
            return False
        await self._api.set_mixture(self._slots.shares)
        return True

    async def _tell_mixture_first(self) -> None:
        try:
            await self._tell_mixture()
        except GateError as error:
            if not transient(error) and not _is_no_gate(error):
                raise
            log.debug("the mixture was not told: %s", error)

    # --- weight updates ----------------------------------------------------------------------------------------
    @property
    def paused(self) -> bool:
        """Whether the pool is paused, by this scheduler or by somebody else; no session starts then."""
        return self._pausing.paused

    async def pause(self, *, mode: str | None = "keep", path: str = "/pause") -> None:
        """Start no session, call `on_pause`, and pause the replicas through the gate.

        `mode`: vLLM's, as a query; keep: requests under way stop where they are and go on after; None: the engine's
        default. `path`: SGLang's is /pause_generation. GateError: some replicas may be paused; it stays paused here,
        until `resume` or another try."""
        await self._pausing.pause(path, mode)

    async def update_weights(self, body: Any = None, *, path: str = "/update_weights") -> Any:
        """A call of the engines' own, to all replicas through the gate; gives its report. For as long as it takes.
        GateError: it did not succeed on every replica."""
        return await self._pausing.update_weights(path, body)

    async def resume(self, *, path: str = "/resume") -> None:
        """Let the replicas go on, start sessions again, and call `on_resume`. SGLang's path is /continue_generation.
        GateError: it stays paused, and may be tried again."""
        await self._pausing.resume(path)

    @asynccontextmanager
    async def pausing(
        self, *, mode: str | None = "keep", path: str = "/pause", resume_path: str = "/resume"
    ) -> AsyncIterator[None]:
        """`pause` around a block, and `resume` on every way out of it, a cancellation included."""
        try:
            await self.pause(mode=mode, path=path)
            yield
        except BaseException:
            try:
                await finish_first(self.resume(path=resume_path), RESUME_S)
            except GateError as error:
                log.error("the pool is still paused: %s", error)
            raise
        await finish_first(self.resume(path=resume_path), RESUME_S)


def _is_no_gate(error: GateError) -> bool:
    """What answers knows no /mixture: an engine itself, say. The limits are fixed ones then."""
    return isinstance(error, GateRefused) and error.status in (404, 405)


def _fixed_limits(sessions: int | Mapping[str, int]) -> Limits:
    numbers = [sessions] if isinstance(sessions, int) else list(sessions.values())
    if not numbers or min(numbers) < 1:
        raise ValueError(f"at least one session: {sessions!r}")
    if isinstance(sessions, int):
        return Limits(sessions)
    classes: dict[Label, int] = dict(sessions.items())
    return Limits(sum(numbers), classes, hard=True)


def _at_most(limits: Limits, sessions: int | None) -> Limits:
    return limits if sessions is None else replace(limits, sessions=min(sessions, limits.sessions))
