"""Layers into one Config: defaults < TOML file < environment < flags, each value with its origin.

An unknown key is refused with the nearest known name; an error names the file, variable or flag it came from and
the key's path. Text (variables, flags) reads as: `none` for an optional value, commas between the items of a list,
`key=value` pairs or JSON for a table, otherwise as TOML would spell the scalar.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from tidegate.config.nearest import suggestion
from tidegate.config.schema import Leaf, choices, leaves, union_members, variables
from tidegate.config.tree import Config
from tidegate.errors import ConfigError
from tidegate.policy import policies

CONFIG_FILE_VARIABLE = "TIDEGATE_CONFIG"

# Kubernetes gives every pod of a namespace such variables for each service in it; one called `tidegate` must not
# keep the gate from starting.
SERVICE_LINK = re.compile(
    r"TIDEGATE(_\w+)?_(SERVICE_HOST=.*|SERVICE_PORT(_\w+)?=\d+"
    r"|PORT=\w+://.*|PORT_\d+_(TCP|UDP|SCTP)(=\w+://.*|_(PROTO|PORT|ADDR)=.*))"
)


@dataclass(frozen=True, slots=True)
class Loaded:
    config: Config
    origins: dict[str, str]  # path -> "default", "file x.toml", "environment TIDEGATE_X", "flag --x"


@dataclass(frozen=True, slots=True)
class FlagValue:
    """A value given by a flag; text is parsed as a variable's would be."""

    flag: str
    value: Any


def load(
    file: Path | None = None, environ: Mapping[str, str] | None = None, flags: Mapping[str, FlagValue] | None = None
) -> Loaded:
    environ = environ or {}
    values: dict[str, Any] = {}
    origins = dict.fromkeys(leaves(), "default")
    where = f"file {file}"
    if file is None and environ.get(CONFIG_FILE_VARIABLE):
        file = Path(environ[CONFIG_FILE_VARIABLE])
        where = f"file {file} ({CONFIG_FILE_VARIABLE})"
    if file is not None:
        for path, value in _read_file(file, where).items():
            values[path], origins[path] = value, where
    for name, text in environ.items():
        leaf = _variable_leaf(name, text)
        if leaf is not None:
            origin = f"environment {name}"
            values[leaf.path], origins[leaf.path] = _parse(leaf, text, origin), origin
    for path, given in (flags or {}).items():
        leaf, origin = leaves()[path], f"flag {given.flag}"
        parse = _parse if isinstance(given.value, str) else _convert
        value = parse(leaf, given.value, origin)
        values[path], origins[path] = value, origin
    loaded = Loaded(_build(values, origins), origins)
    check_policy(loaded.config.policy, origins["policy"])
    return loaded


def check_policy(name: str, origin: str) -> None:
    known = policies()
    if name not in known:
        raise ConfigError(f"{origin}: unknown policy {name!r}{suggestion(name, known)} (one of {', '.join(known)})")


def _read_file(file: Path, where: str) -> dict[str, Any]:
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{where}: {exc.strerror or exc}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{where}: not TOML: {exc}") from exc
    found: dict[str, Any] = {}
    _flatten(tree, "", where, found)
    return found


def _flatten(table: Mapping[str, Any], prefix: str, where: str, found: dict[str, Any]) -> None:
    for key, value in table.items():
        path = prefix + key
        leaf = leaves().get(path)
        if leaf is not None:
            found[path] = None if leaf.optional and value == "none" else _convert(leaf, value, where)
        elif any(known.startswith(path + ".") for known in leaves()):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {path}: expected a table, got {value!r}")
            _flatten(value, path + ".", where, found)
        else:
            raise ConfigError(f"{where}: unknown key {path!r}{suggestion(path, _known_paths())}")


def _known_paths() -> set[str]:
    """Leaves and the sections above them."""
    paths = set(leaves())
    for path in leaves():
        while "." in path:
            path = path.rpartition(".")[0]
            paths.add(path)
    return paths


def _variable_leaf(name: str, text: str) -> Leaf | None:
    if not name.startswith("TIDEGATE_") or name == CONFIG_FILE_VARIABLE:
        return None
    leaf = variables().get(name)
    if leaf is None and not SERVICE_LINK.fullmatch(f"{name}={text}"):
        raise ConfigError(f"environment {name}: unknown variable{suggestion(name, variables())}")
    return leaf


def _parse(leaf: Leaf, text: str, origin: str) -> Any:
    if leaf.optional and text.strip().lower() in ("none", ""):
        return None
    members = [member for member in union_members(leaf.type) if member is not type(None)]
    containers = [get_origin(member) for member in members]
    if any(kind in (tuple, list) for kind in containers):
        return _convert(leaf, [item for item in re.split(r"[,\s]+", text) if item], origin, text=True)
    if dict in containers:
        return _convert(leaf, _parse_table(leaf, text, origin), origin, text=True)
    return _convert(leaf, text, origin, text=True)


def _parse_table(leaf: Leaf, text: str, origin: str) -> Any:
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as exc:
            raise ConfigError(f"{origin}: {leaf.path}: not a JSON object: {exc}") from exc
    pairs = [item.partition("=") for item in re.split(r"[,\s]+", text) if item]
    for key, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"{origin}: {leaf.path}: expected key=value pairs or a JSON object, got {key!r}")
    return {key: value for key, _, value in pairs}


def _convert(leaf: Leaf, value: Any, origin: str, text: bool = False) -> Any:
    try:
        converted = msgspec.convert(value, leaf.type, strict=not text)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{origin}: {leaf.path}: {_reason(leaf, value, exc)}") from exc
    if isinstance(converted, float) and not math.isfinite(converted):  # JSON has no such number: no log would replay
        raise ConfigError(f"{origin}: {leaf.path}: Expected a finite number, got {value!r}")
    return converted


def _reason(leaf: Leaf, value: Any, exc: Exception) -> str:
    known = choices(leaf.type)
    if known:
        return f"unknown value {value!r}{suggestion(str(value), known)} (one of {', '.join(known)})"
    message = str(exc).replace(" - at `$`", "")
    unknown = re.search(r"unknown field `(\w+)`", message)
    if unknown:
        return message + suggestion(unknown[1], _member_fields(leaf))
    return f"{message}, got {value!r}"


def _member_fields(leaf: Leaf) -> set[str]:
    """Field names of the structs inside a table of structs."""
    return {
        field.name
        for member in union_members(leaf.type)
        for argument in get_args(member)
        if isinstance(argument, type) and issubclass(argument, msgspec.Struct)
        for field in msgspec.structs.fields(argument)
    }


def _build(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = msgspec.to_builtins(value)
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as exc:
        # Each value was valid by itself: what is left are rules between fields, told by the struct they belong to.
        match = re.search(r" - at `\$\.?([\w.]*)`", str(exc))
        section = match[1] if match else ""
        given = [f"{path} ({origins[path]})" for path in values if path.startswith(section)]
        raise ConfigError(f"{str(exc).split(' - at')[0]} (set: {', '.join(given)})") from exc
