"""One error tree, named by the boundary that a failure crossed; anything else propagates.

    TidegateError
    +-- ConfigError            the operator's flags, file or environment (no HTTP status: the process does not start)
    +-- RequestError           4xx: the client's request; retrying it unchanged is of no use
    |   +-- MalformedRequest, BodyTooLarge, HeadersTooLarge, RequestTimeout, InvalidBody, InvalidSession, ...
    +-- AdmissionError         429/503: the gate's own refusal, with Retry-After
    +-- ReplicaError           502/503/504: the replica failed, or none can be used

Each carries an HTTP status, a stable `reason` (the `code` of the OpenAI-shaped body) and, where waiting helps, a
`retry_after_s`. SDKs retry 429 and 5xx and give up on other 4xx, so the statuses are chosen by what a retry would do.
"""

from __future__ import annotations

import msgspec


class TidegateError(Exception):
    status: int = 500
    reason: str = "internal_error"
    kind: str = "server_error"  # the OpenAI error `type`
    retry_after_s: float | None = None

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if reason is not None:
            self.reason = reason
        if status is not None:
            self.status = status
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The OpenAI error object: {"error": {"message", "type", "param", "code"}}."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.reason}}
        )


class ConfigError(TidegateError):
    reason = "invalid_config"


class RequestError(TidegateError):
    status = 400
    reason = "invalid_request"
    kind = "invalid_request_error"


class MalformedRequest(RequestError):
    reason = "malformed_http"


class BodyTooLarge(RequestError):
    status = 413
    reason = "body_too_large"


class HeadersTooLarge(RequestError):
    status = 431
    reason = "headers_too_large"


class RequestTimeout(RequestError):
    status = 408
    reason = "request_timeout"


class InvalidBody(RequestError):
    reason = "invalid_json"


class InvalidSession(RequestError):
    reason = "invalid_session_id"


class AdmissionError(TidegateError):
    status = 503
    reason = "overloaded"
    kind = "overloaded_error"


class ReplicaError(TidegateError):
    status = 502
    reason = "replica_failed"
    kind = "server_error"
