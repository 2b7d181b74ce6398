"""The workers API, on a live gate."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from tests.unit.server.live import NOWHERE, call, complete, config, state

from tidegate.engine.server import EngineServer
from tidegate.engines.discovery import DuplicateWorkerUrl
from tidegate.server.gate import Gate


async def test_a_gate_that_is_listed_as_its_own_replica_is_not_used(gate: Gate, client: aiohttp.ClientSession) -> None:
    """It would have the fewest sessions, and answer each request with 508."""
    status, added = await call(client, gate, "POST", "/add_worker", params={"url": gate.url})
    assert (status, added["worker"]["is_healthy"]) == (200, False)
    assert "508" in added["worker"]["error"]
    assert [await complete(client, gate, None) for _ in range(3)] == [200, 200, 200]


async def test_workers_have_vllm_routers_shapes(gate: Gate, client: aiohttp.ClientSession) -> None:
    urls = gate.replicas.urls
    _, listed = await call(client, gate, "GET", "/workers")
    assert [worker["url"] for worker in listed["workers"]] == urls
    assert listed["total"] == listed["stats"]["regular_count"] == 2
    worker = listed["workers"][0]
    assert {"url", "model_id", "worker_type", "is_healthy", "load", "connection_mode", "priority", "cost"} <= set(
        worker
    )
    assert worker["is_healthy"] is True
    assert (await call(client, gate, "GET", "/list_workers"))[1] == {"urls": urls}
    loads = (await call(client, gate, "GET", "/get_loads"))[1]
    assert loads == {"workers": [{"worker": url, "load": 0} for url in urls]}
    _, shown = await call(client, gate, "GET", f"/workers/{quote(urls[1], safe='')}")
    assert shown["url"] == urls[1]


async def test_adding_says_how_the_replica_is_and_may_be_repeated(
    engines: list[EngineServer], client: aiohttp.ClientSession
) -> None:
    async with Gate(config()) as gate:
        for message in ("Successfully added", "already exists"):
            status, said = await call(client, gate, "POST", "/workers", json={"url": engines[0].url + "/"})
            assert (status, said["success"]) == (200, True)
            assert message in said["message"]
            assert said["worker"]["is_healthy"] is True
        status, said = await call(client, gate, "POST", "/add_worker", params={"url": NOWHERE})
        assert status == 200
        assert said["worker"]["is_healthy"] is False
        assert said["worker"]["error"]
        assert await complete(client, gate, "s") == 200
        for known in (True, False):
            status, said = await call(client, gate, "DELETE", "/workers", params={"url": NOWHERE})
            assert (status, said["known"]) == (200, known)
        assert gate.replicas.urls == [engines[0].url]


@pytest.mark.parametrize(
    ("method", "path", "arguments", "status", "code"),
    [
        ("POST", "/workers", {"json": {}}, 400, "missing_worker_url"),
        ("POST", "/add_worker", {}, 400, "missing_worker_url"),
        ("POST", "/workers", {"json": {"url": "ftp://x"}}, 400, "invalid_worker_url"),
        ("DELETE", "/workers/%20", {}, 400, "invalid_worker_url"),
        ("GET", "/workers/http%3A%2F%2Fnobody", {}, 404, "unknown_worker"),
    ],
)
async def test_bad_worker_calls_have_stable_reasons(
    method: str,
    path: str,
    arguments: dict[str, Any],
    status: int,
    code: str,
    gate: Gate,
    client: aiohttp.ClientSession,
) -> None:
    assert (await call(client, gate, method, path, **arguments))[0] == status
    said = (await call(client, gate, method, path, **arguments))[1]
    assert said["error"]["code"] == code


async def test_a_url_that_stands_twice_does_not_start() -> None:
    with pytest.raises(DuplicateWorkerUrl):
        async with Gate(config("http://a:1", "a:1/")):
            pass


async def test_a_removed_replica_with_sessions_is_shown_as_leaving(gate: Gate, client: aiohttp.ClientSession) -> None:
    await complete(client, gate, "s")
    home = next(replica["url"] for replica in state(gate)["replicas"] if replica["sessions"])
    gate.replicas.remove(home)
    assert home not in [replica["url"] for replica in state(gate)["replicas"]]
    assert [replica["url"] for replica in state(gate)["leaving"]] == [home]
