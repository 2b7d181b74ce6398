"""The constants of a latency model from measurements of live engines, by least squares.

Three kinds of measurement, each the median of its repeats:
- D sequences at a context of K / D tokens each take, for one more token each, step_s + decode_seq_s D + kv_token_s K;
- a cold prompt of P tokens with one token generated takes ceil(P / budget) (step_s + prompt_s) + prefill_token_s P +
  attention_pair_s P^2 / 2, and what the request itself takes outside of the engine's steps, `request_s`: the wire,
  tokenisation, the engine's HTTP server. It is measured to be told from the rest, and left out of the model: an
  engine computes other sequences' steps meanwhile;
- R cold prompts of n tokens each that the engine takes in together take one step, step_s + prompt_s R +
  prefill_token_s R n + attention_pair_s R n^2 / 2.

The step's own cost is taken from the first kind. No constant is negative: a term that would be is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import msgspec

from tidegate.errors import ConfigError
from tidegate.sim.latency import LatencyModel


class Prefill(msgspec.Struct, frozen=True):
    prompt_tokens: int
    seconds: float


class Joined(msgspec.Struct, frozen=True):
    """Prompts computed in one step."""

    prompts: int
    prompt_tokens: int  # of each
    step_seconds: float


class Decode(msgspec.Struct, frozen=True):
    sequences: int
    context_tokens: int  # of all sequences together, on average over the measurement
    step_seconds: float


class Measurements(msgspec.Struct, frozen=True):
    prefills: list[Prefill]
    joined: list[Joined]
    decodes: list[Decode]


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    latency: LatencyModel
    request_s: float  # of a request outside of the engine's steps
    prefill_error: float  # root mean square of the relative errors
    joined_error: float
    decode_error: float
    engines: int = 1  # measured at once
    measurements: Measurements


def fit(seen: Measurements, *, budget_tokens: int = 2048, engines: int = 1) -> Fit:
    """`budget_tokens`: the engine's max_num_batched_tokens."""
    step_s, sequence_s, kv_s = _least_squares(
        [[1.0, float(d.sequences), float(d.context_tokens)] for d in seen.decodes],
        [d.step_seconds for d in seen.decodes],
        [d.step_seconds for d in seen.decodes],
    )
    chunks = [-(-p.prompt_tokens // budget_tokens) for p in seen.prefills]
    alone = [
        [1.0, float(count), float(p.prompt_tokens), p.prompt_tokens**2 / 2]
        for p, count in zip(seen.prefills, chunks, strict=True)
    ]
    together = [
        [0.0, float(j.prompts), float(j.prompts * j.prompt_tokens), j.prompts * j.prompt_tokens**2 / 2]
        for j in seen.joined
    ]
    taken_s = [p.seconds for p in seen.prefills] + [j.step_seconds for j in seen.joined]
    steps = chunks + [1] * len(seen.joined)
    request_s, prompt_s, token_s, pair_s = _least_squares(
        alone + together, [taken - count * step_s for taken, count in zip(taken_s, steps, strict=True)], taken_s
    )
    latency = LatencyModel(
        step_s=step_s,
        prompt_s=prompt_s,
        prefill_token_s=token_s,
        attention_pair_s=pair_s,
        decode_seq_s=sequence_s,
        kv_token_s=kv_s,
    )
    constants = (request_s, prompt_s, token_s, pair_s)
    told_s = [
        count * step_s + sum(c * x for c, x in zip(constants, row, strict=True))
        for count, row in zip(steps, alone + together, strict=True)
    ]
    split = len(alone)
    stepped_s = [latency.step_time_s(0, 0.0, d.sequences, d.context_tokens) for d in seen.decodes]
    return Fit(
        latency=latency,
        request_s=request_s,
        prefill_error=_error(told_s[:split], taken_s[:split]),
        joined_error=_error(told_s[split:], taken_s[split:]),
        decode_error=_error(stepped_s, [d.step_seconds for d in seen.decodes]),
        engines=engines,
        measurements=seen,
    )


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Errors count in parts of `sizes`. No constant is negative: terms that would be are dropped, the worst first."""
    if len(rows) < len(rows[0]):
        raise ConfigError(f"{len(rows)} measurements do not give {len(rows[0])} constants", reason="unfit")
    scaled = [[x / size for x in row] for row, size in zip(rows, sizes, strict=True)]
    parts = [value / size for value, size in zip(values, sizes, strict=True)]
    kept = list(range(len(rows[0])))
    while True:
        solved = _solve(scaled, parts, kept)
        worst = min(range(len(kept)), key=lambda i: solved[i] * max(row[kept[i]] for row in scaled))
        if solved[worst] >= 0.0 or len(kept) == 1:
            break
        del kept[worst]
    constants = [0.0] * len(rows[0])
    for index, value in zip(kept, solved, strict=True):
        constants[index] = max(0.0, value)
    return constants


def _solve(rows: Sequence[Sequence[float]], values: Sequence[float], columns: Sequence[int]) -> list[float]:
    """Normal equations, columns scaled to one size, by Gauss with pivoting."""
    sizes = [max(abs(row[c]) for row in rows) or 1.0 for c in columns]
    n = len(columns)
    table = [
        [sum(row[a] * row[b] for row in rows) / sizes[i] / sizes[j] for j, b in enumerate(columns)]
        + [sum(row[a] * value for row, value in zip(rows, values, strict=True)) / sizes[i]]
        for i, a in enumerate(columns)
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(table[r][i]))
        table[i], table[pivot] = table[pivot], table[i]
        if abs(table[i][i]) < 1e-12:
            raise ConfigError("the measurements do not tell the constants apart", reason="unfit")
        for r in range(n):
            if r != i:
                factor = table[r][i] / table[i][i]
                table[r] = [x - factor * y for x, y in zip(table[r], table[i], strict=True)]
    return [table[i][n] / table[i][i] / sizes[i] for i in range(n)]


def _error(told: Sequence[float], seen: Sequence[float]) -> float:
    return sqrt(sum((t / s - 1) ** 2 for t, s in zip(told, seen, strict=True)) / len(seen)) if seen else 0.0
