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


class Driver(Generic[T]):
    def __init__(self, limiter: Limiter, open_one: Callable[[frozenset[str]], SessionContext], done: Done[T]) -> None:
        """`open_one` makes a session of one of several classes, which is known when it is entered."""
        self._limiter = limiter
        self._open_one = open_one
        self._done = done

    async def run(self, rollouts: Mapping[str, Source[T]], sessions: int | None) -> int:
        """The number of rollouts that were started: `sessions`, or all there are."""
        sources = {workload: _source(given) for workload, given in rollouts.items()}
        started = 0
        try:
            async with asyncio.TaskGroup() as tasks:
                while sources and (sessions is None or started < sessions):
                    context = self._open_one(frozenset(sources))
                    workload = (await context.__aenter__()).workload or ""
                    try:
                        rollout = await _next_of(sources[workload])
                        if rollout is not None:
                            session = await context.describe(rollout.group, rollout.expected_tokens)
                    except BaseException:
                        context.close(failed=True, played=False)
                        raise
                    if rollout is None:
                        context.close(failed=False, played=False)
                        del sources[workload]
                        self._limiter.slots.retire(rollouts.keys() - sources.keys())
                        continue
                    started += 1
                    task = tasks.create_task(self._play(context, session, rollout))
                    # A task that is cancelled before its first step never runs: its session would stay open.
                    task.add_done_callback(partial(_close, context))
        finally:
            self._limiter.slots.retire(())
            self._limiter.grant()
        return started

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


def _close(context: SessionContext, task: asyncio.Task[None]) -> None:
    context.close(failed=True)


def _source(given: Source[T]) -> Any:
    return given if isinstance(given, AsyncIterator) else iter(given)


async def _next_of(source: Any) -> Rollout[Any] | None:
    """The next one; None: there are no more."""
    if isinstance(source, AsyncIterator):
        found = await anext(source, None)
    else:
        found = next(source, None)
    return found if found is None or isinstance(found, Rollout) else Rollout(found)
