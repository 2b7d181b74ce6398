"""What a policy is asked, and what most policies share.

The scheduler owns the queue and the books; a policy answers two questions, and they are separate on purpose:

    enter(request)     may this NEW session enter, and on which replica?      -> Choice
    proceed(request)   may this request of an ADMITTED session run now, where? -> Replica, or the reason to wait

A policy that places by request (round_robin) answers both alike; one that pins sessions inherits `Sticky.proceed`; one
that pauses continuations at turn boundaries returns a reason from `proceed` and is asked again on every recheck. The
remaining hooks tell it what changed; books are already up to date when they are called.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from tidegate.policy.entities import ClassLedger, Replica, Request, Session
from tidegate.policy.ledger import Ledger
from tidegate.policy.params import CoreParams
from tidegate.policy.placement import Rotation
from tidegate.types import ReplicaResidency, ReplicaSample, RequestEnded

NO_INPUTS: dict[str, float] = {}


class Choice(NamedTuple):
    """Where a new session goes, or None and why not."""

    replica: Replica | None
    reason: str
    inputs: dict[str, float] = NO_INPUTS


NO_REPLICA = Choice(None, "no_replica")


class Policy(Protocol):
    name: str
    overtakes: bool  # whether other classes are tried when the first one's head does not fit
    wants_prefix: bool
    prefix_chunk_tokens: int

    def enter(self, request: Request) -> Choice: ...
    def proceed(self, request: Request) -> Replica | str: ...
    def next_class(self, waiting: list[ClassLedger]) -> ClassLedger:
        """Whose head is tried first when room appears."""
        ...

    def resumable(self) -> Iterable[Request]:
        """Held continuations to ask `proceed` for again, now; each is tried before the next one is drawn."""
        ...

    def placed(self, request: Request, replica: Replica) -> None: ...
    def progressed(self, request: Request) -> bool:
        """True: less is held than was thought; a paused continuation may fit."""
        ...

    def withdrawn(self, request: Request) -> None:
        """A continuation that waited is wanted no more."""
        ...

    def answered(self, request: Request, event: RequestEnded) -> None:
        """A request that ran has ended, however."""
        ...

    def ended(self, session: Session) -> None: ...
    def replica_added(self, replica: Replica) -> None: ...
    def replica_removed(self, replica: Replica) -> None: ...
    def cold(self, replica: Replica) -> None: ...
    def sampled(self, replica: Replica, sample: ReplicaSample) -> None: ...
    def resided(self, replica: Replica, residency: ReplicaResidency) -> None: ...
    def arrived(self, request: Request) -> None: ...
    def tick(self) -> None: ...
    def cap(self, klass: ClassLedger) -> int | None: ...
    def session_limit(self) -> int | None:
        """Live sessions of the whole pool up to which new ones may enter; None: it lets all in."""
        ...

    def pressure(self, replica: Replica) -> float: ...
    def alarms(self) -> list[str]: ...
    def estimates(self) -> dict[str, object]: ...


class Base:
    """No-op hooks, and the fair default order of classes."""

    name = ""
    overtakes = False
    wants_prefix = False
    prefix_chunk_tokens = 0

    def __init__(self, ledger: Ledger, params: CoreParams, seed: int) -> None:
        self.ledger = ledger
        self.params = params
        self.turn = Rotation()

    def candidates(self, request: Request) -> int:
        """Usable replicas that have not just failed this request."""
        return self.ledger.usable & ~request.failed

    def next_class(self, waiting: list[ClassLedger]) -> ClassLedger:
        """The class whose longest-waiting head came first: without caps, first come, first served over all."""
        return min(waiting, key=_head_arrival)

    def resumable(self) -> Iterable[Request]:
        return ()

    def placed(self, request: Request, replica: Replica) -> None:
        pass

    def progressed(self, request: Request) -> bool:
        return False

    def withdrawn(self, request: Request) -> None:
        pass

    def answered(self, request: Request, event: RequestEnded) -> None:
        pass

    def ended(self, session: Session) -> None:
        pass

    def replica_added(self, replica: Replica) -> None:
        pass

    def replica_removed(self, replica: Replica) -> None:
        pass

    def cold(self, replica: Replica) -> None:
        pass

    def sampled(self, replica: Replica, sample: ReplicaSample) -> None:
        pass

    def resided(self, replica: Replica, residency: ReplicaResidency) -> None:
        pass

    def arrived(self, request: Request) -> None:
        pass

    def tick(self) -> None:
        pass

    def cap(self, klass: ClassLedger) -> int | None:
        return None

    def session_limit(self) -> int | None:
        return None

    def narrowed(self, replica: Replica, sessions: int) -> int:
        """A limit of a replica, as far as its state is known: what is unknown takes few new ones."""
        few = self.params.replica.unknown_sessions
        if replica.capacity_tokens is None:
            return few
        stale = self.ledger.stale(replica, self.ledger.now_s)
        return min(sessions, max(few, len(replica.live))) if stale else sessions

    def pressure(self, replica: Replica) -> float:
        return 0.0

    def alarms(self) -> list[str]:
        return []

    def estimates(self) -> dict[str, object]:
        return {}


def _head_arrival(klass: ClassLedger) -> tuple[float, int]:
    """Sessions remember when they were last active; a held session's last activity is its arrival."""
    return next(iter(klass.queue)).last_active_r, klass.index


class PerRequest(Base):
    """Places every request for itself; a session's pin is only where its last request went."""

    def route(self, request: Request) -> Replica | None:
        raise NotImplementedError

    def enter(self, request: Request) -> Choice:
        replica = self.route(request)
        return NO_REPLICA if replica is None else Choice(replica, "admitted")

    def proceed(self, request: Request) -> Replica | str:
        return self.route(request) or "no_replica"


class Sticky(Base):
    """A session stays on its replica until that cannot be used; then it moves, whatever the caps say."""

    def enter(self, request: Request) -> Choice:
        raise NotImplementedError

    def proceed(self, request: Request) -> Replica | str:
        replica = request.session.replica
        if replica is not None and replica.usable and not request.failed & replica.bit:
            return replica
        return self.repin(request) or "no_replica"

    def repin(self, request: Request) -> Replica | None:
        """Fewest live sessions, ties rotated."""
        usable = self.candidates(request)
        if not usable:
            return None
        return self.ledger.at(self.turn.pick(self.ledger.by_sessions.least(usable)))
