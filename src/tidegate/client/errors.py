"""What a trainer may have to handle.

    ClientError
    +-- SchedulerClosed     the scheduler's `async with` is over
    +-- GateError           a call that the trainer itself asked for: pause, resume, update_weights, set_mixture
        +-- GateUnreachable     no answer
        +-- GateRefused         an answer, and it is no: `status`, and the stable `code` of its error object

What the scheduler does by itself (advice, announcing and finishing sessions) never raises: a rollout must not fail
because of its gate's bookkeeping.
"""

from __future__ import annotations


class ClientError(Exception):
    pass


class SchedulerClosed(ClientError):
    pass


class GateError(ClientError):
    pass


class GateUnreachable(GateError):
    pass


class GateRefused(GateError):
    def __init__(self, message: str, status: int, code: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
