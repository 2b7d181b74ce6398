"""Rollouts of the offline taskset through an OpenAI-compatible base URL; prints what came of them as JSON.

    rollouts.py (eval|train) BASE_URL TOKENIZER_DIR (calls|silent|scheduler) EPISODES_PER_TASK CONCURRENCY

`calls` imports session_calls; `silent` is stock verifiers, which never says that a rollout has ended; `scheduler`
starts the rollouts by tidegate's client, in equal shares of both kinds and as many at once as the gate advises.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys

os.environ.setdefault("OFFLINE_API_KEY", "none")

import generate_reply  # noqa: F401
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


async def main(kind: str, base_url: str, tokenizer: str, ending: str, episodes: int, concurrency: int) -> None:
    session_calls = importlib.import_module("session_calls") if ending == "calls" else None
    scheduled_rollouts = importlib.import_module("scheduled").rollouts if ending == "scheduler" else None
    common = {"base_url": base_url, "api_key_var": "OFFLINE_API_KEY"}
    client = (
        EvalClientConfig(**common)
        if kind == "eval"
        else TrainClientConfig(**common, renderer_model_name=tokenizer, renderer={"name": "default"})
    )
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=8, cache_salt="weights-1")
    context = ModelContext(model="m", client=client, sampling=sampling)
    environment = load_environment(
        resolve_env_config({"taskset": {"id": "offline-taskset"}, "agent": {"runtime": {"type": "subprocess"}}})
    )
    slots = [slot for task in environment.taskset for slot in environment.slots(task, episodes)]
    semaphore = asyncio.Semaphore(concurrency)
    async with environment.serving():
        if scheduled_rollouts:
            done = await scheduled_rollouts(environment, context, slots, base_url)
        else:
            done = await asyncio.gather(*(environment.run_slot(slot, context, semaphore) for slot in slots))
    if session_calls:
        await session_calls.settled()
    traces = [
        {
            "session": trace.id,
            "workload": trace.task.data.workload,
            "turns": trace.num_turns,
            "reward": trace.reward,
            "error": str(trace.last_error) if trace.last_error else None,
        }
        for episode in done
        for trace in episode.traces
    ]
    errors = [error.message for episode in done for error in episode.errors]
    print(json.dumps({"episodes": len(done), "ok": sum(e.ok for e in done), "errors": errors, "traces": traces}))


if __name__ == "__main__":
    kind, base_url, tokenizer, ending, episodes, concurrency = sys.argv[1:]
    asyncio.run(main(kind, base_url, tokenizer, ending, int(episodes), int(concurrency)))
