"""A usage meter, and a relay that shows it a reply."""

from __future__ import annotations

import json
from typing import Any

from tidegate.proxy.seam import RequestHead
from tidegate.proxy.tokens import TokenRatios
from tidegate.proxy.usage import UsageMeter

JSON = [(b"Content-Type", b"application/json")]
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]

OPENAI = {"prompt_tokens": 120, "completion_tokens": 30, "total_tokens": 150}
CACHED = {**OPENAI, "prompt_tokens_details": {"cached_tokens": 96}}
RESPONSES = {
    "input_tokens": 120,
    "input_tokens_details": {"cached_tokens": 96},
    "output_tokens": 30,
    "output_tokens_details": {"reasoning_tokens": 7},
    "total_tokens": 150,
}
ANTHROPIC = {"input_tokens": 20, "output_tokens": 30, "cache_read_input_tokens": 96, "cache_creation_input_tokens": 4}
SGLANG = {"id": "x", "finish_reason": {"type": "stop"}, "prompt_tokens": 120, "completion_tokens": 30}


class Watch:
    """Stands for the driver: a clock that stands still, and who is to blame for an abort."""

    def __init__(self, blame_replicas: bool = True) -> None:
        self.ratios = TokenRatios()
        self.progress: list[int] = []
        self.blame_replicas = blame_replicas

    def now_s(self) -> float:
        return 5.0

    def progressed(self, meter: UsageMeter, completion_tokens: int) -> None:
        self.progress.append(completion_tokens)

    def aborts_are_the_replicas(self, meter: UsageMeter) -> bool:
        return self.blame_replicas


def meter_of(path: str = "/v1/completions", watch: Watch | None = None, request_bytes: int = 1000) -> UsageMeter:
    meter = UsageMeter(RequestHead("POST", path.encode(), [], request_bytes), watch or Watch())
    meter.request_body(b"x" * request_bytes)
    return meter


def relay(
    meter: UsageMeter, body: bytes, headers: Any = JSON, pieces: list[int] | None = None, status: int = 200
) -> str:
    """The last verdict that counts: of the first `pass` or `retry`, or of the end."""
    verdict: str = meter.response_head(status, headers)
    for start, end in zip([0, *(pieces or [])], [*(pieces or []), len(body)], strict=True):
        if start < end:
            said = meter.response_body(body[start:end])
            verdict = said if verdict == "wait" else verdict
            if verdict == "retry":
                return verdict
    said = meter.response_end()
    return said if verdict == "wait" else verdict


def events(*objects: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(o).encode() + b"\n\n" for o in objects) + b"data: [DONE]\n\n"
