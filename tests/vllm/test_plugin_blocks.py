"""The plugin in vLLM's own scheduler and block pool, without a model: several KV cache groups, and what is rare."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.replica import ENVIRONMENT, MODELS, PYTHON, ROOT, plugin_environment

pytestmark = pytest.mark.vllm

BLOCK = 16
GROUPS = {"full": ["full"], "hybrid": ["full", "window"], "window": ["window"]}


def tokens(blocks: int, seed: int | str) -> list[int]:
    rng = random.Random(f"tokens {seed}")
    return [rng.randrange(4000) for _ in range(blocks * BLOCK)]


def scenario(groups: list[str], num_blocks: int, *steps: tuple[str, list[Any]], **more: Any) -> dict[str, Any]:
    return {
        "model": str(MODELS / "tiny"),
        "groups": groups,
        "block_size": BLOCK,
        "num_blocks": num_blocks,
        "steps": steps,
        **more,
    }


def call(name: str, *sessions: str) -> tuple[str, list[Any]]:
    return ("call", [name, list(sessions)])


def passing(count: int, release: bool) -> list[tuple[str, list[Any]]]:
    """Sessions that come, run once and end."""
    steps = []
    for number in range(count):
        steps.append(("turn", [f"dead-{number}", tokens(30, f"dead {number}")]))
        if release:
            steps.append(call("release", f"dead-{number}"))
    return steps


LIVE = tokens(40, "live")
QUEUE: tuple[str, list[Any]] = ("queue", [])
CONSISTENT: tuple[str, list[Any]] = ("consistent", [])


def outlasts(kind: str, release: bool) -> dict[str, Any]:
    dead, live = passing(6, release), LIVE + tokens(2, "next")
    num_blocks = 101 if len(GROUPS[kind]) == 1 else 161
    steps = [("turn", ["live", LIVE]), *dead, ("turn", ["live", live]), QUEUE, CONSISTENT]
    return scenario(GROUPS[kind], num_blocks, *steps)


def random_walk(kind: str, seed: int) -> dict[str, Any]:
    """Sessions that grow, share, branch, end and return, with all calls between, in a cache too small for them."""
    rng = random.Random(seed)
    prompts = {f"s{n}": tokens(3, n % 2) + tokens(2, f"own {n}") for n in range(8)}
    steps: list[tuple[str, list[Any]]] = []
    running = 0
    for number in range(120):
        name = rng.choice(list(prompts))
        match rng.randrange(10):
            case 0:
                steps.append(call("release", name, rng.choice(list(prompts))))
            case 1:
                steps.append(call("demote", name))
            case 2:
                steps.append(call("protect", name))
            case 3 if running < 3:
                steps.append(("start", [name, prompts[name][: 20 * BLOCK], 40]))
                running += 1
            case 4:
                prompts[name] = prompts[name][: 4 * BLOCK] + tokens(2, f"branch {number}")
            case 5:
                steps.append(("reset", [True]))
            case 6:
                steps += [("step", [])] * 5
            case _:
                prompts[name] = [*prompts[name], *tokens(1, number)][-25 * BLOCK :]
                steps.append(("turn", [rng.choice([name, name, None]), prompts[name]]))
        steps += [QUEUE, CONSISTENT]
    return scenario(GROUPS[kind], 90, *steps)


SHARED = tokens(20, "shared")
SCENARIOS: dict[str, dict[str, Any]] = {
    **{f"outlasts-{kind}-{release}": outlasts(kind, release) for kind in GROUPS for release in (False, True)},
    **{f"walk-{kind}-{seed}": random_walk(kind, seed) for kind in GROUPS for seed in range(3)},
    "window": scenario(
        ["window"],
        101,
        ("turn", ["a", tokens(40, "a")]),
        ("call", ["sessions", None]),
        call("release", "a"),
        QUEUE,
    ),
    "running": scenario(
        ["full"],
        101,
        ("start", ["a", tokens(30, "a"), 1000]),
        ("step", []),
        call("release", "a"),
        ("abort", ["r1"]),
        ("call", ["sessions", None]),
        ("turn", ["b", tokens(60, "b")]),
        QUEUE,
    ),
    "reopened": scenario(
        ["full"],
        201,
        ("start", ["a", tokens(10, "a"), 1000]),
        ("step", []),
        call("release", "a"),
        ("turn", ["a", tokens(10, "again")]),
        ("abort", ["r1"]),
        ("call", ["sessions", None]),
    ),
    "order": scenario(
        ["full"],
        101,
        *[("turn", [name, tokens(20, name)]) for name in ("old", "first", "second", "gone")],
        call("demote", "first"),
        call("demote", "second"),
        call("release", "gone"),
        *[("turn", [None, tokens(blocks, f"filler {blocks}")]) for blocks in (20, 41)],
        ("call", ["sessions", None]),
        ("turn", [None, tokens(20, "more")]),
        ("call", ["sessions", None]),
    ),
    "uncached": scenario(
        ["full"], 101, ("turn", ["a", tokens(4, 1)]), call("release", "a"), ("call", ["info"]), caching=False
    ),
    "fault": scenario(
        ["full"],
        101,
        ("turn", ["a", tokens(4, "a")]),
        ("fault", []),
        ("turn", ["a", tokens(4, "a") + tokens(1, "b")]),
        ("call", ["info"]),
        ("turn", ["a", tokens(4, "a") + tokens(2, "b")]),
        QUEUE,
    ),
    "bounded": scenario(
        ["full"],
        101,
        *[("turn", [f"s{number}", tokens(5, number)]) for number in range(400)],
        ("call", ["info"]),
        CONSISTENT,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Importing vLLM takes 10 s, so once for all."""
    process = subprocess.run(
        [PYTHON, str(ROOT / "tests/vllm/plugin_steps.py")],
        input=json.dumps(list(SCENARIOS.values())),
        capture_output=True,
        text=True,
        env=environment(tmp_path_factory.mktemp("site")),
        check=False,
        timeout=600,
    )
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == sum(len(made["steps"]) for made in SCENARIOS.values()), process.stderr[-3000:]
    return {name: [lines.pop(0) for _ in made["steps"]] for name, made in SCENARIOS.items()}


def environment(site: Path) -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, **plugin_environment(site), "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.mark.parametrize("kind", GROUPS)
def test_a_live_session_outlasts_dead_ones_only_with_release(kind: str, answers: Any) -> None:
    *_, without, _, _ = answers[f"outlasts-{kind}-False"]
    *_, found, queue, consistent = answers[f"outlasts-{kind}-True"]
    assert without["cached"] < len(LIVE) // 2
    assert found["cached"] == len(LIVE)
    assert queue["whole"]
    assert consistent["same"]


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name.startswith("walk")])
def test_the_queue_stays_whole_and_claims_exact(name: str, answers: Any) -> None:
    for step, answer in zip(SCENARIOS[name]["steps"], answers[name], strict=True):
        assert answer.get("whole", True), step
        assert answer.get("same", True), step
        assert not answer.get("off"), step


def test_blocks_that_left_a_sliding_window_are_released_too(answers: Any) -> None:
    _, sessions, released, queue = answers["window"]
    assert sessions["sessions"]["a"]["blocks"] == released["moved_blocks"] == 40
    cached = [block_hash is not None for block_hash in queue["hashes"]]
    assert all(cached[:40])


def test_a_release_that_overtakes_the_sessions_request_follows_at_its_end(answers: Any) -> None:
    _, _, released, _, sessions, _, queue = answers["running"]
    assert released["running_requests"] == 1
    assert sessions["sessions"] == {}
    assert queue["whole"]
    # 60 blocks were taken of 100: the 30 that "a" had are among them, although they had been used last.
    assert sum(block_hash is not None for block_hash in queue["hashes"]) == 60


def test_a_session_that_came_back_is_not_released_with_its_former_life(answers: Any) -> None:
    *_, sessions = answers["reopened"]
    assert sessions["sessions"]["a"]["blocks"] == 10


def test_released_go_first_then_demoted_in_their_order_then_the_rest(answers: Any) -> None:
    *_, between, _, after = answers["order"]
    assert {name: entry["blocks"] for name, entry in between["sessions"].items()} == {"old": 20, "second": 19}
    assert set(after["sessions"]) == {"old"}  # the oldest of all, by use


def test_without_prefix_caching_it_is_off_and_says_so(answers: Any) -> None:
    _, released, info = answers["uncached"]
    assert released["off"] == info["off"] == "prefix caching is off"


def test_a_fault_in_the_plugin_takes_it_off_and_leaves_the_engine_alone(answers: Any) -> None:
    *_, first, info, second, queue = answers["fault"]
    assert first["cached"] == 4 * BLOCK
    assert info["off"].startswith("a fault of its own")
    assert second["cached"] == 5 * BLOCK
    assert queue["whole"]


def test_sessions_are_forgotten_when_their_blocks_are_gone(answers: Any) -> None:
    *_, info, consistent = answers["bounded"]
    assert info["sessions"] <= 60  # 20 are resident
    assert info["claims"] <= 300  # of 100 blocks
    assert consistent["same"]


def test_a_vllm_that_it_does_not_know_is_left_alone(tmp_path: Path) -> None:
    code = """
import vllm
from tidegate.integrations import vllm_plugin
from vllm.v1.core.kv_cache_manager import KVCacheManager
before, version = KVCacheManager.__init__, vllm.__version__
vllm.__version__ = "0.99.0"
vllm_plugin.register()
print("left alone" if KVCacheManager.__init__ is before else "wrapped")
vllm.__version__ = version
vllm_plugin.register()
print("left alone" if KVCacheManager.__init__ is before else "wrapped")
"""
    process = subprocess.run(
        [PYTHON, "-c", code],
        capture_output=True,
        text=True,
        env={**environment(tmp_path), "VLLM_LOGGING_LEVEL": "WARNING"},
        check=True,
        timeout=300,
    )
    assert process.stdout.splitlines()[-2:] == ["left alone", "wrapped"]
    assert (process.stdout + process.stderr).count("tidegate plugin is off") == 1
