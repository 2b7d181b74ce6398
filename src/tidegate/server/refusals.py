"""What a client is told whose request the gate does not send on."""

from __future__ import annotations

from tidegate.errors import AdmissionError, RequestError
from tidegate.policy.reasons import REJECT
from tidegate.types import Reject

_OVERLOAD = 429  # the status of `overloaded`: clients that asked for it back off by themselves


def not_admitted(decision: Reject) -> AdmissionError:
    meaning = REJECT.get(decision.reason, decision.reason)
    return AdmissionError(
        f"not admitted: {meaning}",
        reason=decision.reason,
        status=_OVERLOAD if decision.reason == "overloaded" else 503,
        retry_after_s=decision.retry_after_s,
    )


def shutting_down() -> AdmissionError:
    return AdmissionError("the gate is shutting down", reason="shutting_down", retry_after_s=1.0)


def aborted() -> RequestError:
    """499, as for a call that was cancelled: client libraries repeat 409, 429 and 5xx, and would be held again."""
    return RequestError("aborted while it was held", reason="aborted", status=499)
