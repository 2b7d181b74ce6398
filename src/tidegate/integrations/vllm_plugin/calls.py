"""The calls that an engine answers, in plain data: what goes over the wire between vLLM's processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tidegate.integrations.vllm_plugin.retention import Moved, Retention


class Running(NamedTuple):
    """A request that has not ended."""

    request: str
    session: str
    blocks: int  # that it holds


def carry_out(
    retention: Retention[Any], name: str, sessions: list[str] | None, running: Iterable[Running]
) -> dict[str, Any]:
    """`release`, `demote`, `protect` of these sessions, or `sessions`: what is resident of them, or of all."""
    named = sessions or []
    match name:
        case "sessions":
            return {"sessions": _resident(retention, sessions, running)}
        case "release":
            mine = set(named)
            overtaken = [one.request for one in running if one.session in mine]
            return {**_counted(retention.release(named, overtaken)), "running_requests": len(overtaken)}
        case "demote":
            return _counted(retention.demote(named))
        case "protect":
            return _counted(retention.protect(named))
    raise ValueError(f"there is no call {name!r}")


def _counted(moved: Moved) -> dict[str, Any]:
    return {"known_sessions": moved.known, "moved_blocks": moved.moved, "kept_blocks": moved.kept}


def _resident(
    retention: Retention[Any], names: list[str] | None, running: Iterable[Running]
) -> dict[str, dict[str, Any]]:
    """Running requests hold blocks that are not claimed yet: they are counted beside."""
    wanted = None if names is None else set(names)
    found: dict[str, dict[str, Any]] = {
        name: {"blocks": blocks, "shared_blocks": shared, "demoted": demoted, "running_blocks": 0}
        for name, (blocks, shared, demoted) in retention.resident(names).items()
    }
    for one in running:
        if wanted is None or one.session in wanted:
            none = {"blocks": 0, "shared_blocks": 0, "demoted": False, "running_blocks": 0}
            found.setdefault(one.session, none)["running_blocks"] += one.blocks
    return found
