"""Run vLLM's own scheduler over scenarios, without a model: a JSON list in, a JSON line for each step of each out.

For the interpreter that has vLLM; see `test_replica_schedules_like_vllm.py`, which makes the scenarios.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager


def build(scenario: dict[str, Any]) -> Scheduler:
    import torch

    block_size = scenario["block_size"]
    model = ModelConfig(model=scenario["model"], dtype="float32", max_model_len=scenario["max_model_len"], seed=0)
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
    cache.num_gpu_blocks = scenario["num_blocks"]
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=scenario["max_num_seqs"],
            max_num_batched_tokens=scenario["max_num_batched_tokens"],
            max_model_len=scenario["max_model_len"],
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
            policy=scenario["policy"],
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=False),
    )
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=scenario["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=True,
    )


def main() -> None:
    init_none_hash(sha256)
    for scenario in json.load(sys.stdin):
        replay(scenario)


def replay(scenario: dict[str, Any]) -> None:
    scheduler = build(scenario)
    hasher = get_request_block_hasher(scenario["block_size"], sha256)
    arrivals = sorted(scenario["requests"], key=lambda request: request["step"])
    for step in range(scenario["steps"]):
        while arrivals and arrivals[0]["step"] <= step:
            new = arrivals.pop(0)
            params = SamplingParams(max_tokens=new["output_tokens"], ignore_eos=True)
            scheduler.add_request(
                Request(
                    new["id"],
                    new["prompt"],
                    params,
                    None,
                    arrival_time=new["arrival_s"],
                    priority=new["priority"],
                    block_hasher=hasher,
                )
            )
        for id in scenario["aborts"].get(str(step), []):
            scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED)
        run(scheduler, scenario["outputs"])


def run(scheduler: Scheduler, outputs: dict[str, list[int]]) -> None:
    preemptions = {request.request_id: request.num_preemptions for request in scheduler.requests.values()}
    plan = scheduler.schedule()
    stats = scheduler.kv_cache_manager.make_prefix_cache_stats()  # the update below resets them
    blocks = {
        request.request_id: scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        for request in scheduler.running
    }
    preempted = [
        request.request_id
        for request in scheduler.requests.values()
        if request.num_preemptions > preemptions.get(request.request_id, 0)
    ]
    ids = list(plan.num_scheduled_tokens)
    sampled = []
    for id in ids:
        request = scheduler.requests[id]
        complete = request.num_computed_tokens >= request.num_tokens
        sampled.append([outputs[id][request.num_output_tokens]] if complete else [])
    if ids:
        scheduler.update_from_output(plan, ModelRunnerOutput(ids, {id: index for index, id in enumerate(ids)}, sampled))
    line = {
        "scheduled": plan.num_scheduled_tokens,
        "blocks": blocks,
        "preempted": sorted(preempted),
        "running": [request.request_id for request in scheduler.running],
        "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "queries": stats.queries,
        "hits": stats.hits,
    }
    print(json.dumps(line), flush=True)


main()
