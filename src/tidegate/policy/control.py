"""The control step: what is recomputed once a tick for every policy, so that /state shows it whatever the policy.

At most `CLASSES_PER_STEP` classes a step: with more, each one's turn comes every few seconds, and the step stays short.
"""

from __future__ import annotations

from math import exp, inf
from typing import Final

from tidegate.policy.ledger import Ledger

CLASSES_PER_STEP: Final = 16  # about 0.1 ms each
MIXTURE_WINDOW_S: Final = 600.0  # the learned mixture is that of the last minutes: several batches of rollouts


def control_step(ledger: Ledger) -> None:
    for replica in ledger.replicas.values():
        replica.signals.fade(ledger.now_s)
    ledger.largest_tokens = _largest_tokens(ledger)
    classes = ledger.classes
    if not classes:
        return
    keep = exp(-max(0.0, ledger.now_s - ledger.stepped_s) / MIXTURE_WINDOW_S)
    ledger.stepped_s = ledger.now_s
    for klass in classes:
        klass.recent *= keep
    pooled_s = _pooled_residency_s(ledger)
    prior_tokens = prior_footprint_tokens(ledger)
    weight = ledger.params.estimators.prior_sessions
    for _ in range(min(CLASSES_PER_STEP, len(classes))):
        ledger.next_step = (ledger.next_step + 1) % len(classes)
        profile = classes[ledger.next_step].profile
        profile.advance(ledger.now_r)
        ends = sum(profile.ends)
        profile.solve((profile.lived_s + weight * pooled_s) / (ends + weight), prior_tokens)


def _largest_tokens(ledger: Ledger) -> float:
    """What a prompt may be estimated at. One that no replica could hold is refused by the engine at once, or its
    estimate is wrong, since it is made from bytes, and an image in them is few tokens: waiting for room would help
    neither, and keep others waiting behind it."""
    known = [replica.capacity_tokens for replica in ledger.replicas.values() if not replica.removed]
    return max((inf if tokens is None else float(tokens) for tokens in known), default=inf)


def _pooled_residency_s(ledger: Ledger) -> float:
    """The shared neutral prior, and what sessions of other classes have taught since."""
    params = ledger.params.estimators
    lived_s, ends = params.residency_prior_s * params.prior_sessions, params.prior_sessions
    for klass in ledger.classes:
        lived_s += klass.profile.lived_s
        ends += sum(klass.profile.ends)
    return lived_s / ends


def prior_footprint_tokens(ledger: Ledger) -> float:
    params = ledger.params.estimators
    known = [r.capacity_tokens for r in ledger.replicas.values() if r.capacity_tokens and not r.removed]
    if not known:
        return float(params.footprint_prior_tokens)
    return min(float(params.footprint_prior_tokens), params.footprint_prior_fraction * sum(known) / len(known))
