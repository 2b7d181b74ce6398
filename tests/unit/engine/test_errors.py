"""Bad input: vLLM's statuses and JSON shapes, whatever is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.engine.conftest import FROZEN, Http, StartEngine

from tidegate.engine.server import EngineServer

BAD: dict[str, tuple[str, Any]] = {
    "messages is not a list": ("/v1/chat/completions", {"messages": "hi"}),
    "no messages": ("/v1/chat/completions", {}),
    "no prompt": ("/v1/completions", {"model": "m"}),
    "an empty prompt": ("/v1/completions", {"prompt": []}),
    "empty text": ("/v1/completions", {"prompt": ""}),
    "a negative token id": ("/v1/completions", {"prompt": [-1]}),
    "a token id beyond 32 bits": ("/v1/completions", {"prompt": [2**40]}),
    "ids and text mixed": ("/v1/completions", {"prompt": [1, "a"]}),
    "max_tokens 0": ("/v1/completions", {"prompt": "a", "max_tokens": 0}),
    "min_tokens over max_tokens": ("/v1/completions", {"prompt": "a", "max_tokens": 2, "min_tokens": 3}),
    "n 0": ("/v1/completions", {"prompt": "a", "n": 0}),
    "echo": ("/v1/completions", {"prompt": "a", "echo": True}),
    "no token_ids": ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}),
    "no sampling_params": ("/inference/v1/generate", {"token_ids": [1]}),
    "no max_tokens": ("/v1/messages", {"messages": [], "model": "m"}),
    "no model, where the API requires it": ("/v1/messages", {"messages": [], "max_tokens": 1}),
    "neither text nor ids": ("/generate", {}),
    "a list, not an object": ("/v1/responses", []),
    "tokenize nothing": ("/tokenize", {}),
    "negative ids": ("/detokenize", {"tokens": [-4]}),
}


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_request_says_so(what: str, engine: EngineServer, http: Http) -> None:
    path, body = BAD[what]
    status, answer = await http.post(engine.url + path, body)
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == 400
    assert engine.core.unfinished == 0


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"prompt": "a",}'])
async def test_a_body_that_is_not_json_is_refused(body: bytes, engine: EngineServer, http: Http) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/inference/v1/generate", "/tokenize"):
        async with http.session.post(engine.url + path, data=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == 400


async def test_an_unknown_model_is_404_everywhere(engine: EngineServer, http: Http) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [], "max_tokens": 1, "model": "m"}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
    ):
        status, answer = await http.post(engine.url + path, {**body, "model": "other"})
        assert (status, answer["error"]["type"]) == (404, "NotFoundError")


async def test_unknown_paths_and_methods(engine: EngineServer, http: Http) -> None:
    assert (await http.post(f"{engine.url}/nope"))[0] == 404
    assert (await http.get(f"{engine.url}/v1/completions"))[0] == 405


async def test_unknown_fields_are_ignored(engine: EngineServer, http: Http) -> None:
    status, _ = await http.post(
        f"{engine.url}/v1/completions", {"prompt": "a", "top_k": 4, "logit_bias": {}, "whatever": [1]}
    )
    assert status == 200


async def test_too_many_queued_requests_are_answered_503_without_retry_after(
    start_engine: StartEngine, http: Http
) -> None:
    engine = await start_engine(max_num_queued_reqs=2, time_scale=FROZEN)
    url = f"{engine.url}/v1/completions"
    async with http.session.post(url, json={"prompt": "a", "n": 2, "stream": True}) as held:
        assert held.status == 200
        async with http.session.post(url, json={"prompt": "a"}) as refused:
            assert refused.status == 503
            assert "Retry-After" not in refused.headers
            assert (await refused.json())["error"]["code"] == 503
        assert await http.metric(engine, "vllm:admission_rejections_total") == 1
