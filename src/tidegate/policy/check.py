"""The integrity check: recomputes every redundant count of the ledger from its sessions and requests alone.

Slow and naive on purpose. Tests run it after each step; a shell may run it when it is idle.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tidegate.policy.entities import ENDED, HELD, LIVE, OPENED, Replica, Session

if TYPE_CHECKING:
    from tidegate.policy.ledger import Ledger


def check(ledger: Ledger) -> None:
    """Raises AssertionError naming the first count that is off."""
    sessions = all_sessions(ledger)
    _check_sessions(ledger, sessions)
    _check_classes(ledger, sessions)
    for replica in ledger.replicas.values():
        _check_replica(ledger, replica, sessions)
    _check_pool(ledger)
    _check_groups(ledger, sessions)


def all_sessions(ledger: Ledger) -> list[Session]:
    """Listed ones, and those that only requests refer to."""
    found = dict.fromkeys(ledger.sessions.values())
    found.update(dict.fromkeys(request.session for request in ledger.requests.values()))
    return list(found)


def _check_sessions(ledger: Ledger, sessions: list[Session]) -> None:
    running = Counter(r.session for r in ledger.requests.values() if r.replica is not None)
    waiting = Counter(r.session for r in ledger.requests.values() if r.held)
    for session in sessions:
        extra = sum(r.extra_tokens for r in ledger.requests.values() if r.session is session)
        assert session.running == running[session], (session.id, "running", session.running, running[session])
        assert session.waiting == waiting[session], (session.id, "waiting", session.waiting, waiting[session])
        assert session.tokens == session.base_tokens + extra, (session.id, "tokens", session.tokens)
        assert (session in session.klass.queue) == (session.state == HELD), (session.id, "queue")
        assert (session.state == HELD) <= (session.waiting > 0), (session.id, "held without a request")
        assert (session.state == LIVE) <= (session.replica is not None), (session.id, "live without a replica")
        assert (session in ledger.draining) == (session.state == ENDED), (session.id, "draining")
        idle = session.listed and session.state != ENDED and not session.running and not session.waiting
        assert (session.klass.idle.get(session.id) is session) == idle, (session.id, "idle")
    for session in ledger.sessions.values():
        assert session.state != ENDED, (session.id, "ended but listed")


def _check_classes(ledger: Ledger, sessions: list[Session]) -> None:
    for klass in ledger.classes:
        own = [session for session in sessions if session.klass is klass]
        states = Counter(session.state for session in own)
        assert klass.opened == states[OPENED], (klass.name, "opened", klass.opened, states[OPENED])
        assert klass.held == states[HELD] == len(klass.queue), (klass.name, "held", klass.held, states[HELD])
        assert klass.live == states[LIVE], (klass.name, "live", klass.live, states[LIVE])
        live_tokens = sum(session.tokens for session in own if session.state == LIVE)
        assert klass.tokens == live_tokens, (klass.name, "tokens", klass.tokens, live_tokens)
        assert sum(klass.profile.sessions) == klass.live, (klass.name, "profile sessions")
        assert sum(klass.profile.tokens) == klass.tokens, (klass.name, "profile tokens")
        assert klass.started - klass.ended == klass.demand, (klass.name, "started and ended")
        assert klass.completed <= klass.ended, (klass.name, "completed")
    assert len(ledger.classes) <= ledger.params.ledger.max_classes, "classes"


def _check_replica(ledger: Ledger, replica: Replica, sessions: list[Session]) -> None:
    live = [session for session in sessions if session.state == LIVE and session.replica is replica]
    draining = [session for session in sessions if session.state == ENDED and session.replica is replica]
    requests = [request for request in ledger.requests.values() if request.replica is replica]
    assert set(replica.live) == set(live), (replica.url, "live")
    assert replica.requests == len(requests), (replica.url, "requests", replica.requests, len(requests))
    tokens = sum(session.tokens for session in live + draining)
    assert replica.tokens == tokens, (replica.url, "tokens", replica.tokens, tokens)
    for klass in ledger.classes:
        own = [session for session in live if session.klass is klass]
        assert replica.class_live[klass.index] == len(own), (replica.url, klass.name, "class live")
        assert replica.class_tokens[klass.index] == sum(s.tokens for s in own), (replica.url, klass.name, "tokens")
    turn = replica.credit_turn
    new = sum(request.credit for request in requests if request.credit_turn == turn)
    old = sum(request.credit for request in requests if request.credit_turn == turn - 1)
    assert (replica.credit_new, replica.credit_old) == (new, old), (replica.url, "credit")
    assert ledger.by_sessions.loads[replica.slot] == len(live), (replica.url, "session index")
    assert ledger.by_requests.loads[replica.slot] == len(requests), (replica.url, "request index")
    assert ledger.slots[replica.slot] is replica, (replica.url, "slot")
    assert bool(ledger.usable & replica.bit) == replica.usable, (replica.url, "usable")


def _check_pool(ledger: Ledger) -> None:
    known = [replica for replica in ledger.slots if replica is not None]
    assert set(known) == set(ledger.replicas.values()), "slots"
    assert len(ledger.sessions) <= ledger.params.ledger.max_sessions, "table"
    for request in ledger.requests.values():
        assert (request.replica is not None) != request.held, (request.id, "neither runs nor waits")
        if request.replica is not None:
            assert ledger.replicas.get(request.replica.url) is request.replica, (request.id, "unknown replica")


def _check_groups(ledger: Ledger, sessions: list[Session]) -> None:
    for group in ledger.groups.values():
        own = [session for session in sessions if session.group is group and session.state != ENDED]
        assert group.sessions == len(own) > 0, (group.name, "sessions")
        on = Counter(s.replica.slot for s in own if s.state == LIVE and s.replica is not None)
        assert group.on == dict(on), (group.name, "replicas")
