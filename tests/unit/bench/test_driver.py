from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.unit.bench.stand_in import BLOCK, StandIn

from tidegate.bench.client import ClientOptions, cacheable_tokens
from tidegate.bench.dialects import Api
from tidegate.bench.driver import LoadDriver, LoadOptions, LoadResult, inspect_target
from tidegate.errors import ConfigError
from tidegate.sim.workload import Workload
from tidegate.sim.workload_names import WorkloadOptions, build_workload


def workload(**options: Any) -> Workload:
    return build_workload("trace", WorkloadOptions(context_tokens=512, merge_turns=8, **options))


def options(stand_in: StandIn, *, sessions: int | None = 10, **client: Any) -> LoadOptions:
    settings = {"url": stand_in.url, "model": "m", "time_scale": 1000.0, "block_tokens": BLOCK} | client
    return LoadOptions(client=ClientOptions(**settings), concurrency=4, sessions=sessions, engine_urls=(stand_in.url,))


async def drive(stand_in: StandIn, **settings: Any) -> LoadResult:
    return await LoadDriver(workload(), options(stand_in, **settings)).run()


@pytest.mark.parametrize(
    ("api", "stream"),
    [("completions", False), ("completions", True), ("generate", False), ("generate", True), ("sglang", False)],
)
async def test_each_prompt_is_the_last_prompt_and_the_returned_output_and_more(
    stand_in: StandIn, api: Api, stream: bool
) -> None:
    result = await drive(stand_in, api=api, stream=stream)
    rewritten = sum(
        turn.keep_tokens is not None
        for name, source in workload().sources.items()
        for index in range(sum(s.workload == name for s in result.sessions))
        for turn in source.session(index).turns
    )
    assert stand_in.broken_prefixes == rewritten
    assert result.outputs_guessed == 0
    assert result.errors == {}


async def test_the_books_of_driver_and_engine_agree(stand_in: StandIn) -> None:
    result = await drive(stand_in)
    assert result.score.prompt_tokens == stand_in.prompt_tokens
    assert result.score.hit_rate == stand_in.cached_tokens / stand_in.prompt_tokens == result.engine_hit_rate
    assert result.score.recomputed_prompt_tokens == 0  # this engine evicts nothing
    assert sum(result.score.completed.values()) == 10


async def test_what_an_engine_forgets_is_recomputed(stand_in: StandIn) -> None:
    stand_in.forgets_every = 3
    result = await drive(stand_in)
    assert result.score.recomputed_prompt_tokens == stand_in.forgotten_tokens > 0
    assert result.score.hit_rate == stand_in.cached_tokens / stand_in.prompt_tokens


async def test_an_engine_that_never_tells_of_cached_tokens_leaves_the_hit_rate_unknown(stand_in: StandIn) -> None:
    stand_in.reports_cached = False
    result = await drive(stand_in)
    assert result.score.recomputed_prompt_tokens is None
    assert result.score.hit_rate is None
    assert result.engine_hit_rate == stand_in.cached_tokens / stand_in.prompt_tokens


async def test_sessions_say_who_they_are_and_when_they_end(stand_in: StandIn) -> None:
    await drive(stand_in, session_prefix="run7")
    sessions = {headers["X-Session-ID"] for _, headers, _ in stand_in.requests}
    assert len(sessions) == 10
    assert all(session.startswith("run7-") for session in sessions)
    assert {headers["X-Workload-Class"] for _, headers, _ in stand_in.requests} == {"agentic", "rlvr", "rlhf"}
    assert sorted(stand_in.finished) == sorted(sessions)


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_sessions_can_be_named_as_programs_too(stand_in: StandIn, api: Api) -> None:
    await drive(stand_in, api=api, programs=True)
    for _, headers, body in stand_in.requests:
        context = body["vllm_xargs"]["agentic_context"]  # text: vLLM refuses an object there
        assert msgspec.json.decode(context) == {"program_id": headers["X-Session-ID"]}


async def test_the_end_can_be_told_by_delete_or_not_at_all(stand_in: StandIn) -> None:
    await drive(stand_in, finish="delete")
    assert len(stand_in.finished) == 10
    await drive(stand_in, finish="none")
    assert len(stand_in.finished) == 10


async def test_a_target_without_finish_is_asked_no_further(stand_in: StandIn) -> None:
    stand_in.knows_finish = False
    result = await drive(stand_in)
    assert 1 <= result.errors["finish_unsupported"] == len(stand_in.finished) < 10


async def test_outputs_that_are_not_returned_are_made_up_and_counted(stand_in: StandIn) -> None:
    stand_in.returns_ids = False
    result = await drive(stand_in)
    assert result.outputs_guessed == 10
    assert stand_in.broken_prefixes > 0


async def test_chat_keeps_the_conversation(stand_in: StandIn) -> None:
    result = await drive(stand_in, api="chat")
    assert sum(result.score.completed.values()) == 10
    longest = max((body["messages"] for _, _, body in stand_in.requests), key=len)
    assert [message["role"] for message in longest[:3]] == ["user", "assistant", "user"]


async def test_a_failed_session_counts_as_failed_with_its_kind(stand_in: StandIn) -> None:
    refusal = {"error": {"message": "no", "type": "overloaded_error", "code": "hold_timeout"}}
    stand_in.failures = [
        web.json_response(refusal, status=503),
        web.Response(status=500),
        web.json_response({"choices": [{"finish_reason": "abort"}], "usage": {"prompt_tokens": 1}}),
        web.Response(text="not json"),
        web.json_response({"choices": []}),
    ]
    result = await drive(stand_in)
    assert result.errors == {
        "http_503:hold_timeout": 1,
        "http_500": 1,
        "bad_reply:finish_abort": 1,
        "bad_reply:not_json": 1,
        "bad_reply:no_usage": 1,
    }
    assert result.score.failed == 5
    assert sum(result.score.completed.values()) == 5


async def test_retries_are_counted(stand_in: StandIn) -> None:
    stand_in.failures = [web.Response(status=503, headers={"Retry-After": "0"}) for _ in range(2)]
    result = await drive(stand_in, retries=1)
    assert result.errors == {"retried:http_503": 2}
    assert result.score.failed == 0


async def test_nothing_but_failures_ends_the_run(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.bench.driver.FAILED_SESSION_WAIT_S", 0.0)
    await stand_in.stop()
    with pytest.raises(ConfigError, match="100 sessions in a row failed: connect x1"):
        await LoadDriver(workload(), options(stand_in, sessions=None)).run()


async def test_sessions_open_at_the_end_of_a_window_are_cut_off_and_stay_open_in_the_books(stand_in: StandIn) -> None:
    stand_in.delay_s = 3600
    settings = msgspec.structs.replace(options(stand_in, sessions=None), warmup_s=0.0, duration_s=0.3)
    result = await LoadDriver(workload(), settings).run()
    assert [session.ended_s for session in result.sessions] == [None] * 4
    assert result.score.mean_in_flight == pytest.approx(4, rel=0.5)
    assert len(stand_in.finished) == 4  # so that the router can forget them
    for _ in range(100):
        if stand_in.aborted == 4:
            break
        await asyncio.sleep(0.02)
    assert stand_in.aborted == 4


async def test_two_runs_of_one_seed_offer_the_same_sessions(stand_in: StandIn) -> None:
    await drive(stand_in)
    first = sorted((headers["X-Session-ID"], str(body)) for _, headers, body in stand_in.requests)
    stand_in.requests.clear()
    stand_in.known.clear()
    await drive(stand_in)
    assert sorted((headers["X-Session-ID"], str(body)) for _, headers, body in stand_in.requests) == first


async def test_groups_are_named_to_the_router(stand_in: StandIn) -> None:
    await LoadDriver(workload(group_size=2), options(stand_in)).run()
    assert "agentic/group/0" in {headers.get("X-Group-ID") for _, headers, _ in stand_in.requests}


async def test_the_target_tells_its_model_time_scale_and_block_size(stand_in: StandIn) -> None:
    target = await inspect_target(stand_in.url, (stand_in.url,), None)
    assert (target.model, target.facts.time_scale, target.facts.block_tokens) == ("stand-in", 50.0, BLOCK)
    target = await inspect_target(stand_in.url, (), "given")
    assert (target.model, target.facts.time_scale, target.facts.block_tokens) == ("given", 1.0, 1)


def test_only_whole_blocks_before_the_last_token_can_be_cached() -> None:
    assert cacheable_tokens(repeated=100, prompt_tokens=200, block_tokens=16) == 96
    assert cacheable_tokens(repeated=97, prompt_tokens=97, block_tokens=16) == 96
    assert cacheable_tokens(repeated=96, prompt_tokens=96, block_tokens=16) == 80
    assert cacheable_tokens(repeated=0, prompt_tokens=96, block_tokens=16) == 0
