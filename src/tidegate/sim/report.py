"""A comparison as one HTML file that needs nothing else: a table, and for each policy its first run over time.

Plots are inline SVG. One colour a class or line, the same on every plot; the legend stands beside the title.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from tidegate.sim.compare import Row, Summary, summaries
from tidegate.sim.run import RunResult
from tidegate.sim.tables import number, percent
from tidegate.sim.timeline import Timeline

WIDTH, HEIGHT, MARGIN = 360, 170, 34
COLOURS = ("#3366cc", "#dc6900", "#109618", "#990099", "#b82e2e", "#0099c6", "#6633cc", "#767676")

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1200px;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}tr.best{font-weight:600}.raw{color:#999}
figure{display:inline-block;margin:0 .6em 1em 0}figcaption{font-size:12px}svg{background:#fafafa}
text{font-size:10px;fill:#666}.key{margin-left:.8em}
"""

Lines = Mapping[str, Sequence[float | None]]


def report(title: str, rows: Sequence[Row], runs: Sequence[RunResult], command: str = "") -> str:
    """`runs`: those with a timeline are plotted."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    if command:
        parts.append(f"<p><code>{html.escape(command)}</code></p>")
    parts.append(
        "<p>Contract rate: the smallest of completed sessions per minute / share over the classes. Efficiency: against "
        "the same run with unbounded KV. Mean over seeds, 95 % bootstrap interval. The raw rate ranks nothing.</p>"
    )
    groups: dict[tuple[str, int], list[Summary]] = {}
    for summary in summaries(rows):
        groups.setdefault((summary.scenario, summary.in_flight), []).append(summary)
    for (scenario, in_flight), group in groups.items():
        parts.append(f"<h2>{html.escape(scenario)}, {in_flight} sessions in flight</h2>")
        parts.append(_table(group))
        for run in runs:
            if run.timeline is not None and (run.scenario, run.in_flight) == (scenario, in_flight):
                parts.append(f"<h3>{html.escape(run.policy)}, seed {run.seed}</h3>")
                parts.extend(_plots(run, run.timeline))
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}<body>{body}</body></html>\n'


def _table(group: Sequence[Summary]) -> str:
    heads = ("policy", "contract /min", "interval", "efficiency", "hit %", "recomputed %", "TV pp", "preemptions",
             "hold p95 s", "raw /min")  # fmt: skip
    best = max(summary.contract_per_min.mean for summary in group)
    lines = ["<table><tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for summary in group:
        rate = summary.contract_per_min
        cells = (
            html.escape(summary.policy),
            f"{rate.mean:.1f}",
            f"{rate.low:.1f}..{rate.high:.1f}",
            number(summary.efficiency, ".2f"),
            percent(summary.hit_rate),
            percent(summary.recomputed_prompt_share),
            number(summary.tv_pp, ".1f"),
            number(summary.preemptions, ".0f"),
            number(summary.hold_p95_s, ".1f"),
        )
        style = ' class="best"' if rate.mean == best else ""
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f'<tr{style}>{row}<td class="raw">{summary.total_per_min:.1f}</td></tr>')
    return "".join(lines) + "</table>"


def _plots(run: RunResult, line: Timeline) -> Iterable[str]:
    at_s = line.at_s
    occupancy: Lines = {"ledger": line.ledger_share, "running requests": line.running_share}
    yield _plot("KV occupancy", at_s, occupancy, top=1.0)
    yield _plot("sessions", at_s, {"live": line.live, "held": line.held})
    yield _plot("hit rate", at_s, {"since the last point": line.hit_rate}, top=1.0)
    shares = {name: count[-1] if count else 0 for name, count in line.completed.items()}
    total = max(1, sum(shares.values()))
    yield _plot(
        "completed sessions", at_s, {f"{n} ({100 * shares[n] / total:.0f} %)": c for n, c in line.completed.items()}
    )
    yield _plot("KV footprint by class, tokens", at_s, line.footprint_tokens)


def _plot(title: str, at_s: Sequence[float], lines: Lines, *, top: float | None = None) -> str:
    values = [value for series in lines.values() for value in series if value is not None]
    high = max([*values, 1e-9]) if top is None else max(top, *values, 1e-9)
    end_s = at_s[-1] if at_s else 1.0
    keys: list[str] = []
    paths: list[str] = []
    for colour, (name, series) in zip(COLOURS, lines.items(), strict=False):
        keys.append(f'<span class="key" style="color:{colour}">{html.escape(name)}</span>')
        paths.extend(_polylines(at_s, series, end_s, high, colour))
    axes = (
        f'<line x1="{MARGIN}" y1="{HEIGHT - 18}" x2="{WIDTH}" y2="{HEIGHT - 18}" stroke="#bbb"/>'
        f'<text x="2" y="14">{_short(high)}</text><text x="2" y="{HEIGHT - 20}">0</text>'
        f'<text x="{WIDTH - 40}" y="{HEIGHT - 5}">{end_s:.0f} s</text>'
    )
    svg = f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{axes}{"".join(paths)}</svg>'
    return f"<figure>{svg}<figcaption>{html.escape(title)}{''.join(keys)}</figcaption></figure>"


def _polylines(
    at_s: Sequence[float], series: Sequence[float | None], end_s: float, high: float, colour: str
) -> Iterable[str]:
    """One for each stretch without a hole."""
    stretch: list[str] = []
    for x_s, value in zip((*at_s, end_s), (*series, None), strict=True):
        if value is not None:
            x = MARGIN + (WIDTH - MARGIN - 4) * x_s / end_s
            y = (HEIGHT - 18) - (HEIGHT - 28) * value / high
            stretch.append(f"{x:.1f},{y:.1f}")
        elif stretch:
            yield f'<polyline fill="none" stroke="{colour}" stroke-width="1.4" points="{" ".join(stretch)}"/>'
            stretch = []


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    return f"{value / 1e3:.0f}k" if value >= 10_000 else f"{value:.3g}"
