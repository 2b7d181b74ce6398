"""`tidegate engine` as a process."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from click.testing import CliRunner
from tests.unit.engine.conftest import Http

from tidegate.cli.engine import engine as command

RUNNING = 'vllm:num_requests_running{engine="0",model_name="tidegate"}'


async def until(ask: Callable[[], Awaitable[Any]], holds: Callable[[Any], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds(await ask()):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.01)


@asynccontextmanager
async def process(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from tidegate.cli.engine import engine; engine()",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert started.stdout is not None
        async with asyncio.timeout(60):
            line = (await started.stdout.readline()).decode()
        yield started, line.split()[0]
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def test_it_serves_drains_on_sigterm_and_exits(http: Http) -> None:
    flags = ("--port", "0", "--kv-tokens", "4096", "--time-scale", "20", "--shutdown-timeout", "30")
    async with process(*flags) as (running, url):
        body = {"prompt": [1] * 20, "max_tokens": 200, "ignore_eos": True}
        ask = asyncio.create_task(http.post(f"{url}/v1/completions", body))
        await until(lambda: http.text(f"{url}/metrics"), lambda text: f"{RUNNING} 1.0" in text)
        running.send_signal(signal.SIGTERM)
        status, answer = await ask
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
        async with asyncio.timeout(30):
            assert await running.wait() == 0


async def test_without_a_timeout_sigterm_aborts_at_once(http: Http) -> None:
    async with process("--port", "0", "--time-scale", "0.01") as (running, url):
        ask = asyncio.create_task(http.post(f"{url}/v1/completions", {"prompt": [1], "max_tokens": 200}))
        await until(lambda: http.get(f"{url}/load"), lambda answer: answer[1] == {"server_load": 1})
        running.send_signal(signal.SIGTERM)
        status, answer = await ask
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
        async with asyncio.timeout(30):
            assert await running.wait() == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kv-tokens", "1024", "--max-model-len", "2048"], "max_model_len 2048"),
        (["--latency", "h900"], "h900"),
        (["--time-scale", "0"], "time-scale"),
        (["--kv-tokens", "40", "--block-size", "32"], "block"),
    ],
)
def test_impossible_flags_are_refused(flags: list[str], says: str) -> None:
    result = CliRunner().invoke(command, ["--port", "0", *flags])
    assert result.exit_code != 0
    assert says in result.output
