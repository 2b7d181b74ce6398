"""Stands for the data path: exchanges that note what they are told, and may fail at it."""

from __future__ import annotations

import itertools

from tidegate.clock import ManualClock
from tidegate.errors import ReplicaError, TidegateError
from tidegate.observe.recorder import Recorder
from tidegate.policy.params import CoreParams
from tidegate.policy.scheduler import Scheduler
from tidegate.proxy.identity import Identifier
from tidegate.proxy.seam import Meter, RequestHead
from tidegate.server.driver import Driver
from tidegate.server.passing import Passing
from tidegate.types import ReplicaAdded, ReplicaHealth, ReplicaId, ReplicaRemoved

A, B = "http://a", "http://b"
JSON = [(b"content-type", b"application/json")]
REPLY = b'{"usage": {"prompt_tokens": 9, "completion_tokens": 3}}'


class FakeExchange:
    def __init__(self, number: int, head: RequestHead) -> None:
        self.id = number
        self.head = head
        self.meter: Meter | None = None
        self.placed: list[ReplicaId] = []
        self.named: list[bytes] = []
        self.rejected: TidegateError | None = None
        self.recalled: list[str] = []
        self.fault: Exception | None = None  # raised by the next place

    def place(self, replica: ReplicaId) -> None:
        self.placed.append(replica)
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault

    def reject(self, error: TidegateError) -> None:
        assert self.rejected is None
        self.rejected = error

    def name_session(self, session: bytes) -> None:
        self.named.append(session)

    def recall(self, error: ReplicaError) -> None:
        self.recalled.append(error.reason)


class FakeReplicas:
    """What the driver tells of replicas, and nothing of health: that is the monitors'."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ReplicaId]] = []
        self.lost: dict[ReplicaId, float] = {}

    def lost_before_s(self) -> dict[ReplicaId, float]:
        return self.lost

    def response_ok(self, url: ReplicaId) -> None:
        self.told.append(("ok", url))

    def connect_failed(self, url: ReplicaId, error: str) -> None:
        self.told.append(("connect_failed", url))

    def saw_empty_abort(self, url: ReplicaId) -> None:
        self.told.append(("empty_abort", url))

    def load_report(self, url: ReplicaId, header: bytes) -> None:
        self.told.append((header.decode(), url))


class Shell:
    """A driver on a real scheduler, with a clock that is moved by hand."""

    def __init__(
        self,
        policy: str = "sticky_least_loaded",
        params: CoreParams | None = None,
        recorder: Recorder | None = None,
        max_attempts: int = 3,
    ) -> None:
        self.clock = ManualClock(10.0)
        self.scheduler = Scheduler(policy, params or CoreParams())
        self.driver = Driver(self.scheduler, self.clock, Identifier(), max_attempts=max_attempts, recorder=recorder)
        self.replicas = FakeReplicas()
        self.driver.replicas = self.replicas  # type: ignore[assignment]
        self.up: list[ReplicaId] = []
        self.driver.passing = Passing(lambda: self.up, self.driver.home, self.driver.counters, 3)
        self._ids = itertools.count(1)

    def add(self, *urls: ReplicaId) -> None:
        for url in urls:
            now_s = self.clock.now_s()
            self.up.append(url)
            self.driver.handle(ReplicaAdded(at_s=now_s, replica=url, kv_capacity_tokens=1_000_000))
            self.driver.handle(ReplicaHealth(at_s=now_s, replica=url, usable=True))

    def remove(self, url: ReplicaId) -> None:
        self.up.remove(url)
        self.driver.handle(ReplicaRemoved(at_s=self.clock.now_s(), replica=url))

    def exchange(
        self, session: str | None = None, path: str = "/v1/completions", method: str = "POST", **headers: str
    ) -> FakeExchange:
        lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        if session is not None:
            lines.append((b"X-Session-ID", session.encode()))
        return FakeExchange(next(self._ids), RequestHead(method, path.encode(), lines, 100))

    def open(self, session: str | None = None, body: bytes | None = None, **options: str) -> FakeExchange:
        exchange = self.exchange(session, **options)
        wanted = self.driver.wants_body(exchange.head)
        self.driver.opened(exchange, (body if body is not None else b'{"prompt": "x"}') if wanted else None)
        return exchange

    def answer(
        self, exchange: FakeExchange, body: bytes = b'{"usage": {"prompt_tokens": 9, "completion_tokens": 3}}'
    ) -> None:
        assert exchange.meter is not None
        exchange.meter.response_head(200, JSON)
        exchange.meter.response_body(body)
        exchange.meter.response_end()
        self.driver.ended(exchange, "ok", None)

    @property
    def at_rest(self) -> bool:
        view = self.scheduler.view(self.clock.now_s())
        return not (self.driver.under_way or view.in_flight or view.waiting or any(r.requests for r in view.replicas))
