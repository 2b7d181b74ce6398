"""The trainer's target mixture: which share of the completed rollouts each workload class shall have.

    PUT    /mixture   {"shares": {"agentic": 0.5, "rlvr": 0.3, "rlhf": 0.2}}
    GET    /mixture   the shares in force, by class, given or learned from what arrives
    DELETE /mixture   back to learning

Shares are relative: they are scaled to a sum of 1, and the answer says what they summed to. A class of which no session
has come yet may have a share, and is named in the answer: a misspelt one shows. A class without a share has none, as
long as a mixture is set; its sessions are admitted all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.clock import Clock
from tidegate.errors import RequestError
from tidegate.proxy.identity import check_label
from tidegate.server.answers import answer, read_fields
from tidegate.types import AnyEvent, MixtureSet, PoolView, WorkloadClass

MAX_SHARE = 1e15  # shares are relative, so any scale will do; their sum stays far from overflowing
MAX_CLASSES = 1024  # as many as the ledger can be told to keep apart


class MixtureApi:
    def __init__(self, handle: Callable[[AnyEvent], None], view: Callable[[], PoolView], clock: Clock) -> None:
        self._handle = handle
        self._view = view
        self._clock = clock
        self._given: dict[WorkloadClass, float] = {}

    def routes(self) -> list[Route]:
        return [
            Route("/mixture", self.show, methods=["GET"]),
            Route("/mixture", self.put, methods=["PUT", "POST"]),
            Route("/mixture", self.forget, methods=["DELETE"]),
        ]

    async def show(self, request: Request) -> Response:
        shares = self._given or {name: klass.share for name, klass in self._view().classes.items()}
        return answer({"given": bool(self._given), "shares": shares})

    async def put(self, request: Request) -> Response:
        given = _checked((await read_fields(request)).get("shares"))
        total = math.fsum(given.values())
        shares = {name: share / total for name, share in given.items()}
        self._set(shares)
        unseen = sorted(shares.keys() - self._view().classes.keys())
        return answer({"status": "ok", "shares": shares, "given_sum": total, "unseen_classes": unseen})

    async def forget(self, request: Request) -> Response:
        self._set({})
        return answer({"status": "ok", "shares": {}})

    def _set(self, shares: dict[WorkloadClass, float]) -> None:
        self._given = shares
        self._handle(MixtureSet(at_s=self._clock.now_s(), shares=shares))


def _checked(given: Any) -> dict[WorkloadClass, float]:
    if not isinstance(given, dict) or not given:
        raise RequestError("give shares: an object of workload class to share", reason="invalid_field", param="shares")
    if len(given) > MAX_CLASSES:
        raise RequestError(f"more than {MAX_CLASSES} classes", reason="invalid_field", param="shares")
    for name, share in given.items():
        check_label("workload class", name)
        number = isinstance(share, (int, float)) and not isinstance(share, bool)
        if not number or not 0 <= share <= MAX_SHARE:
            raise RequestError(
                f"the share of {name!r} is not a number from 0 to {MAX_SHARE:g}", reason="invalid_field", param="shares"
            )
    if not any(given.values()):
        raise RequestError("all shares are 0", reason="invalid_field", param="shares")
    return given
