"""Model time is deterministic: order by time, then by asking; chance by named streams."""

from __future__ import annotations

import pytest

from tidegate.sim.kernel import Kernel


def test_events_run_by_time_and_then_in_the_order_of_asking() -> None:
    kernel, seen = Kernel(), list[str]()
    for at_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (2.0, "d")):
        kernel.at(at_s, lambda name=name: seen.append(name))
    kernel.run(2.0)
    assert seen == ["a", "b", "c", "d"]


def test_an_event_asked_for_now_runs_now_and_after_the_present_one() -> None:
    kernel, seen = Kernel(), list[float]()
    kernel.at(1.0, lambda: (seen.append(kernel.now_s), kernel.after(0.0, lambda: seen.append(kernel.now_s)))[0])
    kernel.run(1.0)
    assert seen == [1.0, 1.0]


def test_an_action_gets_its_arguments() -> None:
    kernel, seen = Kernel(), list[str]()
    kernel.after(1.0, seen.append, "a")
    kernel.at(1.0, seen.extend, ["b", "c"])
    kernel.run(5.0)
    assert (seen, kernel.events, kernel.now_s) == (["a", "b", "c"], 2, 5.0)


def test_the_past_cannot_be_changed() -> None:
    kernel = Kernel()
    kernel.run(3.0)
    with pytest.raises(ValueError, match="is past"):
        kernel.at(2.0, lambda: None)
    with pytest.raises(ValueError, match="is past"):
        kernel.after(-1.0, lambda: None)


def test_every_repeats_for_ever() -> None:
    kernel, seen = Kernel(), list[float]()
    kernel.every(1.5, lambda: seen.append(kernel.now_s))
    kernel.run(5.0)
    assert seen == [1.5, 3.0, 4.5]


def test_a_source_of_chance_depends_on_its_name_and_the_seed_only() -> None:
    kernel = Kernel(7)
    first = kernel.stream("a").random()
    kernel.stream("b").random()
    assert kernel.stream("a").random() == first == Kernel(7).stream("a").random()
    assert len({first, kernel.stream("b").random(), Kernel(8).stream("a").random()}) == 3
