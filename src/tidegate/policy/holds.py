"""Requests that wait: those of sessions not yet admitted, and those of admitted sessions that cannot run just now.

Order of admission is by class (`ClassLedger.queue`, first come first served); here are the requests themselves, oldest
first, so that a timeout looks at the head only.
"""

from __future__ import annotations

from collections import OrderedDict

from tidegate.policy.entities import Request, Session
from tidegate.types import RequestId


class Holds:
    __slots__ = ("_of", "continuations", "new")

    def __init__(self) -> None:
        self.new: OrderedDict[RequestId, Request] = OrderedDict()
        self.continuations: OrderedDict[RequestId, Request] = OrderedDict()
        self._of: dict[Session, OrderedDict[RequestId, Request]] = {}  # requests of sessions not yet admitted

    def __len__(self) -> int:
        return len(self.new) + len(self.continuations)

    def add_new(self, request: Request) -> None:
        self.new[request.id] = request
        self._of.setdefault(request.session, OrderedDict())[request.id] = request

    def add_continuation(self, request: Request) -> None:
        self.continuations[request.id] = request

    def first_of(self, session: Session) -> Request:
        return next(iter(self._of[session].values()))

    def remove(self, request: Request) -> None:
        """Harmless for a request that does not wait."""
        self.continuations.pop(request.id, None)
        if self.new.pop(request.id, None) is not None:
            waiting = self._of[request.session]
            del waiting[request.id]
            if not waiting:
                del self._of[request.session]

    def take_all_of(self, session: Session) -> list[Request]:
        """The requests that waited with the session, in order; they wait no longer."""
        taken = list(self._of.pop(session, {}).values())
        for request in taken:
            del self.new[request.id]
        return taken
