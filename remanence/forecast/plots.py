"""Pictures of forecasts, and of errors along a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remanence.evaluate.plots import COLOURS, Points, line_width, pyplot, save_figure


def series(
    path: Path, lines: Mapping[str, Points], *, title: str, x: str, y: str, mark: float | None = None
) -> Path:
    """Lines over time; `mark` is where something changed."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
    if mark is not None:
        axis.axvline(mark, color="#8a8a8a", linewidth=1, linestyle="--")
    for index, (name, points) in enumerate(lines.items()):
        axis.plot(
            *zip(*points, strict=True), color=COLOURS[index], linewidth=line_width(index, lines), label=name
        )
    axis.set(xlabel=x, ylabel=y)
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    return save_figure(figure, path, plt)


Panel = tuple[str, Any, Any, Mapping[str, Any]]
"""A channel's name, what was known of it, what came, and what was forecast, by whom."""


def forecasts(path: Path, panels: Sequence[Panel], *, title: str) -> Path:
    """One panel for each forecast: the past and what came in grey and black, forecasts in colours."""
    plt = pyplot()
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9, 0.8 + 2.1 * len(panels)), layout="constrained", squeeze=False
    )
    for axis, (name, past, truth, lines) in zip(axes[:, 0], panels, strict=True):
        ahead = range(1, len(truth) + 1)
        axis.plot(range(1 - len(past), 1), past, color="#8a8a8a", linewidth=1.2, label="look-back")
        axis.plot(ahead, truth, color="#333333", linewidth=1.2, label="what came")
        for index, (label, line) in enumerate(lines.items()):
            axis.plot(ahead, line, color=COLOURS[index], linewidth=line_width(index, lines), label=label)
        axis.axvline(0.5, color="#c8c8c8", linewidth=1)
        axis.set_ylabel(name, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("rows from the forecast's origin")
    figure.suptitle(title, fontsize=11)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside right upper")
    return save_figure(figure, path, plt)
