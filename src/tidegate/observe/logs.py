"""Structured logs on stderr: readable on a terminal, one JSON object a line otherwise. Standard logging goes the same
way, so that a library's warning is a line like any other."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from tidegate.config.server import LogConfig


def configure(config: LogConfig) -> None:
    json_lines = config.format == "json" or (config.format == "auto" and not sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    renderer: list[structlog.typing.Processor] = (
        [structlog.processors.dict_tracebacks, _in_order, structlog.processors.JSONRenderer()]
        if json_lines
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())


def _in_order(logger: Any, method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """When, how bad, what, and then the rest: for eyes that run over many lines."""
    first = {name: line.pop(name) for name in ("timestamp", "level", "event") if name in line}
    return {**first, **line}
