"""The plugin's routes over engine cores that answer, refuse, or say nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from argparse import Namespace
from typing import Any

import pytest
from starlette.applications import Starlette

from tidegate.integrations.vllm_plugin import endpoint as module
from tidegate.integrations.vllm_plugin.endpoint import Endpoint
from tidegate.integrations.vllm_plugin.protocol import MAX_SESSIONS_PER_CALL


class Engines:
    """Two data-parallel engine cores."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.calls: list[tuple[Any, ...]] = []

    async def call_utility_all_async(self, *call: Any) -> list[Any]:
        self.calls.append(call)
        for answer in self.answers:
            if isinstance(answer, Exception):
                raise answer
            if answer is None:
                await asyncio.Event().wait()
        return list(self.answers)


class Server:
    """The routes, without a network."""

    def __init__(self, engine: Any, refusal: str | None = None, keys: tuple[str, ...] = ()) -> None:
        endpoint, self._app = Endpoint(), Starlette()
        endpoint.attach_router(self._app)
        endpoint.start(engine, "0.32.0", refusal)
        endpoint._keys = [module._digest(key) for key in keys]

    async def ask(
        self, method: str, target: str, content: bytes = b"", authorization: str | None = None
    ) -> tuple[int, Any]:
        path, _, query = target.partition("?")
        headers = [] if authorization is None else [(b"authorization", authorization.encode())]
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": headers}
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))

    async def post(self, call: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return await self.ask("POST", f"/tidegate/{call}", content, **more)

    async def get(self, call: str, **more: Any) -> tuple[int, Any]:
        return await self.ask("GET", f"/tidegate/{call}", **more)


MOVED = {"known_sessions": 1, "moved_blocks": 5, "kept_blocks": 2, "running_requests": 1}


async def test_numbers_of_data_parallel_engines_are_sums() -> None:
    engines = Engines(MOVED, {**MOVED, "moved_blocks": 7})
    _, answer = await Server(engines).post("release", {"session_id": "a"})
    assert answer == {
        "sessions": 1, "known_sessions": 1, "moved_blocks": 12, "kept_blocks": 4, "running_requests": 2,
    }  # fmt: skip
    assert engines.calls == [("tidegate_call", "release", ["a"])]


async def test_sessions_of_data_parallel_engines_are_merged() -> None:
    of_a = {"blocks": 2, "shared_blocks": 0, "demoted": False, "running_blocks": 4}
    one = {"sessions": {"a": {"blocks": 3, "shared_blocks": 1, "demoted": True, "running_blocks": 0}}}
    _, answer = await Server(Engines(one, {"sessions": {"a": of_a, "b": {"blocks": 1}}})).get("sessions")
    assert answer["sessions"]["a"] == {"blocks": 5, "shared_blocks": 1, "demoted": False, "running_blocks": 4}
    assert answer["sessions"]["b"] == {"blocks": 1}


async def test_sessions_are_named_once_however_they_are_given() -> None:
    engines = Engines(MOVED)
    body = {"session_id": "b", "session_ids": ["c", "a"]}
    await Server(engines).post("demote?session_id=a&session_id=b", body)
    assert engines.calls == [("tidegate_call", "demote", ["a", "b", "c"])]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[" * 100_000, 400),
        (b"\xff", 400),
        (b"null", 400),
        (b'{"session_id": null}', 400),
        (b'{"session_ids": [1]}', 400),
        (b'{"session_ids": {}}', 400),
        (b'{"session_id": "' + b"x" * 513 + b'"}', 400),
        (b'{"session_ids": [' + b",".join([b'"a"'] * (MAX_SESSIONS_PER_CALL + 1)) + b"]}", 400),
        (b" " * (module.MAX_BODY_BYTES + 1), 413),
    ],
)
async def test_bad_input_reaches_no_engine(content: bytes, status: int) -> None:
    engines = Engines(MOVED)
    answered, answer = await Server(engines).post("release", content)
    assert answered == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert engines.calls == []


async def test_any_of_the_servers_keys_is_right() -> None:
    server = Server(Engines(MOVED), keys=("one", "two"))
    for given, status in (("Bearer one", 200), ("bearer two", 200), ("Bearer three", 401), ("one", 401), ("", 401)):
        assert (await server.post("release?session_id=a", authorization=given))[0] == status, given
    assert (await server.get("info"))[0] == 401


async def test_a_plugin_that_is_off_says_why() -> None:
    server = Server(None, refusal="vLLM 9.9.9 is not a version that it knows")
    _, info = await server.get("info")
    assert (info["off"], info["features"]) == ("vLLM 9.9.9 is not a version that it knows", [])
    status, answer = await server.post("release?session_id=a")
    assert status == 503
    assert "9.9.9" in answer["error"]["message"]


async def test_one_engine_that_is_off_is_all() -> None:
    server = Server(Engines({"off": None}, {"off": "a fault of its own"}))
    assert (await server.get("info"))[1]["off"] == "a fault of its own"
    assert (await server.post("protect?session_id=a"))[0] == 503


async def test_an_engine_that_refuses_or_is_dead_is_a_503() -> None:
    server = Server(Engines(RuntimeError("Server shutting down")))
    assert (await server.post("release?session_id=a"))[0] == 503
    assert (await server.get("info"))[0] == 503


async def test_an_engine_that_says_nothing_is_a_504(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENGINE_TIMEOUT_S", 0.05)
    assert (await Server(Engines(None)).post("release?session_id=a"))[0] == 504


async def test_keys_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.compat, "refusal", lambda: None)
    monkeypatch.setattr(module.compat, "version", lambda: "0.32.0")
    engine = Namespace(engine_core=Engines(MOVED))
    for given, variable, count in ((["a", "b"], None, 2), (None, "c", 1), (None, None, 0), ("one", None, 1)):
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
        if variable is not None:
            monkeypatch.setenv("VLLM_API_KEY", variable)
        endpoint = Endpoint()
        await endpoint.init_state(engine, None, Namespace(api_key=given))
        assert len(endpoint._keys) == count


async def test_a_server_without_an_engine_has_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.compat, "refusal", lambda: None)
    monkeypatch.setattr(module.compat, "version", lambda: "0.32.0")
    endpoint = Endpoint()
    await endpoint.init_state(None, None, Namespace())
    assert endpoint._refusal == "this server has no engine core"


def test_nothing_heavy_comes_along_into_vllms_processes() -> None:
    code = """
import sys
from tidegate.integrations import vllm_plugin
from tidegate.integrations.vllm_plugin import compat, engine
vllm_plugin.register()
vllm_plugin.routes()
heavy = {"uvloop", "aiohttp", "msgspec", "structlog", "zmq", "vllm", "tidegate.types", "tidegate.config"}
print(sorted(heavy & set(sys.modules)))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"


def test_without_a_vllm_that_it_knows_it_is_off() -> None:
    """The project's own environment has none."""
    assert (module.compat.refusal() or "").startswith("this vLLM cannot be looked into")


@pytest.mark.parametrize(
    ("found", "forced", "refused"),
    [
        ("0.32.0", False, False),
        ("0.33.1+cpu", False, False),
        ("0.31.2", False, True),
        ("0.99.0", False, True),
        ("dev", False, True),
        ("0.99.0", True, False),
    ],
)
def test_versions_that_were_not_tested_are_refused(
    monkeypatch: pytest.MonkeyPatch, found: str, forced: bool, refused: bool
) -> None:
    monkeypatch.setenv(module.compat.FORCE, "force" if forced else "")
    assert (module.compat._version_refusal(found) is not None) == refused
