"""The reference pages say what the code does: generated ones are in sync, the written one leaves nothing out."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tidegate
from tidegate.config.schema import leaves
from tidegate.errors import ConfigError, TidegateError
from tidegate.observe.metrics import METRICS
from tidegate.policy.reasons import ADVICE, CLASS_ADVICE, HOLD, PLACE, REJECT
from tidegate.proxy.identity import FINAL_HEADER, INFERENCE_PATHS, SESSION_HEADERS
from tidegate.server.app import StatusApi
from tidegate.server.control import CONTROL_PATHS
from tidegate.server.engine_sessions import EngineSessions
from tidegate.server.mixture import MixtureApi
from tidegate.server.sessions import SessionsApi
from tidegate.server.workers import WorkersApi

ROOT = Path(__file__).parents[2]
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_generated_pages_are_what_the_code_says() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_setting_and_metric_is_on_its_page() -> None:
    configuration = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert [path for path in leaves() if f"`{path}`" not in configuration] == []
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [metric.name for metric in METRICS if f"`{metric.name}`" not in metrics] == []


def own_routes() -> set[str]:
    """Of each API, without making one: its methods name their paths."""
    found = set()
    for api in (StatusApi, SessionsApi, EngineSessions, WorkersApi, MixtureApi):
        for route in api.routes(api.__new__(api)):
            found |= {f"{method} {route.path.replace(':path', '')}" for method in (route.methods or set()) - {"HEAD"}}
    return found


def test_every_route_is_documented() -> None:
    assert [route for route in sorted(own_routes()) if f"`{route}" not in API] == []
    assert [path for path in sorted(CONTROL_PATHS | INFERENCE_PATHS) if f"`{path}`" not in API] == []


def error_reasons() -> set[str]:
    """Of every error class, and every reason that is given where one is raised."""
    for module in pkgutil.walk_packages(tidegate.__path__, "tidegate."):
        if not module.name.startswith(("tidegate.engine.", "tidegate.bench", "tidegate.cli", "tidegate.sim")):
            importlib.import_module(module.name)
    classes: dict[str, type[TidegateError]] = {}
    todo = [TidegateError]
    while todo:
        found = todo.pop()
        classes[found.__name__] = found
        todo += found.__subclasses__()
    ours = {name: c for name, c in classes.items() if not issubclass(c, ConfigError)}
    reasons = {c.reason for c in ours.values() if c.__module__.startswith("tidegate.") and not c.__subclasses__()}
    for file in (ROOT / "src" / "tidegate").rglob("*.py"):
        if {"engine", "bench", "cli"} & set(file.parts):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ours:
                given = [k.value for k in node.keywords if k.arg == "reason"]
                reasons |= {value.value for value in given if isinstance(value, ast.Constant)}
    return {reason for reason in reasons if reason}


def test_every_reason_of_a_refusal_is_documented() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", API, flags=re.MULTILINE))
    assert set(REJECT) <= documented
    assert error_reasons() - documented == set()


@pytest.mark.parametrize("table", [PLACE, HOLD, ADVICE, CLASS_ADVICE])
def test_every_reason_of_a_decision_is_documented(table: dict[str, str]) -> None:
    assert [reason for reason in table if f"`{reason}`" not in API] == []


def test_headers_that_are_understood_are_documented() -> None:
    text = API.lower()
    for name in (*SESSION_HEADERS, FINAL_HEADER, b"x-workload-class", b"x-group-id"):
        assert name.decode() in text
