"""What did it cost? Watches one exchange's bytes pass and learns its token counts.

Source of a count, best first:
  1. the replica's own usage, wherever it stands in the reply (`scan`)
  2. ids counted in the reply (`token_ids` of /inference/v1/generate, where older engines send no usage)
  3. estimated: completion tokens from stream events or the reply's size, prompt tokens from the request's size

Bytes are never changed nor held, except where a reply may be an abort before any text (`aborts`): there the head is
kept back until the first generated content is seen, so that the request can still go to another replica. A
compressed reply is not decoded: its counts are estimated.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from tidegate.proxy.aborts import stream_start, whole_reply
from tidegate.proxy.scan import CountScanner, IdCounter
from tidegate.proxy.seam import Headers, RequestHead, Verdict
from tidegate.proxy.tokens import TokenRatios

PROGRESS_TOKENS = (
    128  # between two reports of a stream's growth: eight of vLLM's blocks, at most ~1 a second and stream
)
MAX_KEPT_BYTES = 16_384  # an abort without text is far smaller; the relay keeps back no more


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    estimated: bool


class UsageMeter:
    __slots__ = (
        "first_byte_s",
        "load_report",
        "status",
        "wants_retry",
        "_compressed",
        "_events",
        "_head",
        "_ids",
        "_kept",
        "_next_progress",
        "_now_s",
        "_on_progress",
        "_ratios",
        "_request_bytes",
        "_response_bytes",
        "_scanner",
        "_stream",
        "_watch_aborts",
    )

    def __init__(
        self,
        head: RequestHead,
        ratios: TokenRatios,
        now_s: Callable[[], float],
        on_progress: Callable[[int], None],
        watch_aborts: Callable[[], bool],
    ) -> None:
        """`watch_aborts`: whether an abort without text would be the replica's own doing, and worth another try."""
        self._head = head
        self._ratios = ratios
        self._now_s = now_s
        self._on_progress = on_progress
        self._watch_aborts = watch_aborts
        self._request_bytes = 0
        self._start()

    def _start(self) -> None:
        self.wants_retry = False  # the last verdict was: give it to another replica
        self.status: int | None = None
        self.first_byte_s: float | None = None
        self.load_report: bytes | None = None  # the replica's ORCA header
        self._stream = False
        self._compressed = False
        self._events = 0
        self._next_progress = PROGRESS_TOKENS
        self._response_bytes = 0
        self._kept: bytes | None = None  # what came of a reply whose head is kept back
        self._scanner = CountScanner()
        self._ids: IdCounter | None = None

    # --- what the relay tells ------------------------------------------------------------------------------------
    def request_body(self, chunk: bytes) -> None:
        self._request_bytes += len(chunk)

    def response_head(self, status: int, headers: Headers) -> Verdict:
        self._start()  # a try on another replica begins anew
        self.status = status
        self.first_byte_s = self._now_s()
        length: int | None = None
        media_type = b""
        for name, value in headers:
            lower = name.lower()
            if lower == b"content-type":
                media_type = value.lower()
            elif lower == b"content-length":
                length = int(value) if value.isdigit() else None
            elif lower == b"content-encoding":
                self._compressed = value.strip().lower() != b"identity"
            elif lower == b"endpoint-load-metrics":
                self.load_report = value
        self._stream = media_type.startswith(b"text/event-stream")
        path = self._head.path
        if path == "/inference/v1/generate":
            self._ids = IdCounter(b"token_ids")
        if status != 200 or self._compressed or not (length is None or length <= MAX_KEPT_BYTES):
            return "pass"
        if not self._watch_aborts():
            return "pass"
        self._kept = b""
        return "wait"

    def response_body(self, chunk: bytes) -> Verdict:
        if not self._response_bytes and chunk.startswith(b"["):
            self._scanner = CountScanner(sum_items=True)  # SGLang's answer to a batch of prompts
        self._response_bytes += len(chunk)
        if not self._compressed:
            self._scanner.feed(chunk)
            if self._ids is not None:
                self._ids.feed(chunk)
        if self._stream:
            self._count_events(chunk)
        if self._kept is None:
            return "pass"
        self._kept += chunk
        return self._judge_stream() if self._stream else self._judge_size()

    def response_end(self) -> Verdict:
        kept, self._kept = self._kept, None
        if kept is None or self._stream:
            return "pass"
        if not kept.startswith(b"{"):
            return "pass"
        return self._retry_if_ours(whole_reply(self._head.path, kept) == "abort")

    # --- what the driver asks ------------------------------------------------------------------------------------
    @property
    def aborted(self) -> bool:
        """The replica ended the generation before its end."""
        return self._scanner.aborted

    def usage(self) -> Usage:
        """Of what has passed so far: at the end, or where the exchange broke."""
        scanner, path = self._scanner, self._head.path
        scanner.finish()
        prompt, completion = scanner.prompt, scanner.completion
        request_bytes = self._request_bytes or self._head.content_length
        if prompt is not None and request_bytes:
            self._ratios.learn(path, request_bytes, prompt)
        estimated = prompt is None or completion is None
        if completion is None and self._ids is not None and self._ids.count:
            completion = self._ids.count
        if self.status is None or not 200 <= self.status < 300:
            return Usage(
                prompt_tokens=prompt, completion_tokens=completion, cached_tokens=scanner.cached, estimated=estimated
            )
        if prompt is None:
            prompt = self._ratios.estimate(path, request_bytes)
        reply = "reply " + path  # a key of its own: replies carry log probabilities and the like
        if completion is not None and not self._stream:
            self._ratios.learn(reply, self._response_bytes, completion)
        elif completion is None and self._stream:
            completion = self._events
        elif completion is None and self._response_bytes:
            completion = self._ratios.estimate(reply, self._response_bytes)
        return Usage(
            prompt_tokens=prompt, completion_tokens=completion, cached_tokens=scanner.cached, estimated=estimated
        )

    # --- inside --------------------------------------------------------------------------------------------------
    def _count_events(self, chunk: bytes) -> None:
        """An event is a token, or a few with speculative decoding: near enough until usage comes."""
        self._events += chunk.count(b"\n\n") or chunk.count(b"\r\n\r\n")
        made = max(self._events, self._scanner.completion or 0)
        if made >= self._next_progress:
            self._next_progress = made + PROGRESS_TOKENS
            self._on_progress(made)

    def _judge_stream(self) -> Verdict:
        kept = self._kept or b""
        sight = stream_start(self._head.path, kept)
        if sight == "empty" and len(kept) < MAX_KEPT_BYTES:
            return "wait"
        self._kept = None
        return self._retry_if_ours(sight == "abort")

    def _judge_size(self) -> Verdict:
        if len(self._kept or b"") <= MAX_KEPT_BYTES:
            return "wait"
        self._kept = None
        return "pass"

    def _retry_if_ours(self, empty_abort: bool) -> Verdict:
        # Asked again: a client's own abort call may have come since the head.
        self.wants_retry = empty_abort and self._watch_aborts()
        return "retry" if self.wants_retry else "pass"
