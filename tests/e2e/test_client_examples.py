"""The examples of docs/clients.md run as they stand there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from textwrap import indent
from typing import Any

import aiohttp
from tests.e2e.conftest import Replica, StartGate
from tests.e2e.inference import MODEL

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "clients.md").read_text(encoding="utf-8"), re.DOTALL)


async def test_the_openai_example(
    start_gate: StartGate, replicas: list[Replica], client: aiohttp.ClientSession
) -> None:
    gate = start_gate([replica.url for replica in replicas], "working_set")
    await gate.ready(client, 2)
    (program,) = [block for block in BLOCKS if "AsyncOpenAI" in block]
    names: dict[str, Any] = {}
    exec(program, names)
    outcomes = await names["main"](gate.url, MODEL, 40)
    assert [outcome.error for outcome in outcomes if outcome.error] == []
    assert Counter(outcome.session.workload for outcome in outcomes) == {"agentic": 10, "rlvr": 30}
    await gate.idle(client)


def test_the_verifiers_example_is_what_the_verifiers_suite_runs() -> None:
    (lines,) = [block for block in BLOCKS if "run_slot" in block]
    program = (ROOT / "tests" / "e2e" / "verifiers_offline" / "scheduled.py").read_text(encoding="utf-8")
    assert indent(lines, " " * 8) in program
