"""Engines once per run, a fresh gate per test: what a test did to the ledger is gone with its gate."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import aiohttp
import pytest
from tests.e2e.embedded import EmbeddedReplica
from tests.e2e.gate import Gate
from tests.e2e.process import Process
from tests.vllm.replica import VllmReplica


class Replica(Protocol):
    url: str
    kv_replay_endpoint: str
    kv_capacity_tokens: int
    process: Process

    def start(self) -> None: ...
    def wait_ready(self) -> None: ...
    def restart(self) -> None: ...


StartReplicas: TypeAlias = Callable[..., list[Any]]
StartGate: TypeAlias = Callable[..., Gate]


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--backend"))


def _start(backend: str, logs: Path, count: int, **options: Any) -> list[Replica]:
    kind = {"embedded": EmbeddedReplica, "vllm": VllmReplica}[backend]
    replicas: list[Replica] = [kind(logs / f"replica-{number}.log", **options) for number in range(count)]
    for replica in replicas:
        replica.start()
    try:
        for replica in replicas:
            replica.wait_ready()
    except BaseException:
        for replica in replicas:
            replica.process.kill()
        raise
    return replicas


@pytest.fixture(scope="session")
def replicas(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    """Two engines shared by all tests: a test may fill their caches, and must leave them running and unpaused."""
    running = _start(backend, tmp_path_factory.mktemp("replicas"), 2)
    yield running
    for replica in running:
        replica.process.kill()


@pytest.fixture(scope="module")
def own_replicas(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    """Two engines of this module's own, to be killed, drained and restarted; each test finds them running again."""
    running = _start(backend, tmp_path_factory.mktemp("own-replicas"), 2, shutdown_timeout_s=30)
    yield running
    for replica in running:
        replica.process.kill()


@pytest.fixture
def start_gate(tmp_path: Path) -> Iterator[StartGate]:
    gates: list[Gate] = []
    numbers = itertools.count()

    def start(worker_urls: list[str], policy: str = "sticky_least_loaded", **options: Any) -> Gate:
        gate = Gate(worker_urls, tmp_path / f"gate-{next(numbers)}.log", policy=policy, **options)
        gates.append(gate)
        gate.start()
        return gate

    yield start
    for gate in gates:
        gate.process.kill()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """No pool limit: tests keep many requests waiting at once."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, auto_decompress=False, timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        yield session
