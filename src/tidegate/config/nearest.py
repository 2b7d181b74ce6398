"""The nearest known name to a mistyped one: what every refusal of an unknown key, flag, policy or command suggests."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" or nothing. The cutoff lets two typos in a short name through and no more."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
