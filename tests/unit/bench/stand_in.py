"""An endpoint that answers as an engine does: it remembers prompts by session and counts what was cached, so that the
driver's books can be checked against the other side's."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

BLOCK = 16


class StandIn:
    def __init__(self) -> None:
        self.known: dict[str, list[int]] = {}  # by session: the context whose KV it would hold
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.finished: list[str] = []
        self.failures: list[web.Response] = []  # answered first, one a request
        self.delay_s = 0.0
        self.returns_ids = True
        self.reports_cached = True
        self.knows_finish = True
        self.forgets_every = 0  # the n-th request finds nothing cached; 0: never
        self.forgotten_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.broken_prefixes = 0  # requests whose prompt does not start with what this session had before
        self.aborted = 0
        self.url = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/finish_session", self._finish)
        app.router.add_delete("/v1/router/session", self._delete)
        for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate"):
            app.router.add_post(path, self._generate)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "stand-in"}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            text=(
                f'vllm:prompt_tokens_total{{engine="0"}} {self.prompt_tokens}\n'
                f'vllm:prompt_tokens_cached_total{{engine="0"}} {self.cached_tokens}\n'
                f'vllm:num_preemptions_total{{engine="0"}} 3\n'
                f'vllm:cache_config_info{{block_size="{BLOCK}",engine="0",num_gpu_blocks="64"}} 1.0\n'
                "tidegate_engine_time_scale 50.0\n"
            )
        )

    async def _finish(self, request: web.Request) -> web.Response:
        self.finished.append(request.query["session_id"])
        return web.json_response({}, status=200 if self.knows_finish else 404)

    async def _delete(self, request: web.Request) -> web.Response:
        self.finished.append(request.headers["X-Session-ID"])
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = dict(request.headers)
        self.requests.append((request.path, headers, body))
        if self.failures:
            return self.failures.pop(0)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        ids, wanted = _prompt(request.path, body)
        session = headers["X-Session-ID"]
        cached = self._cached(session, ids)
        output = [17 + len(ids) % 7] * wanted
        self.known[session] = ids + output
        if body.get("stream"):
            return await self._stream(request, ids, output, cached)
        return web.json_response(self._reply(request.path, ids, output, cached))

    def _cached(self, session: str, ids: list[int]) -> int:
        before = self.known.get(session, [])
        common = next(
            (i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), min(map(len, (before, ids)))
        )
        self.broken_prefixes += common < len(before)
        # The KV of the last token generated, and of the last token of the prompt, is not there to be found.
        cached = max(0, min(common, len(before) - 1, len(ids) - 1)) // BLOCK * BLOCK
        self.prompt_tokens += len(ids)
        if self.forgets_every and len(self.requests) % self.forgets_every == 0:
            self.forgotten_tokens += cached
            cached = 0
        self.cached_tokens += cached
        return cached

    def _reply(self, path: str, ids: list[int], output: list[int], cached: int) -> dict[str, Any]:
        returned = output if self.returns_ids else None
        if path == "/generate":
            meta = {"prompt_tokens": len(ids), "completion_tokens": len(output), "cached_tokens": cached}
            return {"output_ids": returned, "text": "", "meta_info": {**meta, "finish_reason": {"type": "length"}}}
        choice: dict[str, Any] = {"token_ids": returned, "finish_reason": "length"}
        if path == "/v1/chat/completions":
            choice["message"] = {"content": "word " * len(output)}
        return {"choices": [choice], "usage": self._usage(ids, output, cached)}

    def _usage(self, ids: list[int], output: list[int], cached: int) -> dict[str, Any]:
        details = {"cached_tokens": cached} if cached and self.reports_cached else None  # as vLLM: 0 is left out
        return {"prompt_tokens": len(ids), "completion_tokens": len(output), "prompt_tokens_details": details}

    async def _stream(self, request: web.Request, ids: list[int], output: list[int], cached: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in output:
            event = web.json_response({"choices": [{"token_ids": [token], "text": "x"}]}).text
            await response.write(f"data: {event}\n\n".encode())
        last = web.json_response({"choices": [], "usage": self._usage(ids, output, cached)}).text
        await response.write(f"data: {last}\n\ndata: [DONE]\n\n".encode())
        return response


def _prompt(path: str, body: dict[str, Any]) -> tuple[list[int], int]:
    match path:
        case "/generate":
            return body["input_ids"], body["sampling_params"]["max_new_tokens"]
        case "/inference/v1/generate":
            return body["token_ids"], body["sampling_params"]["max_tokens"]
        case "/v1/chat/completions":
            words = " ".join(message["content"] for message in body["messages"]).split()
            return [hash(word) for word in words], body["max_tokens"]
        case _:
            return body["prompt"], body["max_tokens"]
