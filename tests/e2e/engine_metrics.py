"""What an engine says of itself, asked directly."""

from __future__ import annotations

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


async def samples(client: aiohttp.ClientSession, url: str) -> list[Sample]:
    async with client.get(f"{url}/metrics") as reply:
        text = await reply.text()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


async def total(client: aiohttp.ClientSession, url: str, name: str) -> float:
    values = [sample.value for sample in await samples(client, url) if sample.name == name]
    assert values, f"{url} has no {name}"
    return sum(values)


async def running_requests(client: aiohttp.ClientSession, url: str) -> float:
    return await total(client, url, "vllm:num_requests_running")


async def unfinished_requests(client: aiohttp.ClientSession, url: str) -> float:
    return await running_requests(client, url) + await total(client, url, "vllm:num_requests_waiting")


async def kv_capacity_tokens(client: aiohttp.ClientSession, url: str) -> int:
    (config,) = [sample for sample in await samples(client, url) if sample.name == "vllm:cache_config_info"]
    return int(config.labels["num_gpu_blocks"]) * int(config.labels["block_size"])
