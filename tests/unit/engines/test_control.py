"""Control calls against real servers: what goes out, what is reported, and that one replica never delays another."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tests.unit.engines.stub import stub_replica

from tidegate.config.engines import EnginesConfig
from tidegate.engines import detect
from tidegate.engines.base import ControlCall
from tidegate.engines.control import call, control_session, fan_out

CONFIG = EnginesConfig(connect_timeout_s=2.0)


async def test_method_path_query_headers_and_body_go_out_as_given() -> None:
    async with stub_replica() as replica, control_session(CONFIG) as session:
        replica.answers["/update_weights"] = (200, '{"message":"Weights updated"}')
        update = ControlCall(method="POST", path="/update_weights", query="a=1&b=%2Fx+y", body=b'{"n":1.0}')
        (result,) = await fan_out(
            session,
            {replica.url: (update,)},
            headers=[
                ("Authorization", "Bearer k"),
                ("X-A", "1"),
                ("X-A", "2"),
                ("Host", "gate"),
                ("Content-Length", "99"),
                ("Connection", "close"),
                ("Content-Type", "application/x-own"),
            ],
            timeout_s=20.0,
        )
        assert result.ok
        assert (result.url, result.status, result.error) == (replica.url, 200, None)
        assert result.body == {"message": "Weights updated"}
        assert replica.calls == [("POST", "/update_weights", "a=1&b=%2Fx+y", b'{"n":1.0}')]
        headers = replica.headers[0]
        assert headers["authorization"] == "Bearer k"
        assert headers["content-type"] == "application/x-own"
        assert headers["content-length"] == "9"
        assert headers["host"] == replica.url.removeprefix("http://")


async def test_a_base_url_with_a_path_keeps_it() -> None:
    async with stub_replica() as replica, control_session(CONFIG) as session:
        replica.answers["/pool/a/resume"] = (200, "{}")
        result = await call(session, f"{replica.url}/pool/a", "POST", "/resume", timeout_s=20.0)
        assert result.ok


async def test_results_come_in_order_and_a_hanging_replica_delays_only_itself() -> None:
    async with stub_replica() as good, stub_replica() as slow, control_session(CONFIG) as session:
        good.answers["/pause"] = slow.answers["/pause"] = (200, '{"status":"paused"}')
        slow.hanging.add("/pause")
        answered = asyncio.create_task(call(session, good.url, "POST", "/pause", timeout_s=20.0))
        pause = (ControlCall(method="POST", path="/pause"),)
        both = asyncio.create_task(fan_out(session, dict.fromkeys((slow.url, good.url), pause), timeout_s=0.5))
        assert (await answered).ok
        first, second = await both
        assert (first.url, first.ok, first.status) == (slow.url, False, None)
        assert first.error == "no answer within 0.5 s"
        assert second.ok
        assert second.elapsed_s < first.elapsed_s


async def test_a_refusal_is_a_result_and_not_an_exception() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with control_session(CONFIG) as session:
            result = await call(session, url, "POST", "/pause", timeout_s=20.0)
    assert not result.ok
    assert result.status is None
    assert result.error


@pytest.mark.parametrize(
    ("answer", "ok", "error"),
    [
        ((200, '{"success":true}'), True, None),
        ((200, '{"success":false}'), False, "status 200, success is false"),
        ((404, '{"detail":"Not Found"}'), False, "status 404"),
        ((500, "boom"), False, "status 500"),
        ((302, ""), False, "status 302"),
    ],
)
async def test_ok_means_2xx_and_no_failure_in_the_body(answer: tuple[int, str], ok: bool, error: str | None) -> None:
    async with stub_replica() as replica, control_session(CONFIG) as session:
        replica.answers["/x"] = answer
        result = await call(session, replica.url, "POST", "/x", timeout_s=20.0)
        assert (result.ok, result.error) == (ok, error)


async def test_answers_are_json_or_text_or_nothing() -> None:
    async with stub_replica() as replica, control_session(CONFIG) as session:
        replica.answers |= {"/a": (200, "[1,2]"), "/b": (200, "Cache flushed."), "/c": (200, "")}
        bodies = [(await call(session, replica.url, "GET", path, timeout_s=20.0)).body for path in ("/a", "/b", "/c")]
        assert bodies == [[1, 2], "Cache flushed.", None]


@pytest.mark.parametrize(
    ("answers", "engine"),
    [
        ({"/metrics": (200, "vllm:num_requests_running 0\n")}, "vllm"),
        ({"/metrics": (200, "sglang:num_running_reqs 0\n")}, "sglang"),
        ({"/server_info": (200, '{"internal_states":[],"kv_events":null}')}, "sglang"),
        ({"/get_server_info": (200, '{"internal_states":[]}')}, "sglang"),
        ({"/server_info": (200, '{"vllm_config":"..."}')}, "vllm"),
        ({"/version": (200, '{"version":"0.32.0"}')}, "vllm"),
        ({}, None),
    ],
)
async def test_the_engine_is_detected(answers: dict[str, tuple[int, str]], engine: str | None) -> None:
    async with stub_replica() as replica, control_session(CONFIG) as session:
        replica.answers |= answers
        adapter = await detect.detect(session, replica.url)
        assert (adapter.name if adapter else None) == engine


async def test_detection_of_a_replica_that_is_not_there_is_none() -> None:
    async with control_session(CONFIG) as session:
        assert await detect.detect(session, "http://127.0.0.1:1") is None


async def test_calls_of_one_replica_go_in_turn_and_end_with_the_first_that_fails() -> None:
    async with stub_replica() as replica, control_session(CONFIG) as session:
        replica.answers["/a"] = replica.answers["/c"] = (200, "{}")
        replica.answers["/b"] = (400, '{"error":"no"}')
        calls = [ControlCall(method="POST", path=path) for path in ("/a", "/b", "/c")]
        (result,) = await fan_out(session, {replica.url: calls}, timeout_s=20.0)
        assert (result.ok, result.status, result.called) == (False, 400, "POST /a, POST /b")
        assert [path for _, path, _, _ in replica.calls] == ["/a", "/b"]
        (result,) = await fan_out(session, {replica.url: ()}, timeout_s=20.0)
        assert (result.ok, result.status, result.error) == (False, None, "this engine has no such call")
