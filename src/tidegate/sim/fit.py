"""The constants of a latency model from measurements of a live engine, by least squares.

Two kinds of measurement, each the fastest of its repeats, since what disturbs a machine only ever slows it:
- a cold prompt of P tokens with one token generated takes ceil(P / budget) step_s + prefill_token_s P +
  attention_pair_s P^2 / 2, and a constant of the request itself (the wire, tokenisation), which is left out;
- D sequences at a context of K / D tokens each take, for one more token each, step_s + decode_seq_s D + kv_token_s K.

The step's own cost is taken from the second kind. No constant is negative: a term that would be is left out.
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


class Decode(msgspec.Struct, frozen=True):
    sequences: int
    context_tokens: int  # of all sequences together, on average over the measurement
    step_seconds: float


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    latency: LatencyModel
    request_s: float  # constant of a request
    prefill_error: float  # root mean square of the relative errors
    decode_error: float
    prefills: list[Prefill]
    decodes: list[Decode]


def fit(prefills: Sequence[Prefill], decodes: Sequence[Decode], *, budget_tokens: int = 2048) -> Fit:
    step_s, sequence_s, kv_s = _least_squares(
        [[1.0, float(d.sequences), float(d.context_tokens)] for d in decodes], [d.step_seconds for d in decodes]
    )
    steps = [-(-p.prompt_tokens // budget_tokens) for p in prefills]
    rest_s = [p.seconds - count * step_s for p, count in zip(prefills, steps, strict=True)]
    request_s, token_s, pair_s = _least_squares(
        [[1.0, float(p.prompt_tokens), p.prompt_tokens**2 / 2] for p in prefills], rest_s
    )
    latency = LatencyModel(
        step_s=step_s, prefill_token_s=token_s, attention_pair_s=pair_s, decode_seq_s=sequence_s, kv_token_s=kv_s
    )
    told = [
        request_s + count * step_s + token_s * p.prompt_tokens + pair_s * p.prompt_tokens**2 / 2
        for p, count in zip(prefills, steps, strict=True)
    ]
    stepped = [latency.step_time_s(0, 0.0, d.sequences, d.context_tokens) for d in decodes]
    return Fit(
        latency=latency,
        request_s=request_s,
        prefill_error=_error(told, [p.seconds for p in prefills]),
        decode_error=_error(stepped, [d.step_seconds for d in decodes]),
        prefills=list(prefills),
        decodes=list(decodes),
    )


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Of relative errors, with no negative constant: terms that would be are dropped, the most negative first."""
    if len(rows) < len(rows[0]):
        raise ConfigError(f"{len(rows)} measurements do not give {len(rows[0])} constants", reason="unfit")
    if min(values) <= 0:
        values = [max(value, 1e-9) for value in values]
    scaled = [[x / value for x in row] for row, value in zip(rows, values, strict=True)]
    kept = list(range(len(rows[0])))
    while True:
        solved = _solve(scaled, kept)
        worst = min(range(len(kept)), key=lambda i: solved[i] * max(row[kept[i]] for row in scaled))
        if solved[worst] >= 0.0 or len(kept) == 1:
            break
        del kept[worst]
    constants = [0.0] * len(rows[0])
    for index, value in zip(kept, solved, strict=True):
        constants[index] = max(0.0, value)
    return constants


def _solve(rows: Sequence[Sequence[float]], columns: Sequence[int]) -> list[float]:
    """Normal equations for a right-hand side of ones, columns scaled to one size, by Gauss with pivoting."""
    sizes = [max(abs(row[c]) for row in rows) or 1.0 for c in columns]
    n = len(columns)
    table = [
        [sum(row[a] * row[b] for row in rows) / sizes[i] / sizes[j] for j, b in enumerate(columns)]
        + [sum(row[a] for row in rows) / sizes[i]]
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
    return sqrt(sum((t / s - 1) ** 2 for t, s in zip(told, seen, strict=True)) / len(seen))
