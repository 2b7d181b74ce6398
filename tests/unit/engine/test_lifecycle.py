"""Requests that do not run to their end, and an engine that is told to stop: as vLLM behaves towards a router."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from tests.unit.engine.conftest import FROZEN, Http, StartEngine, until

from tidegate.engine.server import EngineServer

LONG = {"prompt": [1] * 40, "max_tokens": 2000, "ignore_eos": True}


def send(http: Http, engine: EngineServer, **changes: Any) -> asyncio.Task[tuple[int, Any]]:
    return asyncio.create_task(http.post(f"{engine.url}/v1/completions", {**LONG, **changes}))


def finish(answer: tuple[int, Any]) -> tuple[int, str, str]:
    status, body = answer
    return status, body["choices"][0]["finish_reason"], body["choices"][0]["text"]


# --- clients that leave -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_engine(start_engine: StartEngine, stream: bool) -> None:
    engine = await start_engine(time_scale=1.0)
    async with aiohttp.ClientSession() as session:
        ask = asyncio.create_task(session.post(f"{engine.url}/v1/completions", json={**LONG, "stream": stream, "n": 2}))
        await until(lambda: engine.core.running == 2)
        if stream:
            response = await ask
            await response.content.readany()
            response.close()
        else:
            ask.cancel()
        await until(lambda: engine.core.unfinished == 0)
    assert engine.core.replica.pool.usage == 0.0
    assert engine.core.metrics.success["abort"] == 0  # vLLM does not count those


async def test_abort_requests_by_id_leaves_others(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(time_scale=1.0)
    mine, other = send(http, engine, request_id="mine"), send(http, engine, request_id="other")
    await until(lambda: engine.core.running == 2)
    answer = await http.post(f"{engine.url}/abort_requests", {"request_ids": ["cmpl-mine"]})
    assert answer == (200, {"status": "aborted", "aborted": 1})
    assert finish(await mine)[:2] == (200, "abort")
    assert not other.done()
    unknown = await http.post(f"{engine.url}/abort_requests", {"request_ids": ["nobody"]})
    assert unknown[1]["aborted"] == 1  # vLLM counts what it was given
    assert (await http.post(f"{engine.url}/abort_requests", {}))[1]["aborted"] == 1
    assert finish(await other)[1] == "abort"


async def test_requests_may_share_an_id(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(time_scale=1.0)
    headers = {"X-Request-Id": "rollout"}
    asks = [asyncio.create_task(http.post(f"{engine.url}/v1/completions", LONG, headers=headers)) for _ in range(2)]
    await until(lambda: engine.core.running == 2)
    await http.post(f"{engine.url}/abort_requests", {"request_ids": ["cmpl-rollout"]})
    assert [finish(await ask)[1] for ask in asks] == ["abort", "abort"]


# --- pause --------------------------------------------------------------------------------------------------------
async def test_pause_abort_answers_all_and_holds_new_ones(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(time_scale=1.0)
    running = send(http, engine)
    await until(lambda: engine.core.running == 1)
    assert await http.post(f"{engine.url}/pause") == (200, {"status": "paused"})
    assert await http.get(f"{engine.url}/is_paused") == (200, {"is_paused": True})
    assert finish(await running)[:2] == (200, "abort")
    held = send(http, engine, max_tokens=1)
    await until(lambda: engine.core.waiting == 1)
    assert not held.done()
    assert await http.post(f"{engine.url}/resume") == (200, {"status": "resumed"})
    assert finish(await held)[1] == "length"
    assert await http.get(f"{engine.url}/is_paused") == (200, {"is_paused": False})


async def test_pause_keep_freezes_a_generation_that_then_goes_on(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(time_scale=200.0)
    running = send(http, engine, max_tokens=400, temperature=0)
    await until(lambda: engine.core.replica.counters.generation_tokens > 5)
    await http.post(f"{engine.url}/pause?mode=keep")
    tokens = engine.core.replica.counters.generation_tokens
    await asyncio.sleep(0.05)
    assert engine.core.replica.counters.generation_tokens == tokens
    await http.post(f"{engine.url}/resume")
    status, body = await running
    assert (status, body["usage"]["completion_tokens"]) == (200, 400)
    assert body["choices"][0]["text"] == finish(await send(http, engine, max_tokens=400, temperature=0))[2]


async def test_pause_wait_returns_when_the_running_have_ended(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(time_scale=200.0)
    running = send(http, engine, max_tokens=300)
    await until(lambda: engine.core.running == 1)
    await http.post(f"{engine.url}/pause?mode=wait")
    assert engine.core.running == 0
    assert finish(await running)[1] == "length"


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("clear", [True, False])
async def test_a_pause_empties_the_cache_unless_told_not_to(
    engine: EngineServer, http: Http, mode: str, clear: bool
) -> None:
    await send(http, engine, max_tokens=1)
    await http.post(f"{engine.url}/pause?mode={mode}" + ("" if clear else "&clear_cache=false"))
    await http.post(f"{engine.url}/resume")
    _, body = await send(http, engine, max_tokens=1)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == (0 if clear else 32)


async def test_an_unknown_pause_mode_is_refused(engine: EngineServer, http: Http) -> None:
    assert (await http.post(f"{engine.url}/pause?mode=maybe"))[0] == 400
    assert await http.get(f"{engine.url}/is_paused") == (200, {"is_paused": False})


async def test_reset_prefix_cache_is_refused_while_a_request_runs(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(time_scale=1.0)
    running = send(http, engine)
    await until(lambda: engine.core.running == 1)
    assert await http.post(f"{engine.url}/reset_prefix_cache") == (200, {"success": False})
    await http.post(f"{engine.url}/abort_requests", {})
    await running
    assert await http.post(f"{engine.url}/reset_prefix_cache") == (200, {"success": True})


async def test_sleep_empties_the_cache_and_wake_up_goes_on(engine: EngineServer, http: Http) -> None:
    await send(http, engine, max_tokens=1)
    assert await http.post(f"{engine.url}/sleep?level=1") == (200, {"status": "sleeping", "level": 1})
    assert await http.get(f"{engine.url}/is_sleeping") == (200, {"is_sleeping": True})
    assert 'sleep_state="awake"} 0.0' in await http.text(f"{engine.url}/metrics")
    held = send(http, engine, max_tokens=1)
    await until(lambda: engine.core.waiting == 1)
    assert (await http.post(f"{engine.url}/wake_up"))[1]["status"] == "awake"
    _, body = await held
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert await http.get(f"{engine.url}/is_sleeping") == (200, {"is_sleeping": False})


async def test_weight_update_calls_are_accepted(engine: EngineServer, http: Http) -> None:
    for path in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        assert (await http.post(f"{engine.url}/{path}", {"update_info": {}}))[0] == 200
    assert await http.post(f"{engine.url}/collective_rpc", {"method": "reload"}) == (200, {"results": [None]})
    assert (await http.post(f"{engine.url}/collective_rpc", {}))[0] == 400


# --- the end ------------------------------------------------------------------------------------------------------
async def test_a_draining_engine_says_200_abort_to_new_requests_and_finishes_old_ones(
    start_engine: StartEngine, http: Http
) -> None:
    engine = await start_engine(time_scale=100.0, shutdown_timeout_s=20.0)
    old = send(http, engine, max_tokens=200)
    await until(lambda: engine.core.running == 1)
    drain = asyncio.create_task(engine.drain())
    await until(lambda: engine.core.draining)
    assert finish(await send(http, engine)) == (200, "abort", "")
    async with http.session.get(f"{engine.url}/health") as health:
        assert health.status == 200
    await drain
    assert finish(await old)[1] == "length"


async def test_a_drain_that_takes_too_long_aborts(start_engine: StartEngine, http: Http) -> None:
    engine = await start_engine(time_scale=FROZEN, shutdown_timeout_s=0.05)
    old = send(http, engine)
    await until(lambda: engine.core.unfinished == 1)
    await engine.drain()
    assert finish(await old)[:2] == (200, "abort")


async def test_a_killed_engine_breaks_its_connections_and_refuses_new_ones(
    start_engine: StartEngine, http: Http
) -> None:
    engine = await start_engine(time_scale=FROZEN)
    running = send(http, engine)
    await until(lambda: engine.core.unfinished == 1)
    await engine.kill()
    with pytest.raises(aiohttp.ClientError):
        await running
    with pytest.raises(aiohttp.ClientConnectorError):
        await http.get(f"{engine.url}/v1/models")


async def test_several_engines_run_in_one_loop(start_engine: StartEngine, http: Http) -> None:
    engines = [await start_engine() for _ in range(3)]
    await asyncio.gather(*(send(http, engine, max_tokens=3) for engine in engines))
    assert [engine.core.replica.counters.generation_tokens for engine in engines] == [3, 3, 3]


async def test_a_port_that_is_taken_is_a_config_error(engine: EngineServer) -> None:
    from tidegate.engine.config import EngineConfig
    from tidegate.errors import ConfigError

    port = int(engine.url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match="cannot listen"):
        async with EngineServer(EngineConfig(port=port)):
            pass


# --- streams ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_a_stream_sends_its_headers_at_once_and_nothing_more_before_the_first_token(
    start_engine: StartEngine, http: Http, path: str
) -> None:
    engine = await start_engine(time_scale=FROZEN)
    body = {"model": "m", "prompt": "a", "messages": [], "max_tokens": 5, "stream": True}
    async with http.session.post(engine.url + path, json=body) as response:
        assert response.status == 200
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await response.content.readany()
