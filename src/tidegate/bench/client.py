"""One rollout client: sends a session's turns one after the other and says when the session ends.

It behaves as prime-rl's rollout workers do: X-Session-ID on every request, no timeouts, no retries unless asked for,
POST /finish_session at the end with 5 s of patience. Nothing is hidden: every retry, failure and refused finish call is
counted by kind.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Literal, TypeAlias
from urllib.parse import quote

import aiohttp
import msgspec

from tidegate.bench.dialects import PATHS, Api, BadReply, Reply, StreamReader, read_reply, request_body
from tidegate.bench.transcript import ChatTranscript, TokenTranscript
from tidegate.sim.prompts import TokenStreams
from tidegate.sim.score import RequestRecord
from tidegate.sim.workload import SessionPlan

Finish: TypeAlias = Literal["auto", "none", "finish_session", "delete"]
"""How a session's end is told: POST /finish_session?session_id= (`auto`: until the target says that it does not know
it), DELETE /v1/router/session with X-Session-ID, or not at all."""

FINISH_TIMEOUT_S = 5.0  # prime-rl's
RETRY_WAIT_S = 1.0  # between tries where the answer has no Retry-After


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    model: str
    api: Api = "completions"
    stream: bool = False
    finish: Finish = "auto"
    programs: bool = False  # sessions are named as programs too, in completions and chat
    retries: int = 0  # of connection failures and 429/503; prime-rl and verifiers do none
    session_prefix: str = "bench"
    time_scale: float = 1.0  # engines' model seconds per second
    block_tokens: int = 1


class Failure(Exception):
    """A turn that got no result; the message is its kind."""

    def __init__(self, kind: str, *, retry_after_s: float | None = None, retryable: bool = False) -> None:
        super().__init__(kind)
        self.retry_after_s = retry_after_s
        self.retryable = retryable


class RolloutClient:
    def __init__(self, http: aiohttp.ClientSession, options: ClientOptions, streams: TokenStreams) -> None:
        self._http = http
        self._options = options
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self._origin_s = self._loop.time()
        self._finishing: set[asyncio.Task[None]] = set()
        self._finish_unsupported = False
        self.requests: list[RequestRecord] = []
        self.errors: Counter[str] = Counter()
        self.outputs_guessed = 0  # sessions that had to go on with made-up output ids: their hits are understated

    def now_s(self) -> float:
        """Model time since the client was made."""
        return (self._loop.time() - self._origin_s) * self._options.time_scale

    async def run(self, plan: SessionPlan) -> bool:
        """All turns of a session; whether every one was answered. The end is told also when the run is cancelled."""
        session = f"{self._options.session_prefix}-{plan.workload}-{plan.index}"
        transcript = (ChatTranscript if self._options.api == "chat" else TokenTranscript)(plan, self._streams)
        try:
            for number, turn in enumerate(plan.turns):
                if turn.gap_s:
                    await asyncio.sleep(turn.gap_s / self._options.time_scale)
                await self._turn(session, plan, number, transcript)
        except Failure as failure:
            self.errors[str(failure)] += 1
            return False
        finally:
            self.outputs_guessed += transcript.output_guessed
            self._finish(session)
        return True

    async def settle(self) -> None:
        """Until the finish calls made so far have ended."""
        await asyncio.gather(*self._finishing)

    async def _turn(
        self, session: str, plan: SessionPlan, number: int, transcript: TokenTranscript | ChatTranscript
    ) -> None:
        options = self._options
        repeated = transcript.begin_turn(number)
        body = request_body(
            options.api,
            options.model,
            transcript.json,
            plan.turns[number].output_tokens,
            stream=options.stream,
            program=session if options.programs else None,
        )
        headers = {
            "Content-Type": "application/json",
            "X-Session-ID": session,
            "X-Workload-Class": plan.workload,
        }
        if plan.group is not None:
            headers["X-Group-ID"] = plan.group
        sent_s = self.now_s()
        reply, first_byte_s = await self._send(body, headers)
        transcript.end_turn(number, reply)
        self.requests.append(
            RequestRecord(
                workload=plan.workload,
                sent_s=sent_s,
                first_byte_s=first_byte_s,
                ended_s=self.now_s(),
                prompt_tokens=reply.prompt_tokens,
                output_tokens=reply.output_tokens,
                cached_tokens=reply.cached_tokens,
                repeated_tokens=cacheable_tokens(repeated, reply.prompt_tokens, options.block_tokens),
            )
        )

    async def _send(self, body: bytes, headers: dict[str, str]) -> tuple[Reply, float]:
        for tries_left in range(self._options.retries, -1, -1):
            try:
                return await self._post(body, headers)
            except Failure as failure:
                if not (tries_left and failure.retryable):
                    raise
                self.errors[f"retried:{failure}"] += 1
                wait_s = RETRY_WAIT_S if failure.retry_after_s is None else failure.retry_after_s
            await asyncio.sleep(wait_s)
        raise AssertionError("unreachable")

    async def _post(self, body: bytes, headers: dict[str, str]) -> tuple[Reply, float]:
        options = self._options
        try:
            async with self._http.post(options.url + PATHS[options.api], data=body, headers=headers) as response:
                first_byte_s = self.now_s()
                if response.status != 200:
                    raise _refusal(response.status, await response.read(), response.headers.get("Retry-After"))
                if not (options.stream and options.api != "sglang"):
                    return read_reply(options.api, await response.read()), first_byte_s
                reader = StreamReader()
                async for line in response.content:
                    reader.line(line)
                return reader.reply(), first_byte_s
        except aiohttp.ClientConnectorError as error:
            raise Failure("connect", retryable=True) from error
        except aiohttp.ServerDisconnectedError as error:
            raise Failure("disconnected", retryable=True) from error
        except aiohttp.ClientError as error:
            raise Failure(f"broken:{type(error).__name__}") from error
        except BadReply as error:
            raise Failure(f"bad_reply:{error}") from error

    def _finish(self, session: str) -> None:
        if self._options.finish == "none" or self._finish_unsupported:
            return
        task = self._loop.create_task(self._tell_end(session))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _tell_end(self, session: str) -> None:
        options = self._options
        timeout = aiohttp.ClientTimeout(total=FINISH_TIMEOUT_S)
        method, path = ("DELETE", "/v1/router/session")
        if options.finish != "delete":
            method, path = "POST", f"/finish_session?session_id={quote(session, safe='')}"
        try:
            async with self._http.request(
                method, options.url + path, headers={"X-Session-ID": session}, timeout=timeout
            ) as response:
                await response.read()
                if response.status in (404, 405, 501):
                    self._finish_unsupported = options.finish == "auto"
                    self.errors["finish_unsupported"] += 1
                elif response.status >= 400:
                    self.errors[f"finish_http_{response.status}"] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            self.errors[f"finish_failed:{type(error).__name__}"] += 1


def cacheable_tokens(repeated: int, prompt_tokens: int, block_tokens: int) -> int:
    """Of a prompt's repeated tokens, those that a cache can give back: whole blocks, and never the last token of the
    prompt (its logits are needed) or the last one generated (its KV was never computed)."""
    return max(0, min(repeated, prompt_tokens) - 1) // block_tokens * block_tokens


def _refusal(status: int, body: bytes, retry_after: str | None) -> Failure:
    reason = ""
    try:
        code = msgspec.json.decode(body)["error"]["code"]
        reason = f":{code}" if isinstance(code, str) else ""
    except (msgspec.DecodeError, KeyError, TypeError):
        pass
    after_s = float(retry_after) if retry_after and retry_after.isdecimal() else None
    return Failure(f"http_{status}{reason}", retry_after_s=after_s, retryable=status in (429, 503))
