"""`tidegate engine` as a process."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.gate import TIDEGATE
from tests.e2e.process import Process, free_ports

START_S = 60.0
BLOCK_TOKENS = 32
TIME_SCALE = 20  # a token in about a millisecond, as the real replicas of the suite take


class EmbeddedReplica:
    """Ports are chosen once: a restarted replica is found at its old address."""

    def __init__(
        self,
        log: Path,
        *,
        num_gpu_blocks: int = 512,
        shutdown_timeout_s: int = 0,
        dialect: str = "vllm",
        plugin: bool = False,
    ) -> None:
        port, events, replay = free_ports(3)
        self.url = f"http://127.0.0.1:{port}"
        self.kv_replay_endpoint = f"tcp://127.0.0.1:{replay}"
        self.kv_capacity_tokens = num_gpu_blocks * BLOCK_TOKENS
        settings = {
            "dialect": dialect,
            "host": "127.0.0.1",
            "port": port,
            "served-model-name": "m",
            "block-size": BLOCK_TOKENS,
            "kv-tokens": self.kv_capacity_tokens,
            "max-model-len": 8192,
            "kv-events-port": events,
            "kv-events-replay-port": replay,
            "shutdown-timeout": shutdown_timeout_s,
            "time-scale": TIME_SCALE,
        }
        command: list[str | Path] = [TIDEGATE, "engine"]
        for name, value in settings.items():
            command += [f"--{name}", str(value)]
        self.process = Process([*command, *(["--plugin"] if plugin else [])], log)

    def start(self) -> None:
        self.process.start()

    def wait_ready(self) -> None:
        self.process.wait_healthy(f"{self.url}/health", START_S)

    def restart(self) -> None:
        self.process.kill()
        self.start()
