"""A verifiers taskset with a harness of its own, in process: no network, no sandbox, no data set.

Two kinds of task: `math`, one turn, and `swe`, several turns with time spent in the environment between them. A rollout
earns 1 when it had as many turns as its task asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

SWE_TURNS = 3
THINK_S = 0.02


class TurnsData(vf.TaskData):
    workload: str = "math"
    turns: int = 1


class TurnsTask(vf.Task[TurnsData]):
    @vf.reward
    async def all_turns(self, trace: Any) -> float:
        return float(trace.num_turns == self.data.turns)


class OfflineTaskset(vf.Taskset[TurnsTask]):
    def load(self) -> Iterator[TurnsTask]:
        for number in range(4):
            kind, turns = ("math", 1) if number % 2 == 0 else ("swe", SWE_TURNS)
            yield TurnsTask(TurnsData(prompt=f"question {number}", workload=kind, turns=turns), self.config.task)


class OfflineHarness(Harness[HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: TurnsData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        # The eval client passes a harness's own headers on; the train client sends X-Session-ID only.
        headers = {"Authorization": f"Bearer {secret}", "X-Workload-Class": data.workload}
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=None, headers=headers) as client:
            for _ in range(data.turns):
                reply = await client.post(
                    f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages}
                )
                reply.raise_for_status()
                answer = reply.json()["choices"][0]["message"]
                messages += [
                    {"role": "assistant", "content": answer["content"] or ""},
                    {"role": "user", "content": "observation"},
                ]
                await asyncio.sleep(THINK_S)
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["OfflineHarness", "OfflineTaskset"]
