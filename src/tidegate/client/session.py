"""A session as a rollout sees it: what to put into its client, for as long as the `async with` lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType, TracebackType
from typing import Protocol
from uuid import uuid4

from tidegate.client.slots import Label

SESSION_HEADER, CLASS_HEADER, GROUP_HEADER = "X-Session-ID", "X-Workload-Class", "X-Group-ID"
MAX_LABEL_BYTES = 256  # of an id, a class, a group: the gate refuses longer ones


@dataclass(frozen=True, eq=False)
class Session:
    """One rollout's trajectory.

    Give `base_url` and `headers` to the client: `AsyncOpenAI(base_url=s.base_url, default_headers=s.headers, ...)`, or
    `extra_headers=s.headers` on each call of a client that is shared. `base_url` ends in /v1, and is None without a
    gate."""

    id: str
    workload: str | None
    group: str | None
    base_url: str | None
    expected_tokens: int | None = None
    _adopt: Callable[[str], None] = field(default=lambda id: None, repr=False)

    @property
    def headers(self) -> Mapping[str, str]:
        """What tells the gate whose request it is."""
        named = {SESSION_HEADER: self.id, CLASS_HEADER: self.workload, GROUP_HEADER: self.group}
        return MappingProxyType({name: value for name, value in named.items() if value is not None})

    def adopt(self, id: str) -> None:
        """The rollout's requests carry this id instead of `self.id`: for clients that make their own (verifiers' trace
        ids). The gate is told its class, and that it is over when this session is. May be called again, for further
        ids. Returns at once. ValueError: an id that no request can carry."""
        check_label("session id", id)
        self._adopt(id)


class Host(Protocol):
    """Who gives out slots and tells the gate."""

    base_url: str | None

    async def enter(self, workload: Label, among: frozenset[str] | None) -> Label: ...
    def announce(self, session: Session, id: str) -> asyncio.Task[None] | None:
        """Under way when this returns; None: there is nobody to tell."""
        ...

    def leave(self, workload: Label, ids: list[str], *, failed: bool, played: bool) -> None: ...


class SessionContext:
    """`async with` it, once. Leaving never waits and never raises: the gate is told in the background."""

    def __init__(
        self,
        host: Host,
        workload: Label = None,
        group: str | None = None,
        expected_tokens: int | None = None,
        id: str | None = None,
        *,
        among: frozenset[str] | None = None,
    ) -> None:
        """`among`: of one of these classes, whichever is to go next, instead of `workload`."""
        _check(workload, group, expected_tokens)
        if id is not None:
            check_label("session id", id)
        self._host = host
        self._among = among
        self._ids: list[str] = []  # that the gate may know it by
        self._adopted = False
        self._open: bool | None = None  # None: not entered yet
        self._session = Session(
            uuid4().hex if id is None else id, workload, group, host.base_url, expected_tokens, self._adopt
        )

    async def __aenter__(self) -> Session:
        if self._open is not None:
            raise RuntimeError("a session is entered once; make another one")
        self._open = False
        workload = await self._host.enter(self._session.workload, self._among)
        self._open = True
        self._session = replace(self._session, workload=workload)
        self._ids = [self._session.id]
        try:
            await self._tell()
        except BaseException:
            self.close(failed=True)
            raise
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool, played: bool = True) -> None:
        """Idempotent. `played` False: nothing was made of it."""
        if self._open:
            self._open = False
            told = self._ids if played or self._session.expected_tokens is not None else []
            self._host.leave(self._session.workload, told, failed=failed, played=played)

    async def describe(self, group: str | None, expected_tokens: int | None) -> Session:
        """What only became known after its class was."""
        _check(None, group, expected_tokens)
        self._session = replace(self._session, group=group, expected_tokens=expected_tokens)
        await self._tell()
        return self._session

    async def _tell(self) -> None:
        """Its size is known by an announcement only; all else the headers say."""
        if self._session.expected_tokens is not None:
            announcing = self._host.announce(self._session, self._session.id)
            if announcing is not None:
                await asyncio.shield(announcing)  # half an announcement might arrive after the end

    def _adopt(self, id: str) -> None:
        if not self._open:
            return
        if not self._adopted and self._session.expected_tokens is None:
            self._ids.clear()  # its own was neither announced nor used
        self._adopted = True
        if id not in self._ids:
            self._ids.append(id)
            self._host.announce(self._session, id)


def _check(workload: Label, group: str | None, expected_tokens: int | None) -> None:
    for what, label in (("workload class", workload), ("group", group)):
        if label is not None:
            check_label(what, label)
    if expected_tokens is not None and expected_tokens < 0:
        raise ValueError(f"{expected_tokens} expected tokens")


def check_label(what: str, label: str) -> None:
    """ValueError for one that the gate would refuse, or that no header can carry."""
    if not label or len(label.encode()) > MAX_LABEL_BYTES or any(ord(char) < 32 or ord(char) == 127 for char in label):
        raise ValueError(f"{what} {label[:64]!r}: 1 to {MAX_LABEL_BYTES} bytes, no control characters")
