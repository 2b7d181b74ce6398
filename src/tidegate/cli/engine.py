"""`tidegate engine`: the embedded engine as a process."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import click
import msgspec
import uvloop

from tidegate.engine.config import EngineConfig
from tidegate.engine.server import EngineServer
from tidegate.errors import ConfigError
from tidegate.sim.hardware import PRESETS


@click.command()
@click.option(
    "--dialect",
    default="vllm",
    show_default=True,
    type=click.Choice(["vllm", "sglang"]),
    help="Whose HTTP surface and metrics it has.",
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: a free one.")
@click.option(
    "--kv-tokens", default=131_072, show_default=True, type=click.IntRange(32), help="Size of the KV cache in tokens."
)
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1), help="Tokens in a KV block.")
@click.option("--max-model-len", type=click.IntRange(2), help="Default: what fits in the KV cache, at most 131072.")
@click.option("--max-num-seqs", default=256, show_default=True, type=click.IntRange(1), help="Sequences in a batch.")
@click.option(
    "--max-num-batched-tokens", default=8192, show_default=True, type=click.IntRange(1), help="Tokens in a step."
)
@click.option("--max-num-queued-reqs", type=click.IntRange(1), help="Unfinished requests; more are answered 503.")
@click.option("--scheduling-policy", default="fcfs", show_default=True, type=click.Choice(["fcfs", "priority"]))
@click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True, show_default=True)
@click.option("--served-model-name", default="tidegate", show_default=True)
@click.option(
    "--latency", default="cpu-tiny", show_default=True, type=click.Choice(list(PRESETS)), help="Step-time model."
)
@click.option(
    "--time-scale",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds of model time in one second of the clock.",
)
@click.option(
    "--mean-output-tokens",
    default=256,
    show_default=True,
    type=click.IntRange(1),
    help="Average length of a reply that may end by itself.",
)
@click.option("--seed", default=0, show_default=True, help="Other replies.")
@click.option("--kv-events-port", type=click.IntRange(0, 65535), help="Publish KV events here (ZMQ PUB); 0: free.")
@click.option(
    "--kv-events-replay-port", type=click.IntRange(0, 65535), help="Replay KV events here (ZMQ ROUTER); 0: free."
)
@click.option("--kv-events-topic", default="", help="Default: kv@HOST:PORT@MODEL.")
@click.option(
    "--plugin/--no-plugin",
    default=False,
    show_default=True,
    help="Eviction by session: with tidegate's plugin for vLLM; as sglang, with its session radix cache.",
)
@click.option(
    "--shutdown-timeout",
    "shutdown_timeout_s",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0),
    help="On SIGTERM, seconds for running requests to end; new ones get an abort. 0: abort all.",
)
def engine(**flags: object) -> None:
    """A stand-in for vLLM, or SGLang, without a GPU or a model.

    It has the engine's HTTP surface and metrics, and vLLM's KV events, over a simulated paged KV cache and scheduler,
    in real or scaled time. Token counts are those of the request, and replies depend on the prompt.
    """
    try:
        config = msgspec.convert(flags, EngineConfig)
        with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config))
    except ConfigError as error:
        raise click.ClickException(error.message) from error


async def serve(config: EngineConfig) -> None:
    """Until SIGTERM or SIGINT; a second one ends it at once."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    async with EngineServer(config) as server:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told.set)
        click.echo(
            f"{server.url} serves {config.served_model_name}: {config.num_blocks * config.block_size} KV tokens, "
            f"contexts of {config.model_len}, {config.latency}, time x {config.time_scale:g}"
        )
        if server.events is not None:
            click.echo(f"KV events at {server.events.endpoint}, replay at {server.events.replay_endpoint}")
        await told.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        await server.drain()
