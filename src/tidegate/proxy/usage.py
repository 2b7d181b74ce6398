"""What did it cost? Watches one exchange's bytes pass and learns its token counts.

Source of a count, best first:
  1. the replica's own usage: of a small whole reply decoded (`reply`), else found in the bytes as they pass (`scan`)
  2. ids counted in the reply (`token_ids` of /inference/v1/generate, where older engines send no usage)
  3. estimated: completion tokens from stream events or the reply's size, prompt tokens from the request's size

A count that cannot be is not believed: negative ones, prompts beyond any model's context and beyond their own bytes,
more cached tokens than the prompt has. What it would have told is then estimated, and `implausible` says so.

Bytes are never changed nor held, except where a reply may be an abort before any text (`aborts`): there the head is
kept back until the first generated content is seen, so that the request can still go to another replica. A
compressed reply is not decoded: its counts are estimated.

This runs for every request: what a request does not need is not made, and times are taken from the driver's.
"""

from __future__ import annotations

from typing import Final, Protocol

from msgspec import Struct

from tidegate.proxy.aborts import stream_start, turned_away, whole_reply
from tidegate.proxy.reply import decode
from tidegate.proxy.scan import CountScanner, IdCounter
from tidegate.proxy.seam import Chunk, Headers, RequestHead, Verdict
from tidegate.proxy.tokens import TokenRatios

# Between two reports of a stream's growth: eight of vLLM's blocks, a second or more of a stream.
PROGRESS_TOKENS: Final = 128
MAX_KEPT_BYTES: Final = 16_384  # an abort without text is far smaller; the relay keeps back no more
MAX_TOKENS: Final = 2**24  # the longest contexts offered are 10M; batches may have more, at a byte a token at least
_GENERATE = "/inference/v1/generate"

# What a response header's name means, by the name as engines spell it; filled as spellings are met.
_TYPE: Final = 0
_LENGTH: Final = 1
_ENCODING: Final = 2
_LOAD: Final = 3
_OTHER: Final = 4
_CANONICAL = {
    b"content-type": _TYPE,
    b"content-length": _LENGTH,
    b"content-encoding": _ENCODING,
    b"endpoint-load-metrics": _LOAD,
}
_roles: Final[dict[bytes, int]] = {}
_MAX_NAMES: Final = 1024


def _role(name: bytes) -> int:
    role = _CANONICAL.get(name.lower(), _OTHER)
    if len(_roles) < _MAX_NAMES:
        _roles[name] = role
    return role


class Usage(Struct, frozen=True):
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    estimated: bool


class Watcher(Protocol):
    """Who wants to know while it passes; the driver."""

    ratios: TokenRatios

    def now_s(self) -> float: ...
    def progressed(self, meter: UsageMeter, completion_tokens: int) -> None: ...
    def aborts_are_the_replicas(self, meter: UsageMeter) -> bool:
        """Whether an abort without text would be the replica's own doing, and worth another try."""
        ...


class UsageMeter:
    """Implements `proxy.seam.Meter`."""

    first_byte_s: float | None = None
    status: int | None = None
    load_report: bytes | None = None  # the replica's ORCA header
    wants_retry = False  # the last verdict was: give it to another replica
    implausible = False  # the replica's own counts cannot be
    aborted = False  # the replica ended the generation before its end

    _request_bytes = 0
    _response_bytes = 0
    _stream = False
    _compressed = False
    _events = 0
    _next_progress = PROGRESS_TOKENS
    _kept: bytes | None = None  # what came of a reply whose head is kept back
    _scanner: CountScanner | None = None
    _ids: IdCounter | None = None
    _prompt: int | None = None
    _completion: int | None = None
    _cached: int | None = None

    def __init__(self, head: RequestHead, watcher: Watcher) -> None:
        self._head = head
        self._watcher = watcher

    # --- what the relay tells ----------------------------------------------------------------------------------------
    def request_body(self, chunk: Chunk) -> None:
        self._request_bytes += len(chunk)

    def response_head(self, status: int, headers: Headers) -> Verdict:
        self.status = status
        self.first_byte_s = self._watcher.now_s()
        length: int | None = None
        for name, value in headers:
            role = _roles.get(name)
            if role is None:
                role = _role(name)
            if role == _OTHER:
                continue
            if role == _TYPE:
                self._stream = value[:17].lower() == b"text/event-stream"
            elif role == _LENGTH:
                length = int(value) if value.isdigit() else None
            elif role == _ENCODING:
                self._compressed = value.strip().lower() != b"identity"
            else:
                self.load_report = value
        if status not in (200, 500) or self._compressed or (length is not None and length > MAX_KEPT_BYTES):
            return "pass"
        if not self._watcher.aborts_are_the_replicas(self):
            return "pass"
        self._kept = b""
        return "wait"

    def response_body(self, chunk: bytes) -> Verdict:
        self._response_bytes += len(chunk)
        if self._kept is not None:
            return self._keep(self._kept, chunk)
        if not self._compressed:
            self._look_at(chunk)
        return "pass"

    def response_end(self) -> Verdict:
        kept, self._kept = self._kept, None
        if kept is None or self._stream:
            return "pass"
        return self._judge_whole(kept)

    # --- what the driver asks ----------------------------------------------------------------------------------------
    def usage(self) -> Usage:
        """Of what has passed so far: at the end, or where the exchange broke."""
        self._collect()
        ratios, path = self._watcher.ratios, self._head.path
        request_bytes = self._request_bytes or self._head.content_length
        prompt = self._plausible(self._prompt, max(MAX_TOKENS, request_bytes or 0))
        completion = self._plausible(self._completion, max(MAX_TOKENS, self._response_bytes))
        cached = self._plausible(self._cached, prompt) if prompt is not None else None
        if prompt is not None and request_bytes:
            ratios.learn(path, request_bytes, prompt)
        if prompt is not None and completion is not None:
            if not self._stream and self._response_bytes & 15 == 0:  # one in sixteen is enough, and free of time
                ratios.learn_reply(path, self._response_bytes, completion)
            return Usage(prompt, completion, cached, False)
        if self.status is None or not 200 <= self.status < 300:
            return Usage(prompt, completion, cached, True)
        if prompt is None:
            prompt = ratios.estimate(path, request_bytes)
        if completion is None:
            completion = self._events if self._stream else ratios.estimate_reply(path, self._response_bytes)
        return Usage(prompt, completion, cached, True)

    def _plausible(self, count: int | None, most: int) -> int | None:
        if count is None or 0 <= count <= most:
            return count
        self.implausible = True
        return None

    def begin_anew(self) -> None:
        """A replica gave the request back: nothing of its reply, if there was one, is the next one's."""
        self.status = self.first_byte_s = self.load_report = self._scanner = self._ids = self._kept = None
        self.wants_retry = self.implausible = self.aborted = self._stream = self._compressed = False
        self._events = self._response_bytes = 0
        self._prompt = self._completion = self._cached = None
        self._next_progress = PROGRESS_TOKENS

    # --- inside ------------------------------------------------------------------------------------------------------
    def _keep(self, kept: bytes, chunk: bytes) -> Verdict:
        """While the head is kept back."""
        kept = kept + chunk if kept else chunk
        if self._stream:
            self._look_at(chunk)
            self._kept = kept
            return self._judge_stream(kept)
        if len(kept) <= MAX_KEPT_BYTES:
            self._kept = kept
            return "wait"
        self._kept = None
        self._look_at(kept)
        return "pass"

    def _look_at(self, chunk: bytes) -> None:
        scanner = self._scanner
        if scanner is None:
            # SGLang answers a batch of prompts with a list.
            scanner = self._scanner = CountScanner(sum_items=chunk.startswith(b"["))
            if self._head.path == _GENERATE:
                self._ids = IdCounter(b"token_ids")
        scanner.feed(chunk)
        if self._ids is not None:
            self._ids.feed(chunk)
        if self._stream:
            self._events = events = self._events + (chunk.count(b"\n\n") or chunk.count(b"\r\n\r\n"))
            if events >= self._next_progress:
                self._grew(events)

    def _collect(self) -> None:
        if self._kept:  # cut short while the head was kept back
            if not self._stream:
                self._look_at(self._kept)
            self._kept = None
        scanner = self._scanner
        if scanner is not None:
            scanner.finish()
            self._prompt, self._completion, self._cached = scanner.prompt, scanner.completion, scanner.cached
            self.aborted = self.aborted or scanner.aborted
        if self._completion is None and self._ids is not None and self._ids.count:
            self._completion = self._ids.count

    def _grew(self, events: int) -> None:
        """An event is a token, or a few with speculative decoding: near enough until usage comes."""
        known = self._scanner.completion if self._scanner is not None else None
        made = max(events, self._plausible(known, MAX_TOKENS) or 0)
        self._next_progress = made + PROGRESS_TOKENS
        self._watcher.progressed(self, made)

    def _judge_whole(self, body: bytes) -> Verdict:
        if self.status != 200:
            return self._retry_if_theirs(turned_away(body))
        reply = decode(body)
        usage = (reply.usage or reply.meta_info) if reply is not None else None
        if reply is None or usage is None:
            self._look_at(body)
            return self._retry_if_theirs(whole_reply(self._head.path, body) == "abort")
        self._prompt, self._completion, self._cached = usage.counts()
        if not reply.aborted:
            return "pass"
        self.aborted = True
        return self._retry_if_theirs(whole_reply(self._head.path, body) == "abort")

    def _judge_stream(self, kept: bytes) -> Verdict:
        sight = stream_start(self._head.path, kept)
        if sight == "empty" and len(kept) < MAX_KEPT_BYTES:
            return "wait"
        self._kept = None
        return self._retry_if_theirs(sight == "abort")

    def _retry_if_theirs(self, empty_abort: bool) -> Verdict:
        # Asked again: a client's own abort call may have come since the head.
        self.wants_retry = empty_abort and self._watcher.aborts_are_the_replicas(self)
        return "retry" if self.wants_retry else "pass"
