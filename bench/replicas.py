"""The real vLLM CPU replicas of the benchmarks: those of the end-to-end suite, with the model "small"."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.vllm.replica import BLOCK_TOKENS as BLOCK_TOKENS  # noqa: E402  (the end-to-end suite's replicas)
from tests.vllm.replica import VllmReplica  # noqa: E402

KV_BLOCKS = 512  # of 32 tokens: 16,384
VOCAB_SIZE = 4096  # of the model "small"
MAX_MODEL_LEN, MAX_SEQS, MAX_BATCHED_TOKENS = 8192, 64, 2048  # VllmReplica's


@contextmanager
def vllm_replicas(count: int, log_dir: Path) -> Iterator[list[str]]:
    """The URLs of running replicas, gone at the end."""
    log_dir.mkdir(parents=True, exist_ok=True)
    replicas = [
        VllmReplica(
            log_dir / f"vllm-{number}.log",
            model="small",
            load_format="dummy",
            num_gpu_blocks=KV_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            extra=("--dtype", native_dtype()),  # the last one counts
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


def native_dtype() -> str:
    """bfloat16 where the CPU multiplies it. Elsewhere it is emulated, and a prompt takes five times as long as in
    float32, which no GPU's proportions are like."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return "float32"
    return "bfloat16" if {"amx_bf16", "avx512_bf16", "bf16"} & set(flags) else "float32"
