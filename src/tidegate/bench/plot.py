"""The demo's plot: KV use, live and held sessions, and hit rate over model time, a line for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidegate.bench.demo import PolicyRun, Sample

# Okabe-Ito: told apart by colour-blind readers, and in print.
COLOURS = ("#D55E00", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#000000")
SMOOTH_SAMPLES = 8  # hit rate over this many samples: single ones jump with every prompt


def plot(runs: Sequence[PolicyRun], svg: Path, png: Path) -> None:
    """Needs matplotlib (the `plot` extra)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "tidegate"  # the same data, the same file
    figure, (kv, sessions, hits) = pyplot.subplots(3, 1, sharex=True, figsize=(9, 8), layout="constrained")
    lines = []
    for number, (run, colour) in enumerate(zip(runs, COLOURS, strict=False)):
        at_s = [sample.at_s for sample in run.samples]
        needed = [100 * sample.kv_used_tokens / max(1, sample.kv_capacity_tokens) for sample in run.samples]
        style = {"color": colour, "linewidth": max(1.2, 3.0 - number)}  # lines that coincide stay visible
        lines += kv.plot(at_s, needed, label=run.policy, **style)
        sessions.plot(at_s, [sample.live for sample in run.samples], **style)
        held = [sample.held for sample in run.samples]
        if any(held):
            sessions.plot(at_s, held, linestyle=":", **style)
        hits.plot(*hit_rates(run.samples), **style)
    kv.axhline(100, color="0.3", linewidth=1, linestyle="--")
    kv.set_ylabel("KV of live sessions,\n% of capacity")
    sessions.set_ylabel("sessions\n(solid: live, dotted: held)")
    hits.set_ylabel("prefix-cache hit rate, %")
    hits.set_ylim(0, 100)
    hits.set_xlabel("model time, s (grey: warm-up)")
    for axes in (kv, sessions, hits):
        _finish(axes, runs)
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), frameon=False)
    figure.savefig(svg, metadata={"Date": None})
    figure.savefig(png, dpi=130)
    pyplot.close(figure)


def hit_rates(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """(time, %) over a sliding span of samples, where any prompt was answered in it."""
    at_s: list[float] = []
    rates: list[float] = []
    for before, after in zip(samples, samples[SMOOTH_SAMPLES:], strict=False):
        prompts = after.prompt_tokens - before.prompt_tokens
        if prompts > 0:
            at_s.append(after.at_s)
            rates.append(100 * (after.cached_tokens - before.cached_tokens) / prompts)
    return at_s, rates


def _finish(axes: Any, runs: Sequence[PolicyRun]) -> None:
    axes.set_ylim(bottom=0)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.axvspan(0, max((run.warmup_model_s for run in runs), default=0), color="0.95", zorder=0)
