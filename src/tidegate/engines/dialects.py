"""A control call in one engine's words, understood, so that it can be put in another's.

    vLLM                                        SGLang                                       what it asks for
    /pause?mode=abort|wait|keep&clear_cache=    /pause_generation {mode}                     pause
    /resume                                     /continue_generation                         resume
    /is_paused                                  /ready (503 while paused)                    is_paused
    /reset_prefix_cache                         /flush_cache                                 reset_prefix_cache
    /abort_requests {request_ids}               /abort_request {rid, abort_all}              abort, abort_all
    /sleep?level=, /wake_up?tags=               /release_, /resume_memory_occupation {tags}  sleep, wake_up

The other direction, words for a wish, is the adapters' `calls`. A call that asks for nothing that both engines have
(weight updates, profiles) is nobody's but its own engine's, and goes to every replica as it came.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct

from tidegate.engines.base import UNREADABLE, Action, EngineName


class Wish(Struct, frozen=True, kw_only=True):
    """What a call asks for, and in whose words it came."""

    action: Action
    spoken: EngineName
    options: dict[str, str] = {}


_SAME_EVERYWHERE: dict[str, tuple[EngineName, Action]] = {
    "/resume": ("vllm", "resume"),
    "/is_paused": ("vllm", "is_paused"),
    "/reset_prefix_cache": ("vllm", "reset_prefix_cache"),
    "/sleep": ("vllm", "sleep"),
    "/wake_up": ("vllm", "wake_up"),
    "/continue_generation": ("sglang", "resume"),
    "/flush_cache": ("sglang", "reset_prefix_cache"),
    "/release_memory_occupation": ("sglang", "sleep"),
    "/resume_memory_occupation": ("sglang", "wake_up"),
}
# `retract` sends running requests back to the queue: they go on after the pause, as with `keep`.
_SGLANG_PAUSES = {"abort": "abort", "retract": "keep", "in_place": "keep"}


def understood(path: str, query: str, body: bytes) -> Wish | None:
    """None: no call that both engines know, or an abort whose body cannot be read: it must not pass for one of all
    requests. In any other call such a body asks for what an empty one does. The engine that it was meant for judges."""
    options = dict(parse_qsl(query))
    match path:
        case "/pause":
            return Wish(action="pause", spoken="vllm", options=options)
        case "/pause_generation":
            mode = str(_fields(body).get("mode", "abort"))
            options = {"mode": _SGLANG_PAUSES.get(mode, mode), "clear_cache": "false"}  # it leaves the cache
            return Wish(action="pause", spoken="sglang", options=options)
        case "/abort_requests":
            asked = _decoded(body)
            return None if asked is None else _abort("vllm", asked.get("request_ids"))
        case "/abort_request":
            asked = _decoded(body)
            if asked is None:
                return None
            return _abort("sglang", None if asked.get("abort_all") is True else asked.get("rid"))
        case _:
            known = _SAME_EVERYWHERE.get(path)
            return known and Wish(action=known[1], spoken=known[0], options=options)


def _abort(spoken: EngineName, ids: Any) -> Wish:
    """Both engines take no ids for all of them."""
    named = [str(id) for id in ids] if isinstance(ids, list) else [str(ids)] if ids else []
    if not named:
        return Wish(action="abort_all", spoken=spoken)
    return Wish(action="abort", spoken=spoken, options={"ids": ",".join(named)})


def _fields(body: bytes) -> dict[str, Any]:
    return _decoded(body) or {}


def _decoded(body: bytes) -> dict[str, Any] | None:
    """None: it is no JSON object. An empty body is an empty one."""
    try:
        fields = msgspec.json.decode(body) if body else {}
    except UNREADABLE:
        return None
    return fields if isinstance(fields, dict) else None
