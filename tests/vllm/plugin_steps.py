"""Run vLLM's own scheduler and block pool, without a model, with tidegate's plugin in them: scenarios in, answers out.

For the interpreter that has vLLM; see `test_plugin_blocks.py`, which makes the scenarios: a JSON list of
{model, groups, block_size, num_blocks, steps}. A step is [name, arguments]; each gives one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_PLUGINS", "tidegate")

from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tidegate.integrations import vllm_plugin
from tidegate.integrations.vllm_plugin import engine


class Engine:
    def __init__(self, scenario: dict[str, Any]) -> None:
        import torch

        self.block_size = block_size = scenario["block_size"]
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=scenario.get("caching", True))
        cache.num_gpu_blocks = scenario["num_blocks"]
        config = VllmConfig(
            model_config=ModelConfig(model=scenario["model"], dtype="float32", max_model_len=8192, seed=0),
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=64,
                max_num_batched_tokens=8192,
                max_model_len=8192,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
                disable_hybrid_kv_cache_manager=False,
            ),
        )
        sizes = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        kinds = {
            "full": lambda: FullAttentionSpec(**sizes),
            "window": lambda: SlidingWindowSpec(**sizes, sliding_window=2 * block_size),
        }
        groups = [KVCacheGroupSpec([f"layer.{n}"], kinds[kind]()) for n, kind in enumerate(scenario["groups"])]
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=scenario["num_blocks"], kv_cache_tensors=[], kv_cache_groups=groups
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=True,
        )
        self.hasher = get_request_block_hasher(block_size, sha256)
        self.cached: dict[str, int] = {}
        self.serial = 0

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    # --- steps ------------------------------------------------------------------------------------------------
    def start(self, session: str | None, prompt: list[int], output: int = 1) -> dict[str, Any]:
        self.serial += 1
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        id = f"r{self.serial}"
        self.scheduler.add_request(
            Request(id, prompt, params, None, arrival_time=self.serial, block_hasher=self.hasher, session_id=session)
        )
        return {"request": id}

    def step(self) -> dict[str, Any]:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        for new in plan.scheduled_new_reqs:
            self.cached[new.req_id] = new.num_computed_tokens
        ids = list(plan.num_scheduled_tokens)
        sampled = []
        for id in ids:
            request = scheduler.requests[id]
            sampled.append([7] if request.num_computed_tokens >= request.num_tokens else [])
        if ids:
            made = ModelRunnerOutput(ids, {id: index for index, id in enumerate(ids)}, sampled)
            scheduler.update_from_output(plan, made)
        return {"scheduled": len(ids)}

    def turn(self, session: str | None, prompt: list[int], output: int = 1) -> dict[str, Any]:
        id = self.start(session, prompt, output)["request"]
        while id in self.scheduler.requests:
            self.step()
        return {"cached": self.cached[id]}

    def abort(self, request: str) -> dict[str, Any]:
        self.scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED)
        return {}

    def reset(self, running: bool = False) -> dict[str, Any]:
        return {"done": self.scheduler.reset_prefix_cache(running)}

    def call(self, name: str, sessions: list[str] | None = None) -> dict[str, Any]:
        return engine.call(SimpleNamespace(scheduler=self.scheduler), name, sessions)

    def queue(self) -> dict[str, Any]:
        """The free queue, head first: how many of a session's blocks are where is told by their hashes."""
        order = self.pool.free_block_queue.get_all_free_blocks()
        back, block = [], self.pool.free_block_queue.fake_free_list_tail.prev_free_block
        while block is not self.pool.free_block_queue.fake_free_list_head:
            back.append(block)
            block = block.prev_free_block
        whole = len(order) == self.pool.get_num_free_blocks() and back[::-1] == order
        return {
            "whole": whole and len({block.block_id for block in order}) == len(order),
            "hashes": [block.block_hash.hex() if block.block_hash else None for block in order],
        }

    def consistent(self) -> dict[str, Any]:
        """Claims are what the sessions claim, and no more."""
        retention = getattr(self.scheduler.kv_cache_manager, engine.ATTRIBUTE).retention
        claims: dict[Any, int] = {}
        demoted: dict[Any, int] = {}
        for session in retention.sessions.values():
            for block_hash in session.blocks:
                claims[block_hash] = claims.get(block_hash, 0) + 1
                if session.demoted:
                    demoted[block_hash] = demoted.get(block_hash, 0) + 1
        same = claims == retention._claims and demoted == retention._demoted
        return {"same": same and set(retention._to_sweep) == set(retention.sessions)}

    def fault(self) -> dict[str, Any]:
        """The plugin meets something that it did not expect."""
        getattr(self.scheduler.kv_cache_manager, engine.ATTRIBUTE).retention.leaving = None
        return {}

    def cost(self, prompt_tokens: int, turns: int) -> dict[str, Any]:
        """CPU time of vLLM's own work at a request's end and of the plugin's part in it, in one session that grows."""
        manager = self.scheduler.kv_cache_manager
        attached = getattr(manager, engine.ATTRIBUTE)
        own_s = plugin_s = 0.0
        leaving, free = attached.retention.leaving, manager.coordinator.free

        def timed_leaving(*args: Any, **kwargs: Any) -> Any:
            nonlocal plugin_s
            begun_s = time.process_time()
            try:
                return leaving(*args, **kwargs)
            finally:
                plugin_s += time.process_time() - begun_s

        def timed_free(*args: Any) -> None:
            nonlocal own_s
            begun_s = time.process_time()
            free(*args)
            own_s += time.process_time() - begun_s

        cached = attached.retention.cached

        def timed_cached(*args: Any) -> None:
            nonlocal plugin_s
            begun_s = time.process_time()
            cached(*args)
            plugin_s += time.process_time() - begun_s

        attached.retention.leaving, manager.coordinator.free = timed_leaving, timed_free
        attached.retention.cached = timed_cached
        prompt = list(range(prompt_tokens))
        begun_s = time.process_time()
        for turn in range(turns):
            prompt = [*prompt, *range(turn * 64, turn * 64 + 64)]
            self.turn("cost", prompt)
        all_s = time.process_time() - begun_s
        attached.retention.leaving, manager.coordinator.free = leaving, free
        attached.retention.cached = cached
        return {"all_s": all_s, "free_s": own_s, "plugin_s": plugin_s, "blocks": len(prompt) // self.block_size}


def main() -> None:
    init_none_hash(sha256)
    vllm_plugin.register()
    for scenario in json.load(sys.stdin):
        made = Engine(scenario)
        for name, arguments in scenario["steps"]:
            print(json.dumps(getattr(made, name)(*arguments)), flush=True)


main()
