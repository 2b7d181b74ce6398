"""A replica in model time, as a cluster sees it: calls go in, and come back when they are done.

`ExactReplica` runs `sim.replica.Replica`, block by block and step by step: one event a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import msgspec

from tidegate.sim.kernel import Kernel
from tidegate.sim.replica import Replica, ReplicaConfig, Request, StepResult
from tidegate.sim.rollout import Call, Rollout
from tidegate.sim.session_blocks import SessionBlocks

Done: TypeAlias = Callable[[Call], None]


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What its /metrics say; counts since it started."""

    running: int
    waiting: int
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    preemptions: int
    recomputed_tokens: int  # after preemptions
    used_blocks: int  # held by running requests
    evicted_blocks: int


class SimReplica(Protocol):
    config: ReplicaConfig

    def submit(self, call: Call) -> None: ...
    def abort(self, call: Call) -> int:
        """The tokens that it had generated. Its blocks stay cached."""
        ...

    def generated(self, call: Call) -> int: ...
    def totals(self) -> Totals: ...
    def resident_tokens(self, rollout: Rollout) -> int:
        """Of a session's context, the prefix that the cache holds."""
        ...

    def resident_blocks(self) -> int:
        """Held or cached."""
        ...

    def flush(self) -> None:
        """New weights: running requests are computed again, nothing stays cached."""
        ...

    def release(self, rollout: Rollout) -> None:
        """The session is over: what of its KV no other session shares is evicted first, if the engine can do that."""
        ...

    def pause(self) -> None:
        """Freeze where it is, after the step under way."""
        ...

    def resume(self) -> None: ...


def capacity_tokens(config: ReplicaConfig) -> int:
    """As vLLM reports it in cache_config_info: the null block included."""
    return config.num_blocks * config.block_size


class ExactReplica:
    def __init__(self, kernel: Kernel, config: ReplicaConfig, done: Done, *, releases: bool = False) -> None:
        self.config = config
        self.replica = Replica(config)
        self._sessions = SessionBlocks(self.replica) if releases else None
        self._kernel = kernel
        self._done = done
        self._calls: dict[str, Call] = {}
        self._stepping = False

    def submit(self, call: Call) -> None:
        context, config = call.rollout.context, self.config
        target = min(call.prompt_tokens + call.output_tokens, config.max_model_len)
        request = Request(
            str(call.id),
            call.prompt_tokens,
            call.output_tokens,
            context.hashes(config.block_size, target),
            session=call.rollout.id,
            priority=call.priority,
            arrival_s=self._kernel.now_s,
        )
        self._calls[request.id] = call
        self.replica.add(request)
        self._wake()

    def abort(self, call: Call) -> int:
        del self._calls[str(call.id)]
        request = self.replica.abort(str(call.id))
        if request is None:  # its last step is under way
            return call.output_tokens
        call.cached_tokens = request.cached_tokens
        return request.generated

    def generated(self, call: Call) -> int:
        request = self.replica.requests.get(str(call.id))
        return call.output_tokens if request is None else request.generated

    def totals(self) -> Totals:
        replica = self.replica
        counters, pool = replica.counters, replica.pool
        return Totals(
            running=len(replica.running),
            waiting=len(replica.waiting),
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.prompt_tokens_cached,
            generation_tokens=counters.generation_tokens,
            preemptions=counters.num_preemptions,
            recomputed_tokens=counters.recomputed_tokens,
            used_blocks=pool.num_blocks - 1 - pool.num_free,
            evicted_blocks=pool.evictions,
        )

    def resident_tokens(self, rollout: Rollout) -> int:
        context = rollout.context
        size, tokens = self.config.block_size, context.reach_tokens
        return len(self.replica.pool.longest_hit(context.hashes(size, tokens), tokens // size)) * size

    def resident_blocks(self) -> int:
        pool = self.replica.pool
        return pool.num_blocks - 1 - pool.num_free + pool.num_cached

    def release(self, rollout: Rollout) -> None:
        if self._sessions is not None:
            self._sessions.release(rollout.id)

    def flush(self) -> None:
        self.replica.reset_prefix_cache(reset_running_requests=True)
        if self._sessions is not None:
            self._sessions.reset()

    def pause(self) -> None:
        self.replica.pause("keep")

    def resume(self) -> None:
        self.replica.resume()
        self._wake()

    # --- steps -------------------------------------------------------------------------------------------------
    def _wake(self) -> None:
        if not self._stepping and self.replica.has_work:
            self._stepping = True
            self._begin()

    def _begin(self) -> None:
        result = self.replica.step(self._kernel.now_s)
        while result.preempted and not result.outputs and not result.prefill_tokens:
            result = self.replica.step(self._kernel.now_s)  # all room was wanted by one that gave it up
        if result.outputs or result.prefill_tokens:
            self._kernel.after(result.duration_s, self._end, result)
        else:
            self._stepping = False

    def _end(self, result: StepResult) -> None:
        for request in result.finished:
            call = self._calls.pop(request.id, None)
            if call is not None:  # else it was aborted during its last step
                call.cached_tokens = request.cached_tokens
                call.output_tokens = request.generated
                self._done(call)
        if self.replica.has_work:
            self._begin()
        else:
            self._stepping = False
