"""KV usage as the engines' own gauges count it: the blocks of running requests over all blocks.

vLLM's kv_cache_usage_perc and SGLang's token_usage leave out what is cached for sessions between two requests.
Controllers that others built on those gauges have thresholds that only make sense with them, so they are given the same
here, and not the ledger's occupancy, which counts every live session. Where a replica does not report the gauge it is
made up from the ledger: footprints of the sessions with a request running.
"""

from __future__ import annotations

from tidegate.policy.entities import Replica
from tidegate.policy.ledger import Ledger
from tidegate.types import ReplicaSample


def running_tokens(replica: Replica) -> int:
    return sum(session.tokens for session in replica.live if session.running)


def used_fraction(ledger: Ledger, replica: Replica, sample: ReplicaSample | None) -> float | None:
    """None: not known, or not known lately."""
    if ledger.stale(replica, ledger.now_s):
        return None
    if sample is not None and sample.kv_used_fraction is not None:
        return sample.kv_used_fraction
    capacity = replica.capacity_tokens
    return running_tokens(replica) / capacity if capacity else None
