"""Every constant of the decision core, with its reason; mounted in the configuration as `core`."""

from __future__ import annotations

from msgspec import Struct


class CoreParams(Struct, frozen=True, kw_only=True):
    pass
