"""A replica's /metrics text as a reading of raw facts.

A series that is absent is None, never 0: engines rename their metrics, and a renamed gauge read as 0 looks like an
idle replica. Nor is a number that is too large to be one. Only lines of wanted names reach the parser: an engine
exposes some 800 samples, of which 20 are read, and parsing them all takes 20 ms of the event loop's time.

Several engines behind one URL (data parallelism) carry an `engine` or `dp_rank` label and add up. Ranks of one engine
(tensor, pipeline and expert parallelism, and processes) repeat the same numbers, so the largest of them counts.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import Final

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

LARGEST: Final = 2.0**53  # beyond it a float no longer counts
_LARGEST_DIGITS: Final = 15  # of a number below it
_ENGINE_LABELS = ("engine", "dp_rank")
_RANK_LABELS = ("tp_rank", "pp_rank", "moe_ep_rank", "pid")


class Reading(Struct, frozen=True, kw_only=True):
    """What one scrape said, over all engines behind the URL. Totals are cumulative since the engine started."""

    kv_capacity_tokens: int | None = None
    kv_used_fraction: float | None = None
    running: int | None = None
    waiting: int | None = None
    prompt_tokens_total: int | None = None
    cached_tokens_total: int | None = None
    generation_tokens_total: int | None = None
    preemptions_total: int | None = None
    sleeping: bool | None = None
    started_at_s: float | None = None  # Unix time


class Sample(Struct, frozen=True):
    labels: dict[str, str]
    value: float

    def engine(self) -> str:
        return next((self.labels[name] for name in _ENGINE_LABELS if name in self.labels), "")

    def rank(self) -> tuple[str, ...]:
        return tuple(self.labels.get(name, "") for name in _RANK_LABELS)


class Samples:
    """The wanted samples of one scrape, by name."""

    def __init__(self, by_name: dict[str, list[Sample]]) -> None:
        self._by_name = by_name

    def __getitem__(self, name: str) -> list[Sample]:
        return self._by_name.get(name, [])

    def __len__(self) -> int:
        return len(self._by_name)

    def by_engine(self, *names: str) -> dict[str, float] | None:
        """Each engine's value of the first of `names` that is there; None if none is."""
        samples = next((self._by_name[name] for name in names if name in self._by_name), None)
        if samples is None:
            return None
        sums: dict[tuple[str, tuple[str, ...]], float] = {}
        for sample in samples:
            key = (sample.engine(), sample.rank())
            sums[key] = sums.get(key, 0.0) + sample.value
        engines: dict[str, float] = {}
        for (engine, _), value in sums.items():
            engines[engine] = max(engines.get(engine, value), value)
        return engines

    def total(self, *names: str) -> int | None:
        engines = self.by_engine(*names)
        return None if engines is None else round(sum(engines.values()))

    def mean(self, *names: str) -> float | None:
        """Over engines: they are replicas of one model with KV caches of one size."""
        engines = self.by_engine(*names)
        return None if not engines else sum(engines.values()) / len(engines)

    def latest(self, name: str) -> float | None:
        return max((sample.value for sample in self[name]), default=None)


def parse(text: str, wanted: Collection[str]) -> Samples:
    """The samples named in `wanted`; ValueError when their lines are not of the exposition format."""
    by_name: dict[str, list[Sample]] = {}
    for line in _wanted_lines(text, wanted):
        for name, sample in _parse_line(line):
            by_name.setdefault(name, []).append(sample)
    return Samples(by_name)


@functools.lru_cache(maxsize=4096)
def _parse_line(line: str) -> tuple[tuple[str, Sample], ...]:
    """Half of the lines are as they were a second ago, among them the one with 45 labels."""
    return tuple(
        (sample.name, Sample(dict(sample.labels), float(sample.value)))
        for family in text_string_to_metric_families(line)
        for sample in family.samples
        if abs(sample.value) <= LARGEST  # NaN is not
    )


def _wanted_lines(text: str, wanted: Collection[str]) -> Iterator[str]:
    names = frozenset(wanted)
    prefixes = tuple(names)
    for line in text.splitlines():
        if line.startswith(prefixes) and line.partition("{")[0].partition(" ")[0] in names:
            yield line


def whole(text: str) -> int | None:
    """The number that a label or a port says; None if it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _LARGEST_DIGITS else None


def counter(name: str) -> tuple[str, str]:
    """The names a counter may have: clients of the Prometheus format differ on the _total suffix."""
    return f"{name}_total", name
