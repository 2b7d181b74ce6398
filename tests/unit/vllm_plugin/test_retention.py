"""Which blocks a call moves, and where they go."""

from __future__ import annotations

import pytest
from tests.unit.vllm_plugin.pool import Pool

from tidegate.integrations.vllm_plugin import retention as module


def test_a_released_session_is_evicted_first_and_its_end_before_its_head() -> None:
    pool = Pool(6)
    pool.turn("live", "abc")
    pool.turn("dead", "xyz")
    done = pool.retention.release(["dead"])
    assert (done.known, done.moved, done.kept) == (1, 3, 0)
    assert pool.order == ["xyz", "xy", "x", "abc", "ab", "a"]
    assert pool.turn("live", "abc") == 3


def test_what_another_session_claims_stays_where_it_is() -> None:
    pool = Pool(8)
    pool.turn("live", "abX")
    pool.turn("dead", "abY")
    done = pool.retention.release(["dead"])
    assert (done.moved, done.kept) == (1, 2)
    assert pool.order == ["abY", None, None, None, None, "abX", "ab", "a"]
    assert pool.retention.release(["live"]).moved == 3


def test_blocks_of_a_request_that_runs_stay() -> None:
    pool = Pool(8)
    pool.turn("dead", "ab")
    table = pool.begin("abc")
    assert table is not None
    assert pool.retention.release(["dead"]).moved == 0
    pool.end("live", table)
    assert pool.retention.resident() == {"live": (3, 0, False)}
    assert pool.order[-3:] == ["abc", "ab", "a"]


def test_a_release_during_the_sessions_own_request_follows_at_its_end() -> None:
    pool = Pool(8)
    pool.turn("live", "xy")
    pool.turn("dead", "ab")
    table = pool.begin("abc")
    assert table is not None
    pool.retention.release(["dead"], running=["r"])
    pool.end("dead", table, "r")
    assert "dead" not in pool.retention.sessions
    assert pool.order[:3] == ["abc", "ab", "a"]


def test_a_preempted_request_of_a_released_session_ends_later() -> None:
    pool = Pool(8)
    table = pool.begin("abc")
    assert table is not None
    pool.retention.release(["dead"], running=["r"])
    pool.end("dead", table, "r", over=False)
    again = pool.begin("abc")
    assert again is not None
    pool.end("dead", again, "r")
    assert "dead" not in pool.retention.sessions
    assert not pool.retention._ending


def test_blocks_that_are_read_for_a_moment_longer_follow() -> None:
    pool = Pool(8)
    pool.turn("live", "xy")
    table = pool.begin("ab")
    assert table is not None
    for block in table:
        block.ref_cnt += 1  # a transfer reads them
    pool.end("dead", table)
    assert pool.retention.release(["dead"]).moved == 0
    pool.give_back(table)
    pool.turn("other", "q")
    assert pool.order[:2] == ["ab", "a"]


def test_blocks_that_stay_in_use_are_left_to_the_engine_in_the_end() -> None:
    pool = Pool(8)
    pool.turn("dead", "ab")
    assert pool.begin("ab") is not None  # of nobody, and it runs for ever
    pool.retention.release(["dead"])
    for _ in range(module.SETTLE_TRIES + 1):
        pool.turn("other", "q")
    assert not pool.retention._late


def test_demoted_sessions_go_behind_released_ones_in_the_order_of_their_demotion() -> None:
    pool = Pool(8)
    for session, letter in (("first", "a"), ("second", "b"), ("live", "c"), ("gone", "d")):
        pool.turn(session, letter * 2)
    pool.retention.demote(["first"])
    pool.retention.demote(["second"])
    pool.retention.release(["gone"])
    assert pool.order == ["dd", "d", "aa", "a", "bb", "b", "cc", "c"]


def test_what_a_session_in_use_shares_is_not_demoted_until_it_is_too() -> None:
    pool = Pool(6)
    pool.turn("one", "abX")
    pool.turn("two", "abY")
    pool.turn("live", "q")
    assert pool.retention.demote(["one"]).moved == 1
    assert pool.retention.demote(["two"]).moved == 3
    assert pool.order[-1] == "q"
    assert pool.retention.release(["one"]).moved == 1  # the shared head is the demoted other's, which lives


def test_the_next_request_of_a_demoted_session_ends_its_demotion() -> None:
    pool = Pool(6)
    pool.turn("paused", "ab")
    pool.turn("live", "q")
    pool.retention.demote(["paused"])
    pool.turn("paused", "abc")
    assert pool.retention.resident()["paused"] == (3, 0, False)
    assert not pool.retention._demoted
    assert pool.order[-3:] == ["abc", "ab", "a"]


def test_a_protected_session_comes_last() -> None:
    pool = Pool(5)
    for session in ("a", "b", "c"):
        pool.turn(session, session)
    pool.retention.demote(["a"])
    assert pool.retention.protect(["a"]).moved == 1
    assert pool.order[-3:] == ["b", "c", "a"]


def test_a_demotion_looks_at_a_bounded_run_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORTHLESS_RUN", 2)
    pool = Pool(8)
    pool.turn("paused", "a")
    pool.retention.demote(["paused"])
    assert pool.order == [None, None, "a", *[None] * 5]


def test_unknown_sessions_are_no_error() -> None:
    pool = Pool(4)
    for call in (pool.retention.release, pool.retention.demote, pool.retention.protect):
        done = call(["nobody"])
        assert (done.known, done.moved, done.kept) == (0, 0, 0)


def test_a_session_whose_blocks_are_gone_is_forgotten() -> None:
    pool = Pool(4)
    for number in range(100):
        pool.turn(f"s{number}", chr(200 + number) * 2)
    assert len(pool.retention.sessions) <= 6  # two are resident
    assert pool.retention.claims <= 12


def test_sessions_that_only_share_a_prefix_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 10)
    pool = Pool(6)
    for number in range(100):
        pool.turn(f"s{number}", "ab" + chr(200 + number))
    assert len(pool.retention.sessions) == 10
    assert pool.retention._claims["ab"] == 10
    assert "s99" in pool.retention.sessions


def test_a_sessions_growth_costs_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(3000)
    prompt = "".join(chr(1000 + number) for number in range(2000))
    pool.turn("s", prompt)
    looked: list[int] = []
    claim = pool.retention._claim
    monkeypatch.setattr(
        pool.retention, "_claim", lambda known, blocks: looked.append(len(blocks)) or claim(known, blocks)
    )
    for number in range(20):
        prompt += chr(4000 + number)
        pool.turn("s", prompt)
    assert looked == [1] * 20
    assert pool.retention.resident()["s"][0] == 2020


def test_a_branch_is_claimed_beside_what_it_left() -> None:
    pool = Pool(10)
    pool.turn("s", "abcd")
    pool.turn("s", "abXY")
    assert pool.retention.resident()["s"][0] == 6
    assert pool.retention.release(["s"]).moved == 6


def test_a_block_that_holds_something_else_now_is_claimed_anew() -> None:
    pool = Pool(2)
    pool.turn("s", "ab")
    pool.turn("other", "xy")
    pool.turn("s", "ab")
    assert pool.retention.release(["s"]).moved == 2


def test_a_reset_forgets_everything() -> None:
    pool = Pool(6)
    pool.turn("a", "ab")
    pool.turn("b", "ac")
    pool.retention.demote(["a"])
    pool.reset()
    assert pool.retention.resident() == {}
    assert not pool.retention._claims
    assert not pool.retention._demoted
    pool.turn("a", "ab")
    assert pool.retention.release(["a"]).moved == 2
