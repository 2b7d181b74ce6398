"""Control of generation, caches and weights, as vLLM has it in development mode, with vLLM's answers."""

from __future__ import annotations

from typing import Any

import msgspec

from tidegate.engine.core import EngineCore
from tidegate.engine.http import Call, Refusal
from tidegate.sim.replica import PauseMode

_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}


def _mode(call: Call) -> PauseMode:
    given = call.query.get("mode", "abort")
    if given not in _MODES:
        raise Refusal(f"mode must be one of {', '.join(_MODES)}, not {given!r}", kind="Bad Request", param="query.mode")
    return _MODES[given]


def _flag(call: Call, name: str, default: bool) -> bool:
    given = call.query.get(name)
    return default if given is None else given.lower() in ("true", "1", "yes", "on")


async def json_body(call: Call) -> dict[str, Any]:
    raw = await call.body()
    try:
        body = msgspec.json.decode(raw) if raw else {}
    except msgspec.DecodeError as error:
        raise Refusal(f"JSON decode error: {error}", kind="Bad Request") from error
    if not isinstance(body, dict):
        raise Refusal("Request body must be a JSON object", kind="Bad Request")
    return body


async def pause(core: EngineCore, call: Call) -> None:
    await core.pause(_mode(call), clear_cache=_flag(call, "clear_cache", True))
    await call.json({"status": "paused"})


async def resume(core: EngineCore, call: Call) -> None:
    core.resume()
    await call.json({"status": "resumed"})


async def is_paused(core: EngineCore, call: Call) -> None:
    await call.json({"is_paused": core.replica.is_paused})


async def abort_requests(core: EngineCore, call: Call) -> None:
    """Without ids: all. vLLM counts the ids that it was given, known or not."""
    ids = (await json_body(call)).get("request_ids")
    if not ids:
        aborted = core.abort_all()
    else:
        for id in ids:
            for known in core.matching(str(id)):
                core.abort(known)
        aborted = len(ids)
    await call.json({"status": "aborted", "aborted": aborted})


async def reset_prefix_cache(core: EngineCore, call: Call) -> None:
    success = core.reset_prefix_cache(reset_running_requests=_flag(call, "reset_running_requests", False))
    await call.json({"success": success})


async def sleep(core: EngineCore, call: Call) -> None:
    given = call.query.get("level", "1")
    if given not in ("0", "1", "2"):
        raise Refusal(f"level must be 0, 1 or 2, not {given!r}", kind="Bad Request", param="query.level")
    await core.sleep(int(given), _mode(call))
    await call.json({"status": "sleeping", "level": int(given)})


async def wake_up(core: EngineCore, call: Call) -> None:
    tags = [call.query["tags"]] if "tags" in call.query else None
    core.wake_up()
    await call.json({"status": "awake", "tags": tags})


async def is_sleeping(core: EngineCore, call: Call) -> None:
    await call.json({"is_sleeping": core.sleep_level is not None})


async def collective_rpc(core: EngineCore, call: Call) -> None:
    """There are no workers: any method does nothing."""
    if "method" not in await json_body(call):
        raise Refusal("Missing 'method' in request body", kind="Bad Request")
    await call.json({"results": [None]})


def _done(message: str) -> Any:
    async def endpoint(core: EngineCore, call: Call) -> None:
        await json_body(call)
        await call.json({"message": message})

    return endpoint


async def empty(core: EngineCore, call: Call) -> None:
    await call.raw(200, b"")


ROUTES = {
    ("POST", "/pause"): pause,
    ("POST", "/resume"): resume,
    ("GET", "/is_paused"): is_paused,
    ("POST", "/abort_requests"): abort_requests,
    ("POST", "/reset_prefix_cache"): reset_prefix_cache,
    ("POST", "/reset_mm_cache"): empty,
    ("POST", "/reset_encoder_cache"): empty,
    ("POST", "/sleep"): sleep,
    ("POST", "/wake_up"): wake_up,
    ("GET", "/is_sleeping"): is_sleeping,
    ("POST", "/collective_rpc"): collective_rpc,
    ("POST", "/init_weight_transfer_engine"): _done("Weight transfer initialized"),
    ("POST", "/shutdown_weight_transfer_engine"): _done("Weight transfer shut down"),
    ("POST", "/start_weight_update"): _done("Weight update started"),
    ("POST", "/start_draft_weight_update"): _done("Draft weight update started"),
    ("POST", "/update_weights"): _done("Weights updated"),
    ("POST", "/finish_weight_update"): _done("Weight update finished"),
}
