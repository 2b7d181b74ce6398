"""Expected occupancy: constraint (3), sum over admitted sessions of k~_s <= C_w, looked at ahead of time.

A sum of present footprints over-admits a young synchronised cohort, a sum of peaks wastes half of the memory. So k~ is
a forecast: at each of a few horizons h, a session of class b that holds k now is expected to

    have grown by   g = growth rate of the class * h
    be there still  p = S_b(k + g - turn) / S_b(k)   by the sizes at which sessions end (sizes.py); what its last turn
                                                     adds is held until that turn ends
    hold, if so     k + g
    vary by         p (1 - p) (k + g)^2 + p g turn   it may have left; growth comes in turns at random times (in one
                                                     step, where turns are not known)

and a new session is admitted if, at EVERY horizon, mean + z * deviation of the replica's sum, the newcomer included,
fits in the protected capacity. A desynchronised pool fills to its average plus a margin that shrinks with the number of
sessions; a young cohort is limited by what it will hold when it is grown. When all sessions slow down alike, p and g
keep their relation and the worst horizon is the same: only relative growth rates matter.

A request that runs without reporting progress grows all the same: its session's footprint is taken as growing at the
class's rate since it was last heard of. Doubt about a class (few of its sessions have ended) blends p with 1 and g with
the growth to the conservative prior footprint; a client's expected_tokens replaces g.

Horizons are fractions of the longest class's time to grow up. The sums of a replica are rebuilt from its sessions by
class and size, a bounded number of sessions a step, and kept up to date in between by adding newcomers and subtracting
leavers.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

from tidegate.policy.entities import ClassLedger, Replica, Session
from tidegate.policy.ledger import Ledger
from tidegate.policy.params import OccupancyParams
from tidegate.policy.sizes import BINS, Sizes, size_bin

# of the longest growth: dense, because a cohort's peak is sharp; later, most have left
HORIZONS = (0.0, 0.05, 0.1, 0.15, 0.22, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
POINTS: Final = 13
PARTS: Final = HORIZONS[1:]


class Load:
    """Mean and variance of tokens held, at each horizon."""

    __slots__ = ("mean", "peak_tokens", "var")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.mean = [0.0] * POINTS
        self.var = [0.0] * POINTS
        self.peak_tokens = 0.0  # the largest mean

    def sum_up(self) -> None:
        self.peak_tokens = max(self.mean)


class ClassForecast:
    """How sessions of one class go on, as of the last control step."""

    __slots__ = ("_sizes", "doubt", "gone", "growth", "rate", "turn_tokens")

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self.growth = [0.0] * POINTS  # g at each horizon
        self.gone = [0.0] * (POINTS - 1)  # what has to be outgrown to be there still, at each but the first
        self.rate = 0.0  # tokens/s
        self.turn_tokens = 0.0
        self.doubt = 1.0

    def add(self, load: Load, sessions: float, tokens: float, squares: float, prior_tokens: float) -> None:
        """Add sessions of one size that hold `tokens` together, `squares` the sum of their squares."""
        doubt, turn_tokens = self.doubt, self.turn_tokens
        sure = 1.0 - doubt
        each = tokens / sessions
        lacking = doubt * max(0.0, prior_tokens - each)
        now, *then = self._sizes.survivals(each, self.gone)
        mean, var = load.mean, load.var
        mean[0] += tokens
        for m, (part, growth, survival) in enumerate(zip(PARTS, self.growth[1:], then, strict=True), start=1):
            p = sure * (survival / now) + doubt
            learned = sure * growth
            grown = learned + lacking * part
            mean[m] += p * (tokens + sessions * grown)
            spread = squares + grown * (2.0 * tokens + sessions * grown)
            step = min(learned, turn_tokens) if turn_tokens else learned
            var[m] += p * (1.0 - p) * spread + p * sessions * learned * step

    def add_expected(self, load: Load, tokens: float, expected: float) -> None:
        """One session whose client said what it will hold in the end."""
        for m in range(POINTS):
            grown = max(0.0, expected - tokens) * HORIZONS[m]
            load.mean[m] += tokens + grown


class Forecast:
    def __init__(self, ledger: Ledger, params: OccupancyParams, prior_tokens: float) -> None:
        self._ledger = ledger
        self._params = params
        self.prior_tokens = prior_tokens
        self._classes: list[ClassForecast] = []
        self._loads: list[Load] = []
        self._next_slot = 0

    def capacity(self, replica: Replica) -> float:
        """C_w: the part of its KV that sessions may be expected to hold."""
        return (replica.capacity_tokens or 0) * self._params.protected_fraction

    def of(self, replica: Replica) -> Load:
        while len(self._loads) <= replica.slot:
            self._loads.append(Load())
        return self._loads[replica.slot]

    def _class(self, klass: ClassLedger) -> ClassForecast:
        while len(self._classes) <= klass.index:
            sizes = self._ledger.classes[len(self._classes)].profile.sizes
            self._classes.append(ClassForecast(sizes))
        return self._classes[klass.index]

    # --- a decision --------------------------------------------------------------------------------------------
    def newcomer(self, session: Session, prompt_tokens: int) -> Load:
        added = Load()
        tokens = float(max(1, prompt_tokens))
        if session.expected_tokens is not None:
            self._class(session.klass).add_expected(added, tokens, float(session.expected_tokens))
        else:
            self._class(session.klass).add(added, 1.0, tokens, tokens * tokens, self.prior_tokens)
        return added

    def needed(self, replica: Replica, added: Load) -> float:
        """Tokens that the replica must be able to hold for the newcomer to fit: the worst horizon."""
        load = self.of(replica)
        z = self._params.deviations
        worst = float(replica.tokens) + added.mean[0]
        mean, var = load.mean, load.var
        for m in range(POINTS):
            need = mean[m] + added.mean[m] + z * sqrt(max(0.0, var[m] + added.var[m]))
            if need > worst:
                worst = need
        return worst

    def admitted(self, replica: Replica, added: Load) -> None:
        load = self.of(replica)
        for m in range(POINTS):
            load.mean[m] += added.mean[m]
            load.var[m] += added.var[m]
        load.sum_up()

    def left(self, replica: Replica) -> None:
        """A session of the replica ended: a small one is gone through again, a large one loses an average session."""
        if len(replica.live) <= self._params.exact_sessions:
            self.rebuild(replica)
            return
        load = self.of(replica)
        keep = 1.0 - 1.0 / (len(replica.live) + 1)
        for m in range(POINTS):
            load.mean[m] *= keep
            load.var[m] *= keep
        load.sum_up()

    # --- the control step --------------------------------------------------------------------------------------
    def step(self) -> None:
        classes = self._ledger.classes
        wanted = [klass for klass in classes if klass.demand] or classes
        longest_s = max((klass.profile.growing_s for klass in wanted), default=0.0)
        for klass in classes:
            table = self._class(klass)
            table.doubt = klass.profile.doubt
            table.rate = klass.profile.growth_per_s
            table.turn_tokens = klass.profile.turn_tokens
            table.growth = [table.rate * part * longest_s for part in HORIZONS]
            table.gone = [max(0.0, growth - table.turn_tokens) for growth in table.growth[1:]]
        self._rebuild_replicas()

    def _rebuild_replicas(self) -> None:
        slots = self._ledger.slots
        left = self._params.sessions_per_step
        for _ in range(len(slots)):
            slot = self._next_slot % len(slots)
            self._next_slot = slot + 1
            replica = slots[slot]
            if replica is None:
                continue
            self.rebuild(replica)
            left -= len(replica.live) + 1
            if left <= 0:
                return

    def rebuild(self, replica: Replica) -> None:
        load = self.of(replica)
        load.clear()
        cells: dict[int, list[float]] = {}
        now_r = self._ledger.now_r
        for session in replica.live:
            klass = session.klass
            table = self._class(klass)
            tokens = float(session.tokens or 1)
            if session.running:
                tokens += table.rate * (now_r - session.heard_r)
            if session.expected_tokens is not None:
                table.add_expected(load, tokens, session.expected_tokens)
                continue
            key = klass.index * BINS + size_bin(tokens)
            cell = cells.get(key)
            if cell is None:
                cell = cells[key] = [0.0, 0.0, 0.0]
            cell[0] += 1.0
            cell[1] += tokens
            cell[2] += tokens * tokens
        for key, (sessions, held, squares) in cells.items():
            self._classes[key // BINS].add(load, sessions, held, squares, self.prior_tokens)
        load.sum_up()
