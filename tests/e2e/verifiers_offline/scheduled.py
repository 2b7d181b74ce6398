"""verifiers episodes started by RolloutScheduler: nothing of verifiers is wrapped.

A trace's id is the session id of its requests; `on_trace` gives it as soon as there is one, and the session adopts it:
the gate learns its class, and that it is over when the episode is.
"""

from __future__ import annotations

from typing import Any

from tidegate.client import Outcome, RolloutScheduler, Session


async def rollouts(environment: Any, context: Any, slots: list[Any], base_url: str) -> list[Any]:
    episodes: list[Any] = []

    def done(outcome: Outcome[Any]) -> None:
        if outcome.error is not None:
            raise outcome.error
        episodes.append(outcome.value)

    def rollout(slot: Any) -> Any:
        async def play(session: Session) -> Any:
            return await environment.run_slot(slot, context, on_trace=lambda trace: session.adopt(trace.id))

        return play

    by_class: dict[str, list[Any]] = {}
    for slot in slots:
        by_class.setdefault(slot.task.data.workload, []).append(rollout(slot))
    async with RolloutScheduler(base_url, mixture=dict.fromkeys(by_class, 1.0), poll_s=0.2) as gate:
        await gate.run(by_class, done)
    return episodes
