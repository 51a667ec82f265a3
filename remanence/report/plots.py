"""A report's pictures, as PNG in memory: nothing is written before everything could be drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from remanence.report.comparisons import Beside, Measured, label
from remanence.report.rows import Row, Run

OURS = ("#1b6ca8", "#e07a1f", "#3a8f5c", "#8a4f9e", "#b3322e", "#4fb0ae")
THEIRS = "#9a9a9a"
Points = list[tuple[float, float]]
Lines = dict[str, Points]


def losses(runs: Sequence[Run]) -> bytes:
    """Every run's loss by the tokens it had read."""
    lines: Lines = {}
    for run in runs:
        points = [(line["tokens"], line["loss"]) for line in run.lines if isinstance(line.get("loss"), (int, float))]
        lines[_free(run.name, lines)] = points
    return _drawn({"": ({}, lines)}, x="tokens read", y="loss", ticks=None)


def positions(rows: Sequence[Row]) -> bytes | None:
    """Loss by position, as ``lm`` tells it; None without such rows."""
    lines: Lines = {}
    for row in rows:
        if row.metric == "loss by position" and isfinite(row.value) and isinstance(row.setting.get("from"), int):
            lines.setdefault(row.subject, []).append((max(1, row.setting["from"]), row.value))
    ours = {name: sorted(points) for name, points in lines.items()}
    return _drawn({"": ({}, ours)}, x="tokens read before", y="loss, nats per token", ticks=[]) if ours else None


def lengths(found: Beside) -> bytes | None:
    """A comparison whose columns are lengths, the paper's lines in grey, a mean where rows share a cell; None if its columns are
    something else.
    """
    places = found.lengths
    if places is None:
        return None
    titans = {
        name: dict(zip(found.paper.columns, cells, strict=True)) for name, cells in found.paper.lines.items() if _shown(name)
    }
    panels = {}
    for panel in dict.fromkeys(places[column][0] for column in found.paper.columns):
        inside = {column: tokens for column, (kind, tokens) in places.items() if kind == panel}
        theirs = {f"{name} (paper)": _points(cells, inside) for name, cells in titans.items()}
        ours = {
            name: _points({column: _mean(values) for column, values in cells.items()}, inside)
            for name, cells in found.ours.items()
        }
        panels[panel] = ({n: p for n, p in theirs.items() if p}, {n: p for n, p in ours.items() if p})
    y = "perplexity" if found.title.startswith("Depth") else "right answers, %"
    return _drawn(panels, x="tokens", y=y, ticks=sorted({tokens for _, tokens in places.values()}))


def _mean(values: Sequence[Measured]) -> float | None:
    known = [each.value for each in values if isfinite(each.value)]
    return sum(known) / len(known) if known else None


def _shown(name: str) -> bool:
    return name.startswith(("Titans", "depth", "Mamba", "RMT"))


def _points(cells: Mapping[str, float | None], inside: Mapping[str, float]) -> Points:
    return sorted((inside[column], value) for column, value in cells.items() if column in inside and value is not None)


def _free(name: str, taken: Mapping[str, Any]) -> str:
    return name if name not in taken else next(n for i in range(2, 9999) if (n := f"{name} {i}") not in taken)


def _drawn(panels: Mapping[str, tuple[Lines, Lines]], *, x: str, y: str, ticks: Sequence[float] | None) -> bytes:
    """Panels side by side: the paper's lines in grey, ours in colour; the axis is logarithmic if it has ticks of its own."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (max(8, 4 * len(panels) + 1), 4.2)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False, sharey=True)
    greys = list(dict.fromkeys(name for theirs, _ in panels.values() for name in theirs))
    colours = list(dict.fromkeys(name for _, ours in panels.values() for name in ours))
    shown = {}
    for axis, (title, (theirs, ours)) in zip(axes[0], panels.items(), strict=True):
        for name, line in theirs.items():
            mark = "osv^Dx+*"[greys.index(name) % 8]
            (shown[name],) = axis.plot(*zip(*line, strict=True), f"{mark}--", color=THEIRS, linewidth=1, markersize=4, label=name)
        for name, line in ours.items():
            mark, colour = "o-" if ticks is not None else "-", OURS[colours.index(name) % len(OURS)]
            (shown[name],) = axis.plot(*zip(*line, strict=True), mark, color=colour, linewidth=2, markersize=4, label=name)
        if ticks is not None:
            axis.set_xscale("log", base=2)
        if ticks:
            axis.set_xticks(ticks, [label(tick) for tick in ticks], fontsize=8, rotation=45)
            axis.minorticks_off()
        axis.set(xlabel=x, title=title)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(y)
    figure.legend(
        handles=[shown[name] for name in (*colours, *greys)], loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    held = io.BytesIO()
    figure.savefig(held, dpi=110, format="png")
    plt.close(figure)
    return held.getvalue()
