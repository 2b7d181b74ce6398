"""The plugin in a real vLLM: what a session finds cached, and what is answered over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from tests.e2e.inference import completion, encode, token_ids
from tests.e2e.waiting import until
from tests.vllm.replica import BLOCK_TOKENS, VllmReplica

pytestmark = pytest.mark.vllm

KEY = "secret"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
LIVE_TOKENS = 6000  # of 16,384
DEAD_TOKENS = 4000


@pytest.fixture(scope="module")
def plugged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmReplica]:
    replica = VllmReplica(tmp_path_factory.mktemp("plugged") / "replica.log", plugin=True, extra=("--api-key", KEY))
    replica.start()
    try:
        replica.wait_ready()
        yield replica
    finally:
        replica.process.kill()


class Engine:
    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self.url = url
        self._client = client

    async def ask(self, method: str, path: str, body: Any = None, headers: Any = HEADERS) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else encode(body)
        async with self._client.request(method, self.url + path, data=data, headers=headers) as reply:
            return reply.status, await reply.json()

    async def order(self, name: str, *sessions: str) -> Any:
        status, answer = await self.ask("POST", f"/tidegate/{name}", {"session_ids": sessions})
        assert status == 200, answer
        return answer

    async def turn(self, session: str, prompt: list[int]) -> int:
        """Prompt tokens that were found in the cache."""
        headers = {**HEADERS, "X-Session-ID": session}
        status, reply = await self.ask("POST", "/v1/completions", completion(prompt), headers)
        assert status == 200, reply
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def sessions(self) -> Any:
        return (await self.ask("GET", "/tidegate/sessions"))[1]["sessions"]

    async def info(self) -> Any:
        return (await self.ask("GET", "/tidegate/info"))[1]


@pytest.fixture
async def engine(plugged: VllmReplica) -> AsyncIterator[Engine]:
    """With nothing cached."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as client:
        made = Engine(plugged.url, client)

        async def reset() -> bool:
            return bool((await made.ask("POST", "/reset_prefix_cache"))[1]["success"])

        await until(reset, bool)
        yield made


async def idle_through_dead_sessions(engine: Engine, *, release: bool) -> int:
    """What a live session finds of its tokens after four sessions have come and gone: more than the cache holds."""
    live = token_ids(LIVE_TOKENS, f"live {release}")
    await engine.turn("live", live)
    for number in range(4):
        await engine.turn(f"dead-{number}", token_ids(DEAD_TOKENS, f"dead {number} {release}"))
        if release:
            answer = await engine.order("release", f"dead-{number}")
            assert answer["known_sessions"] == 1
            assert answer["moved_blocks"] == DEAD_TOKENS // BLOCK_TOKENS
    return await engine.turn("live", live + token_ids(50, "next"))


async def test_a_live_session_outlasts_dead_ones_only_with_release(engine: Engine) -> None:
    assert await idle_through_dead_sessions(engine, release=False) < LIVE_TOKENS // 10
    await engine.ask("POST", "/reset_prefix_cache")
    assert await idle_through_dead_sessions(engine, release=True) > LIVE_TOKENS - 2 * BLOCK_TOKENS


async def test_what_a_live_session_shares_is_kept(engine: Engine) -> None:
    shared = token_ids(2048, "shared")
    for session in ("live", "dead"):
        await engine.turn(session, shared + token_ids(1024, session))
    answer = await engine.order("release", "dead")
    assert answer["kept_blocks"] == 2048 // BLOCK_TOKENS
    assert answer["moved_blocks"] == 1024 // BLOCK_TOKENS
    for number in range(3):  # as much as is not live
        await engine.turn(f"other-{number}", token_ids(4032, f"other {number}"))
    assert await engine.turn("live", shared + token_ids(1024, "live") + token_ids(64, "on")) == 3072


async def test_the_last_session_of_a_shared_prefix_takes_it_along(engine: Engine) -> None:
    shared = token_ids(2048, "group")
    for session in ("one", "two"):
        await engine.turn(session, shared + token_ids(256, session))
    assert (await engine.order("release", "one", "two"))["moved_blocks"] == (2048 + 2 * 256) // BLOCK_TOKENS
    assert await engine.sessions() == {}


async def test_a_demoted_session_goes_before_an_older_one_and_a_protected_one_after(engine: Engine) -> None:
    prompts = {name: token_ids(4032, name) for name in ("oldest", "paused", "kept")}
    for name, prompt in prompts.items():
        await engine.turn(name, prompt)
    await engine.order("demote", "paused")
    assert (await engine.sessions())["paused"]["demoted"]
    await engine.order("protect", "oldest")
    for session, tokens in (("new", 7000), ("newer", 2500)):  # more than was free and than the demoted one leaves
        await engine.turn(session, token_ids(tokens, session))
    resident = {name: entry["blocks"] for name, entry in (await engine.sessions()).items()}
    assert "paused" not in resident
    assert resident["oldest"] == 4032 // BLOCK_TOKENS
    assert 0 < resident["kept"] < 4032 // BLOCK_TOKENS


async def test_protect_takes_a_demotion_back(engine: Engine) -> None:
    await engine.turn("older", token_ids(4032, "older"))
    await engine.turn("paused", token_ids(4032, "resumed"))
    await engine.order("demote", "paused")
    await engine.order("protect", "paused")
    await engine.turn("new", token_ids(8100, "filler"))
    await engine.turn("new", token_ids(3000, "more"))
    resident = await engine.sessions()
    assert resident["paused"]["blocks"] == 4032 // BLOCK_TOKENS
    assert resident.get("older", {"blocks": 0})["blocks"] < 4032 // BLOCK_TOKENS


async def test_a_reset_forgets_all_sessions(engine: Engine) -> None:
    await engine.turn("some", token_ids(512, "some"))
    assert set(await engine.sessions()) == {"some"}
    assert (await engine.ask("POST", "/reset_prefix_cache"))[1]["success"]
    assert await engine.sessions() == {}
    assert (await engine.info())["engines"][0]["claims"] == 0
    assert (await engine.order("release", "some"))["known_sessions"] == 0


async def test_sleep_forgets_and_a_woken_engine_goes_on(engine: Engine) -> None:
    await engine.turn("before", token_ids(512, "before"))
    assert (await engine.ask("POST", "/pause?mode=abort"))[0] == 200
    assert await engine.sessions() == {}
    assert (await engine.order("release", "before"))["known_sessions"] == 0  # answered while it is paused
    assert (await engine.ask("POST", "/resume"))[0] == 200
    await engine.turn("after", token_ids(512, "after"))
    assert (await engine.order("release", "after"))["moved_blocks"] == 512 // BLOCK_TOKENS


async def test_an_unknown_session_is_no_error(engine: Engine) -> None:
    answer = await engine.order("release", "never heard of")
    assert answer == {"sessions": 1, "known_sessions": 0, "moved_blocks": 0, "kept_blocks": 0, "running_requests": 0}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b"{}", "session_id"),
        (b'{"session_id": 7}', "session_id"),
        (b'{"session_id": ""}', "session_id"),
        (b'{"session_ids": "a"}', "session_ids"),
        (b'{"session_id": "\\ud800"}', "session_id"),
        (b'{"session_id": "' + b"x" * 600 + b'"}', "session_id"),
    ],
)
async def test_bad_input_is_refused_in_openai_shape(engine: Engine, body: bytes, param: str | None) -> None:
    status, answer = await engine.ask("POST", "/tidegate/release", body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert answer["error"]["code"] == 400


async def test_the_servers_key_is_asked_for(engine: Engine) -> None:
    for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": KEY}):
        status, answer = await engine.ask("POST", "/tidegate/release", {"session_id": "a"}, headers)
        assert status == 401
        assert answer["error"]["code"] == 401


async def test_what_it_says_of_itself(engine: Engine) -> None:
    info = await engine.info()
    assert info["protocol"] == 1
    assert info["off"] is None
    assert set(info["features"]) == {"release", "demote", "protect", "sessions"}
    assert info["engine_version"].startswith("0.")


async def test_a_restarted_engine_is_another_instance_that_knows_nobody(plugged: VllmReplica, engine: Engine) -> None:
    await engine.turn("some", token_ids(512, "some"))
    before = (await engine.info())["instance"]
    plugged.restart()
    plugged.wait_ready()
    assert (await engine.info())["instance"] != before
    assert await engine.sessions() == {}
