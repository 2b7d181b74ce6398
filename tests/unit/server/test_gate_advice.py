"""GET /advice, and what PUT /mixture says of the shares that it was given."""

from __future__ import annotations

import aiohttp
import pytest
from tests.unit.server.live import call, complete, state, until

from tidegate.server.gate import Gate


async def test_advice_is_given_with_its_reason(gate: Gate, client: aiohttp.ClientSession) -> None:
    await until(lambda: all(replica["kv_capacity_tokens"] for replica in state(gate)["replicas"]))
    await call(client, gate, "PUT", "/mixture", json={"shares": {"a": 3, "b": 1}})
    status, said = await call(client, gate, "GET", "/advice")
    assert (status, said["reason"], said["mixture_given"]) == (200, "capacity", True)
    assert said["inputs"]["kv_capacity_tokens"] == 2 * 8192
    assert said["sessions"] == sum(one["sessions"] for one in said["classes"].values())
    assert said["classes"]["a"]["sessions"] > said["classes"]["b"]["sessions"] >= 1
    assert state(gate)["advice"] == said


async def test_metrics_show_the_advice_by_class(gate: Gate, client: aiohttp.ClientSession) -> None:
    shares = {f"class {number}": 1.0 for number in range(100)}
    await call(client, gate, "PUT", "/mixture", json={"shares": shares})
    _, said = await call(client, gate, "GET", "/advice")
    _, text = await call(client, gate, "GET", "/metrics")
    lines = [line for line in text.splitlines() if line.startswith("tidegate_advice_sessions{")]
    assert len(lines) == 65  # 64 classes and the others
    assert sum(float(line.split()[-1]) for line in lines) == said["sessions"]


@pytest.mark.parametrize(("shares", "total"), [({"a": 0.5, "b": 0.4}, 0.9), ({"a": 30, "b": 70}, 100.0)])
async def test_shares_of_another_sum_are_scaled_and_said_so(
    gate: Gate, client: aiohttp.ClientSession, shares: dict[str, float], total: float
) -> None:
    status, said = await call(client, gate, "PUT", "/mixture", json={"shares": shares})
    assert (status, said["given_sum"]) == (200, pytest.approx(total))
    assert sum(said["shares"].values()) == pytest.approx(1.0)


async def test_a_share_of_a_class_never_seen_is_taken_and_named(gate: Gate, client: aiohttp.ClientSession) -> None:
    await complete(client, gate, "a", **{"X-Workload-Class": "agentic"})
    status, said = await call(client, gate, "PUT", "/mixture", json={"shares": {"agentic": 0.5, "agnetic": 0.5}})
    assert (status, said["unseen_classes"]) == (200, ["agnetic"])
    assert await complete(client, gate, "b", **{"X-Workload-Class": "no share"}) == 200


async def test_more_classes_than_can_be_told_apart_are_refused(gate: Gate, client: aiohttp.ClientSession) -> None:
    shares = {f"class {number}": 1.0 for number in range(1025)}
    status, said = await call(client, gate, "PUT", "/mixture", json={"shares": shares})
    assert (status, said["error"]["code"]) == (400, "invalid_field")
