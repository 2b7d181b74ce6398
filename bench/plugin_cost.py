"""What the vLLM plugin adds to vLLM's scheduler at a request's end, in CPU time: no model, one session that grows.

python bench/plugin_cost.py    (after `make test-vllm` has set up .venv-vllm)

`of vLLM's free` is the plugin's time over that of vLLM's own freeing of the same blocks; `of the scheduler` is over all
that vLLM's scheduler does for the turn, which is less than what the turn costs the engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.vllm.replica import ENVIRONMENT, MODELS, PYTHON, plugin_environment  # noqa: E402

BLOCK_TOKENS = 16
TURNS = 40
REPEATS = 5
SETTINGS = [(groups, prompt) for groups in (["full"], ["full", "window"]) for prompt in (2000, 6000)]


def main() -> None:
    runs = [setting for setting in SETTINGS for _ in range(REPEATS)]
    with tempfile.TemporaryDirectory() as site:
        lines = measured(runs, Path(site))
    print("| KV cache groups | blocks at the end | of vLLM's free | of the scheduler |")
    print("|---|---|---|---|")
    for number, (groups, _) in enumerate(SETTINGS):
        mine = lines[number * REPEATS : (number + 1) * REPEATS]
        shares = [spread([run["plugin_s"] / run[whole] for run in mine]) for whole in ("free_s", "all_s")]
        print(f"| {' + '.join(groups)} | {mine[0]['blocks']} | {shares[0]} | {shares[1]} |")


def spread(shares: list[float]) -> str:
    return f"{median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"


def measured(runs: list[tuple[list[str], int]], site: Path) -> list[dict[str, float]]:
    scenarios = [
        {
            "model": str(MODELS / "tiny"),
            "groups": groups,
            "block_size": BLOCK_TOKENS,
            "num_blocks": 8200,
            "steps": [("cost", [prompt, TURNS])],
        }
        for groups, prompt in runs
    ]
    process = subprocess.run(
        [PYTHON, str(ROOT / "tests/vllm/plugin_steps.py")],
        input=json.dumps(scenarios),
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT, **plugin_environment(site), "VLLM_LOGGING_LEVEL": "ERROR"},
        check=True,
    )
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    main()
