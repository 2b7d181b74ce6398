"""Values of parameters given on the command line: `static_cap.cap=8`, or for one policy only `static_cap:cap=8`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tidegate.config.nearest import suggestion
from tidegate.errors import ConfigError
from tidegate.policy import policies
from tidegate.policy.params import CoreParams


class PolicyChoice(msgspec.Struct, frozen=True):
    """A policy with its parameters, and what they were changed by: `label` names it in results."""

    label: str
    name: str
    params: CoreParams


def policy_choice(text: str, settings: Iterable[str] = ()) -> PolicyChoice:
    """`text`: NAME or NAME:PARAM=VALUE[:PARAM=VALUE...]. A parameter without a section is one of the policy's own."""
    name, *own = text.strip().split(":")
    if name not in policies():
        raise ConfigError(
            f"no policy {name!r}, known: {', '.join(policies())}{suggestion(name, policies())}", reason="unknown_policy"
        )
    params = with_settings(CoreParams(), settings)
    qualified = [setting if "." in setting.partition("=")[0] else f"{name}.{setting}" for setting in own]
    return PolicyChoice(label=text.strip(), name=name, params=with_settings(params, qualified))


def with_settings(params: CoreParams, settings: Iterable[str]) -> CoreParams:
    tree: dict[str, Any] = msgspec.to_builtins(params)
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"{setting!r} is not policy.param=value", reason="invalid_setting")
        _set(tree, path.strip(), value.strip())
    try:
        return msgspec.convert(tree, CoreParams, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{', '.join(settings)}: {error}", reason="invalid_setting") from error


def _set(tree: dict[str, Any], path: str, value: str) -> None:
    *sections, leaf = path.split(".")
    node = tree
    for section in sections:
        node = _known(node, section, path)
    known = _known(node, leaf, path)
    if isinstance(known, dict):
        raise ConfigError(f"{path!r} is a section: {', '.join(known)}", reason="invalid_setting")
    node[leaf] = None if value in ("", "none") and not isinstance(known, str) else value


def _known(node: Any, key: str, path: str) -> Any:
    if not isinstance(node, dict) or key not in node:
        known = list(node) if isinstance(node, dict) else []
        raise ConfigError(f"no parameter {path!r}{suggestion(key, known)}", reason="invalid_setting")
    return node[key]
