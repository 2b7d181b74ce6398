"""Every reason that a decision can carry: stable words, for clients, metrics and the decision log."""

from __future__ import annotations

from typing import Final

PLACE: Final[dict[str, str]] = {
    "admitted": "a new session entered",
    "continuation": "a request of an admitted session, on its replica",
    "routed": "a request of a known session, routed anew by a policy that does not pin sessions, or that moved it to "
    "a replica with room",
    "repinned": "its replica is gone or not usable: the session moved",
    "retried": "the replica failed before the first byte: another one",
}
HOLD: Final[dict[str, str]] = {
    "replica_cap": "every replica holds as many sessions as its cap allows",
    "pool_cap": "the pool holds as many sessions as its cap allows",
    "class_cap": "the class holds as many sessions as its share allows",
    "reserved": "the replicas with room are kept for a class that waits for a slot as large as its sessions",
    "occupancy": "the expected footprints of the live sessions leave no room for one more",
    "pressure": "as replica_cap, with the cap contracted by confirmed pressure",
    "capacity_unknown": "no replica with room reports its KV capacity",
    "stale_state": "no replica with room has reported lately",
    "no_replica": "no replica is usable",
    "not_resident": "its session does not fit beside older ones: paused at its turn boundary",
    "paused": "its session is paused at a turn boundary: the policy has more sessions admitted than it lets run",
    "pool_paused": "generation is paused (a weight update)",
    "queued": "others of its class wait already, or its own session does",
}
REJECT: Final[dict[str, str]] = {
    "hold_timeout": "a new session waited longer than admission.hold_timeout_s",
    "overloaded": "a new session does not fit, and admission.overload is reject",
    "queue_full": "admission.max_waiting requests of new sessions wait already",
    "session_table_full": "ledger.max_sessions are busy, none is idle",
    "no_replica": "no replica is usable, and admission.overload is reject",
}
ADVICE: Final[dict[str, str]] = {
    "session_limit": "the policy's own limit of live sessions",
    "capacity": "the policy lets all in: what the KV memory holds of the expected footprint",
    "capacity_unknown": "no usable replica reports its KV capacity: a few sessions for each",
    "no_replica": "no replica is usable: one session of each class, which waits for one",
}
CLASS_ADVICE: Final[dict[str, str]] = {
    "learned": "residency and footprint of the class are learned",
    "prior": "none of its sessions has ended yet: they are assumed",
}
ENDED: Final[dict[str, str]] = {
    "finished": "the client said so",
    "expired": "idle for longer than its class's TTL",
    "evicted": "idle, and the session table was full",
    "single_request": "a request without a session, or the last one after a finish, is over",
    "abandoned": "it was never admitted and its last waiting request left",
}
