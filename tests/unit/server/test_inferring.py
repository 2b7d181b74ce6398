"""Requests that name no session, through a driver that infers it from their prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.server.exchanges import JSON, A, B, FakeExchange, Shell

from tidegate.config.server import IdentityConfig
from tidegate.errors import ConfigError, ReplicaError
from tidegate.policy.baselines.params import StaticCapParams
from tidegate.policy.params import AdmissionParams, CoreParams
from tidegate.proxy.identity import Identifier
from tidegate.server import inferring
from tidegate.server.inferring import InferringIdentifier, identifier_of
from tidegate.server.lineage import Lineage

PATH = "/inference/v1/generate"


@pytest.fixture
def shell() -> Shell:
    return inferring_shell()


def inferring_shell(policy: str = "sticky_least_loaded", params: CoreParams | None = None) -> Shell:
    shell = Shell(policy, params)
    shell.driver._identifier = InferringIdentifier(max_sessions=100)
    shell.add(A, B)
    return shell


def table(shell: Shell) -> Lineage:
    identifier = shell.driver._identifier
    assert isinstance(identifier, InferringIdentifier)
    return identifier.lineage


def ask(shell: Shell, *ids: int, session: str | None = None) -> FakeExchange:
    return shell.open(session, json.dumps({"token_ids": ids}).encode(), path=PATH)


def answer(shell: Shell, exchange: FakeExchange, *ids: int) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": len(ids)}
    body: Any = {"choices": [{"token_ids": ids, "finish_reason": "stop"}], "usage": usage}
    shell.answer(exchange, json.dumps(body).encode())


def live(shell: Shell) -> int:
    return shell.scheduler.view(shell.clock.now_s()).live


def test_turns_of_one_conversation_are_one_session_on_one_replica(shell: Shell) -> None:
    prompt, homes = [1, 2, 3], set()
    for turn in range(5):
        exchange = ask(shell, *prompt)
        homes.update(exchange.placed)
        answer(shell, exchange, 40 + turn)
        prompt += [40 + turn, 7]
    assert live(shell) == 1
    assert len(homes) == 1
    assert (table(shell).opened, table(shell).continued) == (1, 4)
    assert shell.at_rest


def test_the_samples_of_a_group_are_told_apart_by_what_was_replied(shell: Shell) -> None:
    first = [ask(shell, 1, 2, 3) for _ in range(4)]
    for number, exchange in enumerate(first):
        answer(shell, exchange, 10 + number)
    second = [ask(shell, 1, 2, 3, 10 + number, 9) for number in (2, 0, 3, 1)]
    assert [exchange.placed for exchange in second] == [first[number].placed for number in (2, 0, 3, 1)]
    assert live(shell) == 4
    assert table(shell).continued == 4


@pytest.mark.parametrize("while_it_runs", [True, False])
def test_of_two_that_go_on_from_one_reply_the_second_is_a_session_of_its_own(shell: Shell, while_it_runs: bool) -> None:
    answer(shell, ask(shell, 1, 2), 3)
    one = ask(shell, 1, 2, 3, 4)
    if not while_it_runs:
        answer(shell, one, 5)
    two = ask(shell, 1, 2, 3, 6)
    assert live(shell) == 2
    if while_it_runs:
        answer(shell, one, 5)
    answer(shell, two, 7)
    answer(shell, ask(shell, 1, 2, 3, 6, 7, 8), 9)
    answer(shell, ask(shell, 1, 2, 3, 4, 5, 8), 9)
    assert live(shell) == 2


def test_a_turn_that_failed_can_be_asked_again(shell: Shell) -> None:
    answer(shell, ask(shell, 1, 2), 3)
    for _ in range(2):
        exchange = ask(shell, 1, 2, 3, 4)
        assert exchange.meter is not None
        exchange.meter.response_head(500, JSON)
        exchange.meter.response_body(b'{"error": {}}')
        exchange.meter.response_end()
        shell.driver.ended(exchange, "error", None)
    gone = ask(shell, 1, 2, 3, 4)
    shell.driver.ended(gone, "aborted", None)
    answer(shell, ask(shell, 1, 2, 3, 4), 5)
    assert live(shell) == 1


def test_what_a_replica_said_that_gave_the_request_back_is_no_reply(shell: Shell) -> None:
    exchange = ask(shell, 1, 2)
    assert exchange.meter is not None
    exchange.meter.response_head(200, JSON)
    exchange.meter.response_body(b'{"choices": [{"token_ids": [], "finish_reason": "abort"}]}')
    assert exchange.meter.response_end() == "retry"
    shell.driver.returned(exchange, exchange.placed[0], ReplicaError("answered 200", reason="replica_refused"))
    answer(shell, exchange, 3)
    answer(shell, ask(shell, 1, 2, 3, 4), 5)
    assert (live(shell), table(shell).continued) == (1, 1)


def test_a_refused_turn_leaves_its_session_as_it_was() -> None:
    params = CoreParams(static_cap=StaticCapParams(cap=1), admission=AdmissionParams(overload="reject"))
    shell = inferring_shell("static_cap", params)
    shell.remove(B)
    answer(shell, ask(shell, 1, 2), 3)
    assert ask(shell, 8, 8).rejected is not None
    assert ask(shell, 1, 2, 3, 4).rejected is None
    assert table(shell).opened == 2


def test_a_session_that_the_client_names_is_never_inferred(shell: Shell) -> None:
    answer(shell, ask(shell, 1, 2, session="named"), 3)
    answer(shell, ask(shell, 1, 2, 3, 4), 5)
    assert live(shell) == 2
    assert table(shell).continued == 0


def test_a_reply_too_long_to_keep_is_gone_on_with_by_its_prompt(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inferring, "MAX_REPLY_BYTES", 50)
    answer(shell, ask(shell, 1, 2), *range(100, 200))
    answer(shell, ask(shell, 1, 2, *range(100, 200), 4), 5)
    assert (live(shell), table(shell).continued) == (1, 1)


def test_a_body_without_a_prompt_is_a_session_of_its_own_as_ever(shell: Shell) -> None:
    exchange = shell.open(None, b'{"token_ids": []}', path=PATH)
    shell.answer(exchange)
    assert live(shell) == 0
    assert table(shell).opened == 0


def test_settings_that_exclude_each_other_are_refused() -> None:
    assert type(identifier_of(IdentityConfig())) is Identifier
    assert isinstance(identifier_of(IdentityConfig(infer_sessions=True)), InferringIdentifier)
    with pytest.raises(ConfigError, match="read_bodies"):
        identifier_of(IdentityConfig(infer_sessions=True, read_bodies=False))
