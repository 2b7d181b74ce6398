"""Which engines the end-to-end suite runs against: the embedded ones, or real vLLM replicas."""

from __future__ import annotations

import os
import sys

import hypothesis
import pytest
import structlog

# A change is judged by the same examples every time; runs by hand go on to look for new ones.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend", choices=("embedded", "vllm"), default="embedded", help="engines of the end-to-end suite"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Gates that run in a test's own process must not log into a stdout that a command under test writes to.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))
    config.addinivalue_line("markers", "embedded: needs what only the embedded engine has")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    other = {"embedded": "vllm", "vllm": "embedded"}[config.getoption("--backend")]
    kept = [item for item in items if item.get_closest_marker(other) is None]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
