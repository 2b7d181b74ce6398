"""A real vLLM replica on the CPU, as a process.

What the settings are for: nobind, since the default binding can put several replicas on one core; enforce-eager and no
dynamo, since compiling costs a minute and the first request with logprobs another 17 s; PYTHONPATH, see
tests/data/vllm_cpu/sitecustomize.py; dev mode for /pause, /resume and /reset_prefix_cache. Block sizes on the CPU are
multiples of 32, and the KV cache is in whole GiB, so `num_gpu_blocks` cuts it to what a test needs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.process import Process, free_ports

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"
MODELS = ROOT / ".models"
DATA = ROOT / "tests/data/vllm_cpu"

START_S = 300.0  # 20 s alone on an idle machine, minutes on a loaded one
BLOCK_TOKENS = 32

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": str(DATA),
}


def plugin_environment(site: Path) -> dict[str, str]:
    """The project as if it were installed beside vLLM: its sources, and the entry points that its package declares."""
    declared = importlib.metadata.distribution("tidegate").locate_file("")
    for info in Path(str(declared)).glob("tidegate-*.dist-info"):
        shutil.copytree(info, site / info.name, dirs_exist_ok=True)
    paths = (DATA, ROOT / "src", site)
    return {"PYTHONPATH": os.pathsep.join(map(str, paths)), "VLLM_PLUGINS": "tidegate"}


class VllmReplica:
    """Ports are chosen once: a restarted replica is found at its old address."""

    def __init__(
        self,
        log: Path,
        *,
        model: str = "tiny",
        load_format: str = "auto",
        num_gpu_blocks: int = 512,
        max_model_len: int = 8192,
        shutdown_timeout_s: int = 0,
        served_model_name: str = "m",
        plugin: bool = False,
        extra: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`plugin`: with tidegate's; else vLLM as it is."""
        port, events, replay = free_ports(3)
        self.url = f"http://127.0.0.1:{port}"
        self.kv_replay_endpoint = f"tcp://127.0.0.1:{replay}"
        self.kv_capacity_tokens = num_gpu_blocks * BLOCK_TOKENS
        kv_events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events}",  # `*` makes the engine bind; a host name would make it connect
            "replay_endpoint": self.kv_replay_endpoint,
            "topic": "kv",
        }
        settings: dict[str, object] = {
            "model": MODELS / model,
            "served-model-name": served_model_name,
            "load-format": load_format,
            "dtype": "bfloat16",
            "host": "127.0.0.1",
            "port": port,
            "distributed-executor-backend": "uni",
            "block-size": BLOCK_TOKENS,
            "num-gpu-blocks-override": num_gpu_blocks,
            "max-model-len": max_model_len,
            "max-num-seqs": 64,
            "max-num-batched-tokens": 2048,
            "shutdown-timeout": shutdown_timeout_s,
            "kv-events-config": json.dumps(kv_events),
        }
        flags = ("enforce-eager", "enable-prefix-caching", "enable-prompt-tokens-details", "enable-scale-out")
        command: list[str | Path] = [PYTHON, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in settings.items():
            command += [f"--{name}", str(value)]
        command += [f"--{flag}" for flag in flags]
        plugged = plugin_environment(log.with_suffix(".site")) if plugin else {}
        self.process = Process([*command, *extra], log, {**ENVIRONMENT, **plugged, **(environment or {})})

    def start(self) -> None:
        self.process.start()

    def wait_ready(self) -> None:
        self.process.wait_healthy(f"{self.url}/health", START_S)

    def restart(self) -> None:
        self.process.kill()
        self.start()
