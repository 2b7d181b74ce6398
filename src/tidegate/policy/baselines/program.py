"""program: ThunderAgent's program-aware scheduling (its "tr" router); a program is a session.

A program is reasoning while a request of it runs or waits, else acting (a tool call). On each replica

    remaining = capacity - (reasoning + acting tokens) + shared - 100 * programs

with shared = reasoning tokens less what the engine's gauge says that running requests hold, at the last step, >= 0:
blocks that several programs use, and, in the authors' code as here, prompts still in the engine's queue. A new program
enters at once only if nobody waits, paused programs included, and its prompt and buffer fit; it goes to the replica
with the fewest tokens. Every 5 s:

    resume   those that wait, by rank: paused with a request; new; paused without one. Of each rank in ascending tokens
             as many as fit in the sum of what remains, then placed largest first on the replica with the most left,
             wherever they were before. Here acting tokens count 2^-t, t seconds after their request ended (the
             paper's rule; in the authors' code an option)
    pause    on a replica with remaining < 0, acting programs, smallest first, until it is not; then reasoning ones,
             which are marked and paused when their request ends. A paused program holds no memory in these books

A request that has waited for 1800 s goes on, whatever remains. Paused programs hold no place: the next resume may take
them to another replica.

Where this differs: w, the weight of acting tokens, is the authors' default of 1; new programs are taken in order of
arrival within their class, a class whose first does not fit being overtaken, instead of in ascending tokens; programs
paused without a request go on only at steps at which no new one waits; marked tokens count as gone, so that no more
are marked than needed. A replica of unknown capacity pauses nobody.
"""

from __future__ import annotations

from math import inf

from tidegate.policy.base import NO_REPLICA, Choice, Sticky
from tidegate.policy.baselines.kv_usage import running_tokens, used_fraction
from tidegate.policy.control import prior_footprint_tokens
from tidegate.policy.entities import LIVE, Replica, Request, Session
from tidegate.policy.ledger import Ledger
from tidegate.policy.params import CoreParams
from tidegate.policy.placement import members
from tidegate.types import ReplicaSample, RequestEnded


class Program(Sticky):
    name = "program"
    overtakes = True

    def __init__(self, ledger: Ledger, params: CoreParams, seed: int) -> None:
        super().__init__(ledger, params, seed)
        self.own = params.program
        self.paused: dict[Session, int] = {}  # with the prompt of the request that waits; 0: none does
        self._moving: dict[Session, Replica] = {}  # resumed elsewhere, until their next request
        self._marked: dict[Session, None] = {}  # to be paused when their request ends
        self._samples: dict[Replica, ReplicaSample] = {}
        self._shared: dict[Replica, float] = {}
        self._left: dict[int, float] = {}  # by slot, of the step at `_stepped_s`: for those in the queues
        self._stepped_s = -inf

    # --- a new program -----------------------------------------------------------------------------------------
    def enter(self, request: Request) -> Choice:
        usable = self.candidates(request)
        if not usable:
            return NO_REPLICA
        needed = self._needed(request.session, request.prompt_tokens)
        if not request.held:
            return self._enter_now(usable, needed)
        if self.ledger.now_s - request.arrived_s >= self.own.resume_after_s:
            slot = self.turn.pick(self.ledger.by_sessions.least(usable))
            return Choice(self.ledger.at(slot), "admitted", {"needed_tokens": needed})
        left = {slot: self._left[slot] for slot in members(usable) if slot in self._left}
        if self.ledger.now_s != self._stepped_s or not left:
            return Choice(None, "occupancy", {"needed_tokens": needed})
        most = max(left.values())
        inputs = _inputs(needed, most)
        if needed > most:
            return Choice(None, "occupancy", inputs)
        roomiest = sum(1 << slot for slot, tokens in left.items() if tokens == most)
        slot = self.turn.pick(self.ledger.by_sessions.least(roomiest))
        self._left[slot] -= needed
        return Choice(self.ledger.at(slot), "admitted", inputs)

    def _enter_now(self, usable: int, needed: int) -> Choice:
        ledger = self.ledger
        if self.paused or any(klass.queue for klass in ledger.classes):
            return Choice(None, "occupancy", {"needed_tokens": needed})
        remaining = self._remaining()
        fitting = sum(1 << slot for slot in members(usable) if remaining[slot] >= needed)
        if not fitting:
            return Choice(None, "occupancy", _inputs(needed, max(remaining.values())))
        fewest = min(ledger.at(slot).tokens for slot in members(fitting))
        slot = self.turn.pick(sum(1 << slot for slot in members(fitting) if ledger.at(slot).tokens == fewest))
        return Choice(ledger.at(slot), "admitted", _inputs(needed, remaining[slot]))

    def _needed(self, session: Session, prompt_tokens: int) -> int:
        return max(session.tokens, prompt_tokens) + self.own.buffer_tokens

    # --- a request of an admitted one --------------------------------------------------------------------------
    def proceed(self, request: Request) -> Replica | str:
        session = request.session
        if session in self.paused and session.state == LIVE:
            if self.ledger.now_s - request.arrived_s < self.own.resume_after_s:
                self.paused[session] = max(self.paused[session], request.prompt_tokens)
                return "paused"
            del self.paused[session]
        target = self._moving.get(session)
        if target is not None and target.usable and not request.failed & target.bit:
            return target
        return super().proceed(request)

    def placed(self, request: Request, replica: Replica) -> None:
        self._moving.pop(request.session, None)

    def answered(self, request: Request, event: RequestEnded) -> None:
        session = request.session
        if session in self._marked and not session.running:
            del self._marked[session]
            self._pause(session)

    def ended(self, session: Session) -> None:
        self.paused.pop(session, None)
        self._moving.pop(session, None)
        self._marked.pop(session, None)

    def _pause(self, session: Session) -> None:
        self._moving.pop(session, None)
        self.paused[session] = 0

    # --- replicas ----------------------------------------------------------------------------------------------
    def sampled(self, replica: Replica, sample: ReplicaSample) -> None:
        self._samples[replica] = sample

    def replica_removed(self, replica: Replica) -> None:
        self._samples.pop(replica, None)
        self._shared.pop(replica, None)
        self._moving = {session: target for session, target in self._moving.items() if target is not replica}

    def _remaining(self, *, decayed: bool = False) -> dict[int, float]:
        """By slot of the usable replicas."""
        own = self.own
        tokens: dict[int, float] = {}
        programs: dict[int, int] = {}
        for slot in members(self.ledger.usable):
            replica = self.ledger.at(slot)
            tokens[slot] = replica.tokens - (self._faded(replica) if decayed else 0.0)
            programs[slot] = len(replica.live)
        for session in (*self.paused, *self._moving):
            if session.replica is not None and session.replica.slot in tokens:
                tokens[session.replica.slot] -= session.tokens * (self._weight(session) if decayed else 1.0)
                programs[session.replica.slot] -= 1
        for session, target in self._moving.items():
            if target.slot in tokens:
                tokens[target.slot] += session.tokens
                programs[target.slot] += 1
        remaining: dict[int, float] = {}
        for slot, held in tokens.items():
            replica = self.ledger.at(slot)
            buffers = own.buffer_tokens * programs[slot]
            capacity = replica.capacity_tokens
            remaining[slot] = capacity - held + self._shared.get(replica, 0.0) - buffers if capacity else inf
        return remaining

    def _faded(self, replica: Replica) -> float:
        return sum(session.tokens * (1.0 - self._weight(session)) for session in replica.live)

    def _weight(self, session: Session) -> float:
        """Of its tokens, when it is asked how many programs may go on."""
        if session.running or session.waiting:
            return 1.0
        idle_s = self.ledger.now_r - session.last_active_r
        weight: float = 0.5 ** (idle_s / self.own.acting_halflife_s)
        return weight

    # --- the control step --------------------------------------------------------------------------------------
    def tick(self) -> None:
        ledger = self.ledger
        if ledger.paused or ledger.now_s - self._stepped_s < self.own.interval_s:
            return
        self._stepped_s = ledger.now_s
        for slot in members(ledger.usable):
            replica = ledger.at(slot)
            used = used_fraction(ledger, replica, self._samples.get(replica))
            if used is not None and replica.capacity_tokens:
                self._shared[replica] = max(0.0, running_tokens(replica) - used * replica.capacity_tokens)
            else:
                self._shared.pop(replica, None)
        self._left = self._remaining(decayed=True)
        self._resume()
        for slot, remaining in self._remaining().items():
            if remaining < 0:
                self._pause_until_safe(ledger.at(slot), remaining)

    def _resume(self) -> None:
        chosen = self._select(sum(left for left in self._left.values() if left > self.own.buffer_tokens))
        chosen.sort(key=lambda one: -one[0])  # stable: equal ones in the order of rank
        for needed, session in chosen:
            if not self._left:
                break
            slot = max(self._left, key=self._left.__getitem__)
            if needed > self._left[slot]:
                continue
            self._left[slot] -= needed
            del self.paused[session]
            target = self.ledger.at(slot)
            if target is not session.replica:
                self._moving[session] = target

    def _select(self, room: float) -> list[tuple[int, Session]]:
        """Those that go on if what remains were in one piece."""
        asked = [session for session in self.paused if session.waiting]
        acting = [session for session in self.paused if not session.waiting]
        if any(klass.queue for klass in self.ledger.classes):
            acting = []
        chosen = []
        for rank in (asked, acting):
            needs = sorted(((self._needed(session, self.paused[session]), session) for session in rank), key=_tokens)
            for needed, session in needs:
                if needed <= room:
                    room -= needed
                    chosen.append((needed, session))
        return chosen

    def _pause_until_safe(self, replica: Replica, remaining: float) -> None:
        here = [s for s in replica.live if s not in self.paused and s not in self._moving]
        here += [s for s, target in self._moving.items() if target is replica]
        smallest_first = sorted(here, key=lambda session: session.tokens)
        remaining += sum(s.tokens + self.own.buffer_tokens for s in here if s in self._marked)
        acting = [s for s in smallest_first if not s.running and not s.waiting]
        reasoning = [s for s in smallest_first if s.running and s not in self._marked]
        for session in (*acting, *reasoning):
            if remaining >= 0:
                break
            remaining += session.tokens + self.own.buffer_tokens
            if session.running:
                self._marked[session] = None
            else:
                self._pause(session)

    def session_limit(self) -> int | None:
        """It counts tokens: what fits of the sessions unfinished now."""
        demand = {klass: klass.demand for klass in self.ledger.classes if klass.demand}
        tokens = sum(count * klass.profile.footprint_tokens for klass, count in demand.items())
        mean = tokens / sum(demand.values()) if tokens else prior_footprint_tokens(self.ledger)
        usable = [self.ledger.at(slot) for slot in members(self.ledger.usable)]
        room = {r: max(1, int((r.capacity_tokens or 0) / (mean + self.own.buffer_tokens))) for r in usable}
        return sum(self.narrowed(replica, sessions) for replica, sessions in room.items())

    # --- views -------------------------------------------------------------------------------------------------
    def estimates(self) -> dict[str, object]:
        remaining = self._remaining()
        return {
            "remaining_tokens": {self.ledger.at(slot).url: left for slot, left in remaining.items() if left < inf},
            "paused": len(self.paused),
            "marked": len(self._marked),
        }


def _inputs(needed: int, remaining: float) -> dict[str, float]:
    return {"needed_tokens": needed} if remaining == inf else {"needed_tokens": needed, "remaining_tokens": remaining}


def _tokens(one: tuple[int, Session]) -> int:
    return one[0]
