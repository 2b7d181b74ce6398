"""The decision core: pure, deterministic, without I/O, clock or randomness of its own.

`policies()` names every policy in the order of the contract; a new one is a module and a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tidegate.policy.base import Policy
from tidegate.policy.baselines.adaptive_cap import AdaptiveCap
from tidegate.policy.baselines.aimd import Aimd
from tidegate.policy.baselines.cache_aware import CacheAware
from tidegate.policy.baselines.consistent_hash import ConsistentHash
from tidegate.policy.baselines.least_requests import LeastRequests
from tidegate.policy.baselines.program import Program
from tidegate.policy.baselines.random_choice import PowerOfTwo, Random
from tidegate.policy.baselines.round_robin import RoundRobin
from tidegate.policy.baselines.static_cap import StaticCap
from tidegate.policy.baselines.sticky_least_loaded import StickyLeastLoaded
from tidegate.policy.ledger import Ledger
from tidegate.policy.misa import Misa, MisaT
from tidegate.policy.params import CoreParams
from tidegate.policy.session_admission import SessionAdmission
from tidegate.policy.working_set import WorkingSetPolicy

PolicyFactory: TypeAlias = Callable[[Ledger, CoreParams, int], Policy]


def policies() -> dict[str, PolicyFactory]:
    return {
        "round_robin": RoundRobin,
        "random": Random,
        "power_of_two": PowerOfTwo,
        "least_requests": LeastRequests,
        "consistent_hash": ConsistentHash,
        "cache_aware": CacheAware,
        "sticky_least_loaded": StickyLeastLoaded,
        "static_cap": StaticCap,
        "session_admission": SessionAdmission,
        "misa": Misa,
        "misa_t": MisaT,
        "aimd": Aimd,
        "program": Program,
        "adaptive_cap": AdaptiveCap,
        "working_set": WorkingSetPolicy,
    }
