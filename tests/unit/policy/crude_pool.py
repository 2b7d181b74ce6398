"""A crude pool with a capacity cliff, to close the loop round the scheduler: one prefill at a time, LRU by session.

Each replica keeps the KV of sessions; running ones are pinned, the longest untouched others lose theirs first, dead and
idle alike. A turn computes what is missing of its prompt (one prefill at a time), then decodes beside the others.
Sessions are closed loops: when one ends, its client starts the next one of its class.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from tidegate.policy.rng import SplitMix64
from tidegate.policy.scheduler import Scheduler
from tidegate.types import (
    AnyEvent,
    Place,
    Reject,
    ReplicaAdded,
    ReplicaSample,
    RequestArrived,
    RequestEnded,
    SessionFinished,
    Tick,
)


@dataclass(frozen=True)
class Kind:
    """A workload class: `turns` turns, each adding prompt tokens and generating some."""

    name: str
    first_tokens: int
    turns: int
    new_tokens: tuple[int, int]
    generated_tokens: tuple[int, int]
    gap_s: float
    clients: int


@dataclass
class Engine:
    url: str
    capacity: int
    prefill_rate: float
    kv: OrderedDict[str, int] = field(default_factory=OrderedDict)
    running: dict[str, int] = field(default_factory=dict)
    prefill_free_s: float = 0.0
    prompt_total: int = 0
    cached_total: int = 0
    queue: list[Callable[[], None]] = field(default_factory=list)

    def start(self, session: str, prompt: int, now_s: float) -> tuple[float, int]:
        """When its prefill is done, and what was cached."""
        cached = min(self.kv.pop(session, 0), prompt)
        self.running[session] = prompt
        self.evict()
        self.prompt_total += prompt
        self.cached_total += cached
        self.prefill_free_s = max(now_s, self.prefill_free_s) + (prompt - cached) / self.prefill_rate
        return self.prefill_free_s, cached

    def evict(self) -> None:
        used = sum(self.running.values()) + sum(self.kv.values())
        while used > self.capacity and self.kv:
            session, tokens = next(iter(self.kv.items()))
            lost = min(tokens, used - self.capacity)
            used -= lost
            if lost == tokens:
                del self.kv[session]
            else:
                self.kv[session] = tokens - lost

    def done(self, session: str, tokens: int) -> None:
        self.running.pop(session)
        self.kv[session] = tokens
        self.evict()


@dataclass
class Run:
    completed: dict[str, int]
    hit_rate: float
    peak_tokens: dict[str, int]  # by replica: largest sum of footprints of its live sessions
    over_share: float  # part of the time that some replica's live sessions held more than its memory


@dataclass
class Client:
    kind: Kind
    number: int
    session: str = ""
    turn: int = 0
    tokens: int = 0
    prompt: int = 0


class Pool:
    def __init__(self, policy: str, kinds: list[Kind], *, replicas: int, capacity: int, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.rng = SplitMix64(7)
        self.now_s = 0.0
        self.tick_s = scheduler.tick_s
        self.order = count()
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.engines = {f"http://r{i}": Engine(f"http://r{i}", capacity, 3_000.0) for i in range(replicas)}
        self.waiting: dict[int, Client] = {}
        self.completed = {kind.name: 0 for kind in kinds}
        self.peak = dict.fromkeys(self.engines, 0)
        self.steps = self.over = 0
        self.requests = count(1)
        self.sessions = count(1)
        for url in self.engines:
            self.send(ReplicaAdded(at_s=0.0, replica=url, kv_capacity_tokens=capacity))
        for kind in kinds:
            for number in range(kind.clients):
                client = Client(kind, number)
                self.at(0.01 * number, lambda client=client: self.begin(client))
        self.at(0.0, self.tick)

    def between(self, bounds: tuple[int, int]) -> int:
        return bounds[0] + self.rng.below(bounds[1] - bounds[0] + 1)

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (at_s, next(self.order), act))

    def run(self, until_s: float) -> Run:
        while self.heap and self.heap[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self.heap)
            act()
        prompt = sum(engine.prompt_total for engine in self.engines.values())
        cached = sum(engine.cached_total for engine in self.engines.values())
        return Run(self.completed, cached / max(1, prompt), self.peak, self.over / max(1, self.steps))

    def send(self, event: AnyEvent) -> None:
        for decision in self.scheduler.handle(event):
            if isinstance(decision, Place):
                self.place(decision.request, decision.replica)
            assert not isinstance(decision, Reject)

    def tick(self) -> None:
        for engine in self.engines.values():
            self.send(
                ReplicaSample(
                    at_s=self.now_s,
                    replica=engine.url,
                    waiting=int(engine.prefill_free_s > self.now_s + 1.0),
                    prompt_tokens_total=engine.prompt_total,
                    cached_tokens_total=engine.cached_total,
                )
            )
        self.send(Tick(at_s=self.now_s))
        self.steps += 1
        ledger = self.scheduler.ledger
        for url in self.engines:
            self.peak[url] = max(self.peak[url], ledger.replicas[url].tokens)
        self.over += any(ledger.replicas[url].tokens > engine.capacity for url, engine in self.engines.items())
        self.at(self.now_s + self.tick_s, self.tick)

    # --- clients -----------------------------------------------------------------------------------------------
    def begin(self, client: Client) -> None:
        client.session = f"s{next(self.sessions)}"
        client.turn = client.tokens = 0
        self.ask(client)

    def ask(self, client: Client) -> None:
        kind = client.kind
        new = kind.first_tokens if client.turn == 0 else self.between(kind.new_tokens)
        client.prompt = client.tokens + new
        request = next(self.requests)
        self.waiting[request] = client
        self.send(
            RequestArrived(
                at_s=self.now_s,
                request=request,
                session=client.session,
                workload=kind.name,
                prompt_tokens=client.prompt,
            )
        )

    def place(self, request: int, url: str) -> None:
        client = self.waiting[request]
        engine = self.engines[url]
        prefilled_s, cached = engine.start(client.session, client.prompt, self.now_s)
        generated = self.between(client.kind.generated_tokens)
        decode_s = generated * 0.02 * (1 + 0.05 * len(engine.running))
        self.at(prefilled_s + decode_s, lambda: self.answered(request, engine, generated, cached))

    def answered(self, request: int, engine: Engine, generated: int, cached: int) -> None:
        client = self.waiting.pop(request)
        client.tokens = client.prompt + generated
        client.turn += 1
        engine.done(client.session, client.tokens)
        self.send(
            RequestEnded(
                at_s=self.now_s,
                request=request,
                outcome="ok",
                prompt_tokens=client.prompt,
                completion_tokens=generated,
                cached_tokens=cached,
                estimated=False,
            )
        )
        if client.turn < client.kind.turns:
            self.at(self.now_s + client.kind.gap_s, lambda: self.ask(client))
            return
        self.completed[client.kind.name] += 1
        self.send(SessionFinished(at_s=self.now_s, session=client.session))
        self.at(self.now_s, lambda: self.begin(client))
