"""verifiers 0.4 rollouts through the gate: eval and train clients, with and without calls that end a session."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.conftest import Replica, StartGate
from tests.e2e.gate import Gate
from tests.vllm.replica import MODELS, ROOT

pytestmark = pytest.mark.vllm  # make test-vllm makes the environment

PYTHON = ROOT / ".venv-verifiers/bin/python"
PROGRAM = Path(__file__).with_name("verifiers_offline")
TURNS = {"math": 1, "swe": 3}
EPISODES_PER_TASK, TASKS = 2, 4


async def rollouts(gate: Gate, kind: str, ending: str) -> Any:
    command = [PYTHON, PROGRAM / "rollouts.py", kind, f"{gate.url}/v1", MODELS / "tiny", ending, EPISODES_PER_TASK, 4]
    paths = f"{PROGRAM}:{ROOT / 'src'}"  # tidegate.client needs none of the gate's packages
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    done = await asyncio.to_thread(
        subprocess.run, [str(part) for part in command], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def recorded(log: Path) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Requests by session, and the sessions that ended, by the decision log."""
    turns: Counter[str] = Counter()
    ended = []
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        event = entry.get("event")
        if isinstance(event, dict) and event["event"] == "request_arrived":
            turns[event["session"]] += 1
        ended += [decision for decision in entry.get("decisions", []) if decision["decision"] == "ended"]
    return turns, ended


@pytest.mark.parametrize("ending", ["calls", "silent", "scheduler"])
@pytest.mark.parametrize("kind", ["eval", "train"])
async def test_rollouts_complete_and_their_sessions_end(
    kind: str,
    ending: str,
    start_gate: StartGate,
    replicas: list[Replica],
    client: aiohttp.ClientSession,
    tmp_path: Path,
) -> None:
    """`silent` is stock verifiers, which never says that a rollout is over: idle time ends its sessions. The train
    client sends no class: it is known only to a gate that was told by /start_session, as RolloutScheduler does."""
    log = tmp_path / "decisions.jsonl"
    settings = {"TIDEGATE_RECORD_PATH": str(log)}
    if ending == "silent":
        settings |= {
            "TIDEGATE_CORE_LEDGER_IDLE_TTL_INITIAL_S": "10",
            "TIDEGATE_CORE_LEDGER_IDLE_TTL_FLOOR_S": "10",
        }
    gate = start_gate([replica.url for replica in replicas], "misa_t", settings=settings)
    await gate.ready(client, 2)
    outcome = await rollouts(gate, kind, ending)
    assert outcome["errors"] == []
    assert outcome["ok"] == outcome["episodes"] == EPISODES_PER_TASK * TASKS, outcome
    traces = outcome["traces"]
    assert [trace["reward"] for trace in traces] == [1.0] * len(traces)

    classes = (await gate.state(client))["classes"]
    labelled = kind == "eval" or ending != "silent"
    assert ({"math", "swe"} <= classes.keys()) is labelled
    await gate.idle(client)
    await asyncio.to_thread(gate.process.terminate)
    turns, ended = recorded(log)
    assert turns == {trace["session"]: TURNS[trace["workload"]] for trace in traces}
    causes = Counter(end["cause"] for end in ended)
    assert causes == {"expired" if ending == "silent" else "finished": len(traces)}
    if labelled:
        assert {end["session"]: end["workload"] for end in ended} == {t["session"]: t["workload"] for t in traces}
