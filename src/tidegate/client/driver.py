"""Rollouts of several classes, started in the order that the mixture asks for, as many at once as may be.

A rollout that raises is data, not a crash: its exception is in its `Outcome`. What the caller's own code raises (an
iterator, `done`) ends the run, cancels the rollouts under way, and is raised; so does a cancellation. Whichever way it
ends, every session that was started has been finished, and no task is left.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from tidegate.client.limiter import Limiter
from tidegate.client.session import Session, SessionContext

T = TypeVar("T")

PATIENCE_S = 1.0  # a source that takes longer is one that waits for something: the others go on, ahead of their share

Play: TypeAlias = Callable[[Session], Awaitable[T]]


@dataclass(frozen=True)
class Rollout(Generic[T]):
    """A rollout with what the gate may know of it; a plain `async def play(session)` will do too."""

    play: Play[T]
    group: str | None = None
    expected_tokens: int | None = None


@dataclass(frozen=True)
class Outcome(Generic[T]):
    session: Session
    value: T | None
    error: Exception | None


Source: TypeAlias = "Iterable[Play[T] | Rollout[T]] | AsyncIterator[Play[T] | Rollout[T]]"
Done: TypeAlias = Callable[[Outcome[T]], "Awaitable[None] | None"]


class _Supply(Generic[T]):
    """The rollouts of one class, one ahead: a source that is slow does not hold up the others for long."""

    def __init__(self, source: Source[T]) -> None:
        self.over = False
        self.ready: Rollout[T] | None = None
        self.asking: asyncio.Task[Play[T] | Rollout[T] | None] | None = None
        self.asked_s = 0.0
        self._streamed = source if isinstance(source, AsyncIterator) else None
        self._listed = None if isinstance(source, AsyncIterator) else iter(source)

    def look(self) -> None:
        if self.ready is not None or self.over:
            return
        if self._listed is not None:
            self._got(next(self._listed, None))
        elif self.asking is None:
            self.asked_s = asyncio.get_running_loop().time()
            self.asking = asyncio.create_task(self._ask())
        elif self.asking.done():
            done, self.asking = self.asking, None
            self._got(done.result())

    async def _ask(self) -> Play[T] | Rollout[T] | None:
        assert self._streamed is not None
        return await anext(self._streamed, None)

    def _got(self, found: Play[T] | Rollout[T] | None) -> None:
        self.over = found is None
        self.ready = found if found is None or isinstance(found, Rollout) else Rollout(found)

    def take(self) -> Rollout[T]:
        ready, self.ready = self.ready, None
        assert ready is not None
        return ready


class Driver(Generic[T]):
    def __init__(self, limiter: Limiter, open_one: Callable[[frozenset[str]], SessionContext], done: Done[T]) -> None:
        """`open_one` makes a session of one of several classes, which is known when it is entered."""
        self._limiter = limiter
        self._open_one = open_one
        self._done = done
        self._supplies: dict[str, _Supply[T]] = {}

    async def run(self, rollouts: Mapping[str, Source[T]], sessions: int | None) -> int:
        """The number of rollouts that were started: `sessions`, or all there are."""
        self._supplies = {workload: _Supply(source) for workload, source in rollouts.items()}
        started = 0
        try:
            async with asyncio.TaskGroup() as tasks:
                while sessions is None or started < sessions:
                    asking = self._look()
                    ready = frozenset(name for name, supply in self._supplies.items() if supply.ready is not None)
                    if not ready and not asking:
                        break
                    patience_s = self._patience_s() if ready else None
                    if patience_s is None or patience_s > 0.0:
                        await asyncio.wait(asking, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                        continue
                    context = self._open_one(ready)
                    session = await _entered(context, asking)
                    if session is not None:
                        started += 1
                        await self._begin(tasks, context, self._supplies[session.workload or ""].take())
        finally:
            self._limiter.slots.retire(())
            self._limiter.grant()
            await _cancelled({supply.asking for supply in self._supplies.values() if supply.asking is not None})
        return started

    def _look(self) -> set[asyncio.Task[Any]]:
        """Those that are being asked for their next rollout."""
        for supply in self._supplies.values():
            supply.look()
        self._limiter.slots.retire([name for name, supply in self._supplies.items() if supply.over])
        return {supply.asking for supply in self._supplies.values() if supply.asking is not None}

    def _patience_s(self) -> float:
        """How much longer the others wait for classes that are owed a session and are being asked for it."""
        now_s, owed = asyncio.get_running_loop().time(), self._limiter.slots.owed
        owing = [one for name, one in self._supplies.items() if one.asking is not None and owed(name) >= 1.0]
        return max((one.asked_s + PATIENCE_S - now_s for one in owing), default=0.0)

    async def _begin(self, tasks: asyncio.TaskGroup, context: SessionContext, rollout: Rollout[T]) -> None:
        try:
            session = await context.describe(rollout.group, rollout.expected_tokens)
        except BaseException:
            context.close(failed=True, played=False)
            raise
        task = tasks.create_task(self._play(context, session, rollout))
        # A task that is cancelled before its first step never runs: its session would stay open.
        task.add_done_callback(partial(_close, context))

    async def _play(self, context: SessionContext, session: Session, rollout: Rollout[T]) -> None:
        value: T | None = None
        error: Exception | None = None
        try:
            value = await rollout.play(session)
        except Exception as exc:
            error = exc
        context.close(failed=error is not None)
        told = self._done(Outcome(session, value, error))
        if inspect.isawaitable(told):
            await told


def _close(context: SessionContext, task: asyncio.Task[Any]) -> None:
    context.close(failed=True)


async def _entered(context: SessionContext, asking: set[asyncio.Task[Any]]) -> Session | None:
    """None: before it was its turn, another class had a rollout, which may be owed more."""
    if not asking:
        return await context.__aenter__()
    entering = asyncio.create_task(context.__aenter__())
    try:
        await asyncio.wait({entering, *asking}, return_when=asyncio.FIRST_COMPLETED)
        if not entering.done():
            entering.cancel()
            await asyncio.wait({entering})
    except BaseException:
        entering.cancel()
        entering.add_done_callback(lambda _: context.close(failed=True, played=False))
        raise
    return None if entering.cancelled() else entering.result()


async def _cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
