"""Growth that nobody reports, as the engine's own counters show it."""

from __future__ import annotations

import pytest
from tests.unit.policy.shell import Shell

from tidegate.policy.session_admission import SessionAdmission

POLICIES = ("session_admission", "misa", "misa_t")


def tokens(shell: Shell, session: str) -> int:
    return shell.ledger.sessions[session].tokens


def generate(shell: Shell, seconds: int, tokens_per_s: int, running: int, made: int = 0) -> int:
    for _ in range(seconds):
        shell.now_s += 1.0
        made += tokens_per_s * running
        shell.sample("http://r0", generation_tokens_total=made, running=running)
        shell.tick(0.0, sampled=False)
    return made


def known(shell: Shell) -> int:
    policy = shell.scheduler.policy
    assert isinstance(policy, SessionAdmission)
    return len(policy.unseen)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_running_session_grows_by_what_its_replica_generates(policy: str) -> None:
    shell = Shell(policy, 1)
    shell.sample("http://r0", generation_tokens_total=0, running=0)
    shell.arrive("long", prompt_tokens=1000)
    shell.arrive("other", prompt_tokens=1000)
    generate(shell, seconds=60, tokens_per_s=50, running=2)
    assert tokens(shell, "long") == pytest.approx(4000, abs=200)
    assert tokens(shell, "other") == pytest.approx(4000, abs=200)
    shell.end(1, prompt_tokens=1000, completion_tokens=500)  # what the engine says counts
    assert tokens(shell, "long") == 1500
    assert known(shell) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_lost_or_left_is_forgotten(policy: str) -> None:
    shell = Shell(policy, 2)
    shell.arrive("moved", prompt_tokens=1000)
    assert shell.returned(1, shell.ledger.sessions["moved"].replica.url) is not None  # type: ignore[union-attr]
    generate(shell, seconds=3, tokens_per_s=50, running=1)
    assert known(shell) == 1
    for url in shell.urls:
        shell.health(url, usable=False)
    shell.returned(1, shell.ledger.sessions["moved"].replica.url)  # type: ignore[union-attr]
    shell.end(1, "aborted")
    generate(shell, seconds=3, tokens_per_s=50, running=0)
    shell.ledger.check()
    assert known(shell) == 0
