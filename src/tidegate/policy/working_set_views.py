"""working_set as seen from outside: its estimates for `/state`, its limit for `/advice`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.policy.placement import members

if TYPE_CHECKING:
    from tidegate.policy.working_set import WorkingSetPolicy


def session_limit(policy: WorkingSetPolicy) -> int:
    """Live sessions up to which it lets new ones in; those that doze take no room."""
    learned = policy.learned
    each = learned.mean_tokens if learned.mean_tokens > 1.0 else learned.prior_tokens()
    total = 0
    for slot in members(policy.ledger.usable):
        replica = policy.ledger.at(slot)
        room = int(policy.own.admit_fraction * (replica.capacity_tokens or 0) / each)
        total += policy.narrowed(replica, max(1, room) + policy.set_of(replica).dormant)
    return total


def estimates(policy: WorkingSetPolicy) -> dict[str, object]:
    return {policy.ledger.at(slot).url: _of_replica(policy, slot) for slot in members(policy.ledger.usable)}


def _of_replica(policy: WorkingSetPolicy, slot: int) -> dict[str, object]:
    replica = policy.ledger.at(slot)
    working_set = policy.set_of(replica)
    capacity = replica.capacity_tokens or 0
    return {
        "claimed_tokens": working_set.claimed_tokens(policy.ledger.now_s),
        "resident_limit_tokens": policy.own.resident_fraction * capacity,
        "admit_limit_tokens": policy.own.admit_fraction * capacity,
        "expected_tokens": list(policy.outlook.means(slot)),
        "decode_tokens_per_s": working_set.clock.rate,
        "dormant": working_set.dormant,
        "paused": sum(request.held for _, _, request in working_set.paused),
    }
