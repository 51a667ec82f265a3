"""A report's pictures, as PNG in memory: nothing is written before everything could be drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from remanence.report.comparisons import Compared, Measured, label
from remanence.report.rows import Row, Run

OURS = ("#1b6ca8", "#e07a1f", "#3a8f5c", "#8a4f9e", "#b3322e", "#4fb0ae")
THEIRS = "#9a9a9a"
Points = list[tuple[float, float]]
Lines = dict[str, Points]


def losses(runs: Sequence[Run]) -> bytes:
    """Every run's loss by the tokens it had read."""
    lines: Lines = {}
    for run in runs:
        logged = [line for line in run.lines if isinstance(line.get("loss"), (int, float))]
        lines[_unused(run.name, lines)] = [(line["tokens"], line["loss"]) for line in logged]
    return _drawn({"": ({}, lines)}, x="tokens read", y="loss", ticks=None)


def positions(rows: Sequence[Row]) -> bytes | None:
    """Loss by position, which ``lm`` measures; None without such rows."""
    lines: Lines = {}
    for row in rows:
        start = row.setting.get("from")
        if row.metric == "loss by position" and isfinite(row.value) and isinstance(start, int):
            lines.setdefault(row.subject, []).append((max(1, start), row.value))
    if not lines:
        return None
    ours = {name: sorted(points) for name, points in lines.items()}
    return _drawn({"": ({}, ours)}, x="tokens read before", y="loss, nats per token", ticks=[])


def lengths(found: Compared) -> bytes | None:
    """A comparison whose columns are lengths; None if they are something else.

    The paper's lines are grey. Where rows share a cell, their mean is drawn.
    """
    columns = found.lengths
    if columns is None:
        return None
    titans = {}
    for name, cells in found.paper.lines.items():
        if _shown(name):
            titans[name] = dict(zip(found.paper.columns, cells, strict=True))
    panels = {}
    for panel in dict.fromkeys(columns[column][0] for column in found.paper.columns):
        inside = {column: tokens for column, (kind, tokens) in columns.items() if kind == panel}
        theirs = {f"{name} (paper)": _points(cells, inside) for name, cells in titans.items()}
        ours = {
            name: _points({column: _mean(values) for column, values in cells.items()}, inside)
            for name, cells in found.ours.items()
        }
        panels[panel] = ({n: p for n, p in theirs.items() if p}, {n: p for n, p in ours.items() if p})
    y = "perplexity" if found.title.startswith("Depth") else "right answers, %"
    return _drawn(panels, x="tokens", y=y, ticks=sorted({tokens for _, tokens in columns.values()}))


def _mean(values: Sequence[Measured]) -> float | None:
    finite = [each.value for each in values if isfinite(each.value)]
    return sum(finite) / len(finite) if finite else None


def _shown(name: str) -> bool:
    return name.startswith(("Titans", "depth", "Mamba", "RMT"))


def _points(cells: Mapping[str, float | None], inside: Mapping[str, float]) -> Points:
    known = {column: value for column, value in cells.items() if value is not None}
    return sorted((inside[column], value) for column, value in known.items() if column in inside)


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    return name if name not in taken else next(n for i in range(2, 9999) if (n := f"{name} {i}") not in taken)


Panels = Mapping[str, tuple[Lines, Lines]]


def _drawn(panels: Panels, *, x: str, y: str, ticks: Sequence[float] | None) -> bytes:
    """Panels side by side: the paper's lines in grey, ours in colour. The axis is logarithmic if `ticks` are given."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    options: dict[str, Any] = {"layout": "constrained", "squeeze": False, "sharey": True}
    figure, axes = plt.subplots(1, len(panels), figsize=(max(8, 4 * len(panels) + 1), 4.2), **options)
    greys = list(dict.fromkeys(name for theirs, _ in panels.values() for name in theirs))
    colours = list(dict.fromkeys(name for _, ours in panels.values() for name in ours))
    shown = {}
    for axis, (title, (theirs, ours)) in zip(axes[0], panels.items(), strict=True):
        for name, line in theirs.items():
            grey: dict[str, Any] = {"color": THEIRS, "linewidth": 1, "markersize": 4}
            mark = "osv^Dx+*"[greys.index(name) % 8]
            (shown[name],) = axis.plot(*zip(*line, strict=True), f"{mark}--", label=name, **grey)
        for name, line in ours.items():
            colour = OURS[colours.index(name) % len(OURS)]
            mark = "o-" if ticks is not None else "-"
            (shown[name],) = axis.plot(*zip(*line, strict=True), mark, color=colour, linewidth=2, label=name)
            shown[name].set_markersize(4)
        if ticks is not None:
            axis.set_xscale("log", base=2)
        if ticks:
            axis.set_xticks(ticks, [label(tick) for tick in ticks], fontsize=8, rotation=45)
            axis.minorticks_off()
        axis.set(xlabel=x, title=title)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(y)
    handles = [shown[name] for name in (*colours, *greys)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    png = io.BytesIO()
    figure.savefig(png, dpi=110, format="png")
    plt.close(figure)
    return png.getvalue()
