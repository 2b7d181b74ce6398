"""What an engine with SGLang's surface answers beside /generate: control, health, load, sessions."""

from __future__ import annotations

from typing import Any

from tidegate import __version__
from tidegate.engine import info
from tidegate.engine.control import json_body
from tidegate.engine.core import EngineCore
from tidegate.engine.http import Call, Refusal
from tidegate.sim.replica import PauseMode

_MODES: dict[str, PauseMode] = {"abort": "abort", "in_place": "keep", "retract": "keep"}


async def pause_generation(core: EngineCore, call: Call) -> None:
    mode = str((await json_body(call)).get("mode", "abort"))
    if mode not in _MODES:
        raise Refusal(f"mode must be one of {', '.join(_MODES)}, not {mode!r}")
    await core.pause(_MODES[mode], clear_cache=False)
    await call.json({"status": "ok", "message": "Generation paused successfully."})


async def continue_generation(core: EngineCore, call: Call) -> None:
    core.resume()
    await call.json({"status": "ok", "message": "Generation continued successfully."})


async def flush_cache(core: EngineCore, call: Call) -> None:
    """Text, as SGLang says it; refused while requests run or wait."""
    flushed = not core.unfinished and core.reset_prefix_cache()
    text = b"Cache flushed.\n" if flushed else b"Flush cache failed: there are unfinished requests.\n"
    await call.raw(200 if flushed else 400, text, [(b"content-type", b"text/plain; charset=utf-8")])


async def abort_request(core: EngineCore, call: Call) -> None:
    """Ids are prefixes, as in SGLang."""
    body = await json_body(call)
    if body.get("abort_all") is True:
        core.abort_all()
    elif body.get("rid"):
        for known in core.matching(str(body["rid"])):
            core.abort(known)
    await call.raw(200, b"")


async def ready(core: EngineCore, call: Call) -> None:
    await call.raw(503 if core.replica.is_paused else 200, b"")


async def health(core: EngineCore, call: Call) -> None:
    """It generates a token to answer, so it hangs through a pause."""
    if core.replica.is_paused:
        await call.disconnected()
        return
    await info.health(core, call)


async def server_info(core: EngineCore, call: Call) -> None:
    server: dict[str, Any] = {
        "model_path": core.config.served_model_name,
        "version": __version__,
        "kv_events": None,
        "enable_session_radix_cache": core.plugin is not None,
    }
    await call.json(server)


async def loads(core: EngineCore, call: Call) -> None:
    config, pool = core.config, core.replica.pool
    load: dict[str, Any] = {
        "dp_rank": 0,
        "num_running_reqs": core.running,
        "num_waiting_reqs": core.waiting,
        "max_total_num_tokens": config.num_blocks * config.block_size,
        "token_usage": pool.usage,
    }
    await call.json({"loads": [load]})


async def open_session(core: EngineCore, call: Call) -> None:
    body = await json_body(call)
    if not isinstance(body.get("capacity_of_str_len"), int):
        raise Refusal("Field required", param="capacity_of_str_len")
    given = body.get("session_id")
    await call.json(core.sessions.open(None if given is None else str(given)))


async def close_session(core: EngineCore, call: Call) -> None:
    session = (await json_body(call)).get("session_id")
    if not isinstance(session, str):
        raise Refusal("Field required", param="session_id")
    core.sessions.close(session)
    if core.plugin is not None:
        core.plugin.release(session)
    await call.raw(200, b"")


ROUTES = {
    **{route: endpoint for route, endpoint in info.ROUTES.items() if route[1] in ("/v1/models", "/tokenize")},
    ("GET", "/health"): health,
    ("GET", "/ready"): ready,
    ("GET", "/server_info"): server_info,
    ("GET", "/v1/loads"): loads,
    ("POST", "/pause_generation"): pause_generation,
    ("POST", "/continue_generation"): continue_generation,
    ("GET", "/flush_cache"): flush_cache,
    ("POST", "/flush_cache"): flush_cache,
    ("POST", "/abort_request"): abort_request,
    ("POST", "/open_session"): open_session,
    ("POST", "/close_session"): close_session,
}
