"""Plots of forecasts and of rolling errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from remanence.evaluate.plots import COLOURS, Points, line_width, pyplot, save_figure


def plot_series(
    path: Path, lines: Mapping[str, Points], *, title: str, x: str, y: str, mark: float | None = None
) -> Path:
    """Plot lines over time as a PNG file and return its path.

    `mark` is the x position of a dashed vertical line. None: no such line.
    """
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


Panel = tuple[str, np.ndarray, np.ndarray, Mapping[str, np.ndarray]]
"""The name of a channel, its look-back, the true values after the look-back, and the forecasts by label."""


def plot_forecasts(path: Path, panels: Sequence[Panel], *, title: str) -> Path:
    """Plot one panel per forecast as a PNG file and return its path.

    Look-backs are grey, true values black, and forecasts coloured.
    """
    plt = pyplot()
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9, 0.8 + 2.1 * len(panels)), layout="constrained", squeeze=False
    )
    for axis, (name, past, truth, lines) in zip(axes[:, 0], panels, strict=True):
        ahead = range(1, len(truth) + 1)
        axis.plot(range(1 - len(past), 1), past, color="#8a8a8a", linewidth=1.2, label="look-back")
        axis.plot(ahead, truth, color="#333333", linewidth=1.2, label="true values")
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
