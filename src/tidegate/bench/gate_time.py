"""A gate in front of engines that run faster than the clock has to run as much faster, or it would be measured with a
control loop that is slower than the one it ships with: its window of 10 s would be minutes of the engines' time.

Every time constant of the decision core is divided by the time scale, every rate multiplied; nothing else changes.
What is about real sockets and processes stays: when a reading counts as stale, timeouts, Retry-After.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tidegate.policy.params import CoreParams

REAL_TIME = frozenset({"replica.stale_after_s", "admission.hold_timeout_s", "admission.retry_after_s"})

# Scraping 20 times a second would cost more than the gate itself.
MIN_SCRAPE_PERIOD_S = 0.2
SCRAPE_PERIOD_S = 1.0


def gate_environment(time_scale: float) -> dict[str, str]:
    """Environment variables for `tidegate serve`."""
    variables = {
        f"TIDEGATE_CORE_{path.replace('.', '_').upper()}": repr(value)
        for path, value in _scaled(CoreParams(), time_scale, "")
    }
    period_s = max(MIN_SCRAPE_PERIOD_S, SCRAPE_PERIOD_S / time_scale)
    return {**variables, "TIDEGATE_ENGINES_SCRAPE_PERIOD_S": repr(period_s)}


def _scaled(params: msgspec.Struct, time_scale: float, prefix: str) -> Iterator[tuple[str, float]]:
    for name in params.__struct_fields__:
        path, value = prefix + name, getattr(params, name)
        if isinstance(value, msgspec.Struct):
            yield from _scaled(value, time_scale, f"{path}.")
        elif isinstance(value, float) and path not in REAL_TIME:
            if name.endswith("_per_s"):
                yield path, value * time_scale
            elif name.endswith("_s"):
                yield path, value / time_scale
