"""Expected occupancy: constraint (3), sum over admitted sessions of k~_s <= C_w, looked at ahead of time.

A sum of present footprints over-admits a young synchronised cohort, a sum of peaks wastes half of the memory. So k~ is
a forecast: at each of a few horizons h, a session of age a that holds k now is expected to

    be there still         p = S(a + h) / S(a)                        by its class's actuarial table
    hold, if so            k + g,  g = k(a + h) - k(a)                 growth of sessions of that age
    vary by                p (1 - p) (k + g)^2 + p g^2                 it may have left; growth is as uncertain as large

and a new session is admitted if, at EVERY horizon, mean + z * deviation of the replica's sum, the newcomer included,
fits in the protected capacity. A desynchronised pool fills to its average plus a margin that shrinks with the number of
sessions; a young cohort is limited by what it will hold when it is grown. Doubt about a class (few sessions observed)
blends g with the growth to the conservative prior footprint; a client's own expected_tokens replaces it.

Horizons are fractions of the longest class residency. The sums of a replica are rebuilt from its sessions by age bin, a
bounded number of sessions a step, and kept up to date in between by adding newcomers and subtracting leavers.
"""

from __future__ import annotations

from math import exp, sqrt
from typing import Final

from tidegate.policy.entities import ClassLedger, Replica, Session
from tidegate.policy.estimators import BINS, EDGES_S, MIDS_S, Profile
from tidegate.policy.ledger import Ledger
from tidegate.policy.params import OccupancyParams

HORIZONS: Final = (0.0, 0.0625, 0.125, 0.25, 0.5, 1.0)  # of the longest residency; later, most have left
POINTS: Final = len(HORIZONS)


class Curve:
    """Survival and holding of a class as functions of age."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        total, self._hazards = 0.0, [0.0] * BINS  # cumulative, to the start of each bin
        for j in range(1, BINS):
            total += profile.hazard[j - 1] * (EDGES_S[j] - EDGES_S[j - 1])
            self._hazards[j] = total

    def hazard_to(self, age_s: float, j: int) -> tuple[float, int]:
        """Cumulative hazard at an age; `j` is a bin at or before it, to search from."""
        while j + 1 < BINS and EDGES_S[j + 1] <= age_s:
            j += 1
        return self._hazards[j] + self._profile.hazard[j] * (age_s - EDGES_S[j]), j

    def holding_at(self, age_s: float, j: int) -> float:
        holding = self._profile.holding
        if age_s < MIDS_S[j]:
            j -= 1
        if j < 0:
            return holding[0]
        if j + 1 >= BINS:
            return holding[-1]
        part = (age_s - MIDS_S[j]) / (MIDS_S[j + 1] - MIDS_S[j])
        return holding[j] + part * (holding[j + 1] - holding[j])


class ClassForecast:
    """p and g of one class by age bin and horizon, as of the last control step."""

    __slots__ = ("doubt", "growth", "prior_tokens", "ramp", "stay")

    def __init__(self) -> None:
        self.stay = [[1.0] * POINTS for _ in range(BINS)]
        self.growth = [[0.0] * POINTS for _ in range(BINS)]
        self.ramp = [0.0] * POINTS  # part of a residency that has passed at each horizon
        self.doubt = 1.0
        self.prior_tokens = 0.0

    def rebuild(self, profile: Profile, horizons_s: list[float], prior_tokens: float) -> None:
        curve = Curve(profile)
        self.doubt = profile.doubt
        self.prior_tokens = prior_tokens
        self.ramp = [min(1.0, h / profile.residency_s) for h in horizons_s]
        for j in range(BINS):
            age_s = MIDS_S[j] if j else 0.0
            base, _ = curve.hazard_to(age_s, j)
            held = curve.holding_at(age_s, j)
            at = j
            stay, growth = self.stay[j], self.growth[j]
            for m in range(1, POINTS):
                later_s = age_s + horizons_s[m]
                hazard, at = curve.hazard_to(later_s, at)
                stay[m] = exp(base - hazard)
                growth[m] = max(0.0, curve.holding_at(later_s, at) - held)

    def add(self, mean: list[float], var: list[float], j: int, sessions: float, tokens: float, squares: float) -> None:
        """Add `sessions` of age bin j that hold `tokens` together, `squares` the sum of their squares."""
        doubt = self.doubt
        lacking = doubt * max(0.0, self.prior_tokens * sessions - tokens)
        stay, growth, ramp = self.stay[j], self.growth[j], self.ramp
        count = sessions or 1.0
        for m in range(POINTS):
            p = stay[m]
            grown = (1.0 - doubt) * growth[m] * sessions + lacking * ramp[m]
            each = grown / count
            mean[m] += p * (tokens + grown)
            var[m] += p * (1.0 - p) * (squares + each * (2.0 * tokens + grown)) + p * grown * each

    def add_expected(self, mean: list[float], var: list[float], j: int, tokens: float, expected: float) -> None:
        """As `add`, for one session whose client said what it will hold in the end."""
        stay, ramp = self.stay[j], self.ramp
        for m in range(POINTS):
            p = stay[m]
            grown = max(0.0, expected - tokens) * ramp[m]
            mean[m] += p * (tokens + grown)
            var[m] += p * (1.0 - p) * (tokens + grown) ** 2 + p * grown * grown


class ReplicaForecast:
    __slots__ = ("mean", "var")

    def __init__(self) -> None:
        self.mean = [0.0] * POINTS
        self.var = [0.0] * POINTS

    @property
    def peak_tokens(self) -> float:
        return max(self.mean)


class Forecast:
    def __init__(self, ledger: Ledger, params: OccupancyParams) -> None:
        self._ledger = ledger
        self._params = params
        self._classes: list[ClassForecast] = []
        self._replicas: list[ReplicaForecast] = []
        self._next_slot = 0

    def capacity(self, replica: Replica) -> float:
        """C_w: the part of its KV that sessions may be expected to hold."""
        return (replica.capacity_tokens or 0) * self._params.protected_fraction

    def of(self, replica: Replica) -> ReplicaForecast:
        while len(self._replicas) <= replica.slot:
            self._replicas.append(ReplicaForecast())
        return self._replicas[replica.slot]

    def _class(self, klass: ClassLedger) -> ClassForecast:
        while len(self._classes) <= klass.index:
            self._classes.append(ClassForecast())
        return self._classes[klass.index]

    # --- a decision --------------------------------------------------------------------------------------------
    def newcomer(self, session: Session, prompt_tokens: int, prior_tokens: float) -> ReplicaForecast:
        added = ReplicaForecast()
        table = self._class(session.klass)
        table.prior_tokens = prior_tokens
        tokens = float(prompt_tokens)
        if session.expected_tokens is not None:
            table.add_expected(added.mean, added.var, 0, tokens, float(session.expected_tokens))
        else:
            table.add(added.mean, added.var, 0, 1.0, tokens, tokens * tokens)
        return added

    def needed(self, replica: Replica, added: ReplicaForecast) -> float:
        """Tokens that the replica must be able to hold for the newcomer to fit: the worst horizon."""
        forecast = self.of(replica)
        z = self._params.deviations
        worst = float(replica.tokens) + added.mean[0]
        mean, var = forecast.mean, forecast.var
        for m in range(1, POINTS):
            need = mean[m] + added.mean[m] + z * sqrt(max(0.0, var[m] + added.var[m]))
            if need > worst:
                worst = need
        return worst

    def admitted(self, replica: Replica, added: ReplicaForecast) -> None:
        forecast = self.of(replica)
        for m in range(POINTS):
            forecast.mean[m] += added.mean[m]
            forecast.var[m] += added.var[m]

    # --- the control step --------------------------------------------------------------------------------------
    def step(self, prior_tokens: float) -> None:
        classes = [klass for klass in self._ledger.classes if klass.demand]
        longest_s = max((klass.profile.residency_s for klass in classes), default=0.0)
        horizons_s = [part * longest_s for part in HORIZONS]
        for klass in classes:
            self._class(klass).rebuild(klass.profile, horizons_s, prior_tokens)
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
        forecast = self.of(replica)
        forecast.mean = mean = [0.0] * POINTS
        forecast.var = var = [0.0] * POINTS
        cells: dict[int, list[float]] = {}
        for session in replica.live:
            cohort = session.cohort
            j = 0 if cohort is None else cohort.bin
            index, tokens = session.klass.index, session.tokens
            if session.expected_tokens is not None:
                self._class(session.klass).add_expected(mean, var, j, tokens, session.expected_tokens)
                continue
            cell = cells.get(index * BINS + j)
            if cell is None:
                cell = cells[index * BINS + j] = [0.0, 0.0, 0.0]
            cell[0] += 1.0
            cell[1] += tokens
            cell[2] += tokens * tokens
        for key, (sessions, held, squares) in cells.items():
            index, j = divmod(key, BINS)
            self._class(self._ledger.classes[index]).add(mean, var, j, sessions, held, squares)

    def left(self, replica: Replica) -> None:
        """A session of the replica ended: a small one is gone through again, a large one loses an average session."""
        if len(replica.live) <= self._params.exact_sessions:
            self.rebuild(replica)
            return
        forecast = self.of(replica)
        sessions = len(replica.live) + 1
        keep = 1.0 - 1.0 / sessions
        for m in range(POINTS):
            forecast.mean[m] *= keep
            forecast.var[m] *= keep
