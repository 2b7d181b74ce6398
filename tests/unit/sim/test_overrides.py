"""Parameters on the command line reach the policy's constants, or are refused with what was meant."""

from __future__ import annotations

import pytest

from tidegate.errors import ConfigError
from tidegate.policy.params import CoreParams
from tidegate.sim.overrides import policy_choice, with_settings


def test_a_setting_changes_its_field_and_nothing_else() -> None:
    changed = with_settings(CoreParams(), ["static_cap.cap=7", "tick_s=0.5"])
    assert (changed.static_cap.cap, changed.tick_s) == (7, 0.5)
    assert changed.ledger == CoreParams().ledger


def test_a_policys_own_parameter_needs_no_section() -> None:
    choice = policy_choice("static_cap:cap=3", ["static_cap.cap=9", "tick_s=2"])
    assert (choice.label, choice.name, choice.params.static_cap.cap, choice.params.tick_s) == (
        "static_cap:cap=3", "static_cap", 3, 2.0,
    )  # fmt: skip


def test_none_empties_an_optional_field() -> None:
    held = with_settings(CoreParams(), ["admission.hold_timeout_s=5"])
    assert held.admission.hold_timeout_s == 5.0
    assert with_settings(held, ["admission.hold_timeout_s=none"]).admission.hold_timeout_s is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("static_cap.cpa=3", "did you mean 'cap'"),
        ("static_cpa.cap=3", "did you mean 'static_cap'"),
        ("static_cap=3", "is a section: cap"),
        ("static_cap.cap", "is not policy.param=value"),
        ("static_cap.cap=many", "Expected `int`"),
        ("static_cap.cap=0", ">= 1"),
        ("tick_s.x=1", "no parameter"),
    ],
)
def test_a_wrong_setting_is_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_settings(CoreParams(), [setting])


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'static_cap'"):
        policy_choice("static_cop:cap=3")
