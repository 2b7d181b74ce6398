"""The replicas of the benchmarks: real vLLM on the CPU as in the end-to-end suite, with a model that suits the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.e2e.process import Process, free_ports  # noqa: E402
from tests.vllm.replica import BLOCK_TOKENS as BLOCK_TOKENS  # noqa: E402  (the end-to-end suite's replicas)
from tests.vllm.replica import START_S, VllmReplica  # noqa: E402

KV_BLOCKS = 512  # of 32 tokens: 16,384
VOCAB_SIZE = 4096  # of the models
MAX_MODEL_LEN, MAX_SEQS, MAX_BATCHED_TOKENS = 8192, 64, 2048  # VllmReplica's


@contextmanager
def vllm_replicas(count: int, log_dir: Path, *, plugin: bool = False) -> Iterator[list[str]]:
    """The URLs of running replicas, gone at the end. `plugin`: with tidegate's, for routers that use it."""
    log_dir.mkdir(parents=True, exist_ok=True)
    model, dtype = model_and_dtype()
    replicas = [
        VllmReplica(
            log_dir / f"vllm-{number}.log",
            model=model,
            load_format="dummy",
            num_gpu_blocks=KV_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            plugin=plugin,
            extra=("--dtype", dtype),  # the last one counts
        )
        for number in range(count)
    ]
    try:
        for replica in replicas:
            replica.start()
        for replica in replicas:
            replica.wait_ready()
        yield [replica.url for replica in replicas]
    finally:
        for replica in replicas:
            replica.process.kill()


@contextmanager
def embedded_replicas(count: int, log_dir: Path) -> Iterator[list[str]]:
    """Stand-ins of the same size."""
    log_dir.mkdir(parents=True, exist_ok=True)
    ports = free_ports(count)
    sizes = {
        "kv-tokens": KV_BLOCKS * BLOCK_TOKENS,
        "block-size": BLOCK_TOKENS,
        "max-model-len": MAX_MODEL_LEN,
        "max-num-seqs": MAX_SEQS,
        "max-num-batched-tokens": MAX_BATCHED_TOKENS,
    }
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    program = [sys.executable, "-c", "from tidegate.cli.main import main; main()", "engine"]
    engines = [Process([*program, "--port", str(port), *flags], log_dir / f"engine-{port}.log") for port in ports]
    try:
        for engine in engines:
            engine.start()
        for engine, port in zip(engines, ports, strict=True):
            engine.wait_healthy(f"http://127.0.0.1:{port}/health", START_S)
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for engine in engines:
            engine.kill()


def model_and_dtype() -> tuple[str, str]:
    """What computes some thousand prompt tokens a second, as tool gaps and lengths of `cpu-mixed` suppose: "small" in
    bfloat16 where the CPU multiplies it. Elsewhere bfloat16 is emulated, five times slower than float32, which is three
    times slower than it: a tenth of the model, then."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        flags = []
    native = {"amx_bf16", "avx512_bf16", "bf16"} & set(flags)
    return ("small", "bfloat16") if native else ("slim", "float32")
