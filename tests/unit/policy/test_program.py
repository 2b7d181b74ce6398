"""program: bin packing of whole programs by their tokens, paused when overbooked, resumed in the order of rank."""

from __future__ import annotations

from tests.unit.policy.shell import Shell, held, placed

from tidegate.types import Place, SessionFinished, Tick


def step(shell: Shell) -> list[Place]:
    """The next step of pause and resume, and whom it let go on."""
    shell.now_s += 5.0
    return placed(shell.send(Tick(at_s=shell.now_s)))


def test_a_new_program_goes_where_the_fewest_tokens_are() -> None:
    shell = Shell("program", 2, capacity=10_000)
    first = shell.turn("a", prompt=4_000)
    second = shell.turn("b", prompt=1_000)
    assert first != second
    assert shell.turn("c", prompt=1_000) == second
    assert shell.turn("d", prompt=500) == second  # 2,010 of b and c against 4,010


def test_each_program_has_a_buffer_of_100_tokens() -> None:
    shell = Shell("program", 1, capacity=1_000)
    shell.turn("a", prompt=490, completion=10)  # and its buffer: 600
    assert held(shell.arrive("b", prompt_tokens=301)).reason == "occupancy"
    shell.end(shell.requests, "aborted")
    assert isinstance(shell.arrive("c", prompt_tokens=300), Place)


def test_a_new_program_that_would_fit_waits_behind_any_other() -> None:
    shell = Shell("program", 1, capacity=10_000)
    shell.arrive("a", prompt_tokens=5_000)
    held(shell.arrive("large", prompt_tokens=9_000, workload="x"))
    assert held(shell.arrive("small", prompt_tokens=10, workload="y")).reason == "occupancy"
    assert [p.session for p in step(shell)] == ["small"]  # at the step, those that fit


def test_overbooked_the_smallest_acting_programs_are_paused_first() -> None:
    shell = Shell("program", 1, capacity=10_000)
    for name, prompt in (("small", 1_000), ("middle", 2_000), ("large", 3_000)):
        shell.turn(name, prompt=prompt, completion=0)
    shell.arrive("grows", prompt_tokens=3_000)
    shell.send(Tick(at_s=shell.now_s))
    shell.end(shell.requests, prompt_tokens=3_000, completion_tokens=900)  # 9,900 and 400
    shell.arrive("grows", prompt_tokens=3_900)
    step(shell)
    assert held(shell.arrive("small", prompt_tokens=1_000)).reason == "paused"
    assert isinstance(shell.arrive("middle", prompt_tokens=2_000), Place)


def test_a_reasoning_program_is_paused_when_its_request_ends() -> None:
    shell = Shell("program", 1, capacity=4_000)
    shell.arrive("a", prompt_tokens=1_500)
    a = shell.requests
    shell.arrive("b", prompt_tokens=2_000)
    b = shell.requests
    shell.end(b, prompt_tokens=2_000, completion_tokens=1_000)
    shell.arrive("b", prompt_tokens=3_000)  # 4,500 tokens, and both reason
    step(shell)
    assert shell.view().in_flight == 2
    shell.end(a, prompt_tokens=1_500, completion_tokens=0)
    assert held(shell.arrive("a", prompt_tokens=1_500)).reason == "paused"
    shell.end(shell.requests - 1, prompt_tokens=3_000, completion_tokens=0)
    assert isinstance(shell.arrive("b", prompt_tokens=3_000), Place)  # one was enough


def overbooked(capacity: int = 10_000) -> Shell:
    """Paused a (1,000 tokens) and b (2,000), acting; large runs and holds the rest."""
    shell = Shell("program", 1, capacity=capacity)
    shell.turn("a", prompt=1_000, completion=0)
    shell.turn("b", prompt=2_000, completion=0)
    shell.turn("large", prompt=6_000, completion=0)
    shell.arrive("large", prompt_tokens=9_800)
    step(shell)
    return shell


def test_those_with_a_request_go_on_first_smaller_ones_before_larger() -> None:
    shell = overbooked()
    held(shell.arrive("new", prompt_tokens=7_000))
    assert held(shell.arrive("b", prompt_tokens=2_000)).reason == "paused"
    assert held(shell.arrive("a", prompt_tokens=1_000)).reason == "paused"
    assert step(shell) == []  # large holds 9,900
    shell.send(SessionFinished(at_s=shell.now_s, session="large"))
    shell.end(3 + 1, prompt_tokens=9_800, completion_tokens=0)
    assert [p.session for p in step(shell)] == ["b", "a"]  # 3,200 of 10,000 with their buffers: the new one waits
    shell.finish("b")
    shell.end(6)
    assert [p.session for p in step(shell)] == ["new"]


def test_acting_programs_count_less_the_longer_they_act_when_others_resume() -> None:
    shell = Shell("program", 1, capacity=10_000)
    shell.turn("acting", prompt=8_000, completion=0)
    held(shell.arrive("new", prompt_tokens=5_000))
    assert [p.session for p in step(shell)] == ["new"]  # 8,000 tokens fade to 250 in 5 s
    shell.end(2, prompt_tokens=5_000, completion_tokens=0)
    step(shell)  # not decayed they are 13,000: the smaller one is paused
    assert held(shell.arrive("new", prompt_tokens=5_000)).reason == "paused"


def test_a_program_resumes_on_the_replica_with_the_most_room() -> None:
    shell = Shell("program", 2, capacity=10_000)
    home = shell.turn("a", prompt=3_000, completion=0)
    other = shell.turn("big", prompt=4_000, completion=0)
    assert shell.turn("fills", prompt=3_000, completion=0) == home
    shell.arrive("fills", prompt_tokens=8_000)
    step(shell)  # 11,000 at home: a is paused
    decision = held(shell.arrive("a", prompt_tokens=3_000))
    assert decision.reason == "paused"
    assert [(p.session, p.replica, p.reason) for p in step(shell)] == [("a", other, "routed")]


def test_a_request_goes_on_after_half_an_hour_whatever_remains() -> None:
    shell = overbooked()
    held(shell.arrive("a", prompt_tokens=1_000))
    held(shell.arrive("new", prompt_tokens=1_000))
    arrived_s = shell.now_s
    while shell.now_s < arrived_s + 1_795.0:
        assert step(shell) == []
    assert {p.session for p in step(shell)} == {"a", "new"}


def test_what_programs_share_is_room() -> None:
    shell = Shell("program", 1, capacity=10_000)
    for i in range(2):
        shell.arrive(f"s{i}", prompt_tokens=4_500)
    assert held(shell.arrive("new", prompt_tokens=3_000)).reason == "occupancy"
    assert step(shell) == []
    shell.sample("http://r0", kv_used_fraction=0.5)  # 9,000 tokens in 5,000
    assert [p.session for p in step(shell)] == ["new"]


def test_a_replica_of_unknown_capacity_pauses_nobody() -> None:
    shell = Shell("program", 1, capacity=None)
    for i in range(4):
        shell.turn(f"s{i}", prompt=1_000_000)
    assert step(shell) == []
    assert isinstance(shell.arrive("s0", prompt_tokens=1_000_000), Place)
