"""Line plots and heat maps, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from remanence.io.files import replacing
from remanence.runtime.overrides import format_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#1b6ca8", "#e07a1f", "#3a8f5c", "#8a4f9e", "#8a8a8a", "#b3322e", "#6b675c", "#c9a227", "#4fb0ae")
"""Line colours, in order of use."""
PATTERNS = ("-", ":", "--", "-.")
"""Dash patterns of lines, as matplotlib line styles."""
Points = Sequence[tuple[float, float]]
"""Points (x, y) of a line."""


def pyplot() -> ModuleType:
    """Import and return matplotlib.pyplot, with the backend that needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def curves(
    path: Path,
    lines: Mapping[str, Points],
    *,
    title: str,
    x: str,
    y: str,
    published: Mapping[str, Points] | None = None,
    percent: bool = False,
    ticks: Mapping[float, str] | None = None,
    styles: Mapping[str, tuple[int, int]] | None = None,
    linear: bool = False,
) -> Path:
    """Plot lines as a PNG file and return its path. The x axis is logarithmic unless `linear` is set.

    `lines` and `published` map names to points; published results are grey and dashed. `x` and `y` are axis
    labels, `ticks` are the labels of x positions, and `percent` sets the y axis to 0 to 100. `styles` gives
    the indices of each line's colour and dash pattern; by default every line has its own colour. Earlier
    lines are thicker, so that overlapping lines stay visible.
    """
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 4.5), layout="constrained")
    greys = ("#555555", "#8a8a8a", "#b0b0b0", "#c8c8c8")
    for index, (name, points) in enumerate((published or {}).items()):
        mark = "osv^Dx+*"[index % 8]
        axis.plot(
            *zip(*points, strict=True),
            f"{mark}--",
            color=greys[index % 4],
            linewidth=1,
            markersize=4,
            label=f"{name} (paper)",
        )
    for index, (name, points) in enumerate(lines.items()):
        colour, pattern = styles[name] if styles else (index, 0)
        width = 1.2 if linear else 1.5 + 2 * (len(lines) - 1 - index) / len(lines)
        axis.plot(
            *zip(*points, strict=True),
            PATTERNS[pattern % len(PATTERNS)],
            marker="" if linear else "o",
            color=COLOURS[colour % len(COLOURS)],
            linewidth=width,
            markersize=width + 2.5,
            label=name,
            clip_on=False,
        )
    if linear:
        axis.xaxis.set_major_formatter(lambda at, _: f"{at:,.0f}")
    else:
        axis.set_xscale("log", base=2)
    if ticks:
        axis.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
        axis.minorticks_off()
    axis.set(xlabel=x, ylabel=y)
    if percent:
        axis.set(ylim=(0, 103))
    axis.set_title(title, fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    if len(lines) + len(published or {}) > 1:
        figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    return save_figure(figure, path, plt)


def heatmap(
    path: Path,
    maps: Mapping[str, Mapping[tuple[float, float], float]],
    *,
    title: str,
    x: str,
    y: str,
    columns_per_row: int = 3,
) -> Path:
    """Plot heat maps as a PNG file and return its path.

    `maps` holds one map per name, from (x, y) to a value from 0 to 1. `columns_per_row` maps are drawn side
    by side.
    """
    plt = pyplot()
    columns = sorted({cell[0] for cells in maps.values() for cell in cells})
    lines = sorted({cell[1] for cells in maps.values() for cell in cells})
    columns_per_row = min(columns_per_row, len(maps))
    high = -(-len(maps) // columns_per_row)
    size = (1.5 + columns_per_row * max(2.6, 0.7 * len(columns)), 0.8 + high * (1.3 + 0.45 * len(lines)))
    figure, axes = plt.subplots(high, columns_per_row, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(maps) :]:
        axis.set_axis_off()
    for axis, (name, cells) in zip(axes.flat, maps.items(), strict=False):
        grid = [[cells.get((column, line), float("nan")) for column in columns] for line in lines]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="YlGnBu", aspect="auto")
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                if value == value:
                    colour = "white" if value > 0.6 else "#333333"
                    axis.text(
                        column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=8, color=colour
                    )
        axis.set_xticks(range(len(columns)), [format_length(int(column)) for column in columns], fontsize=8)
        axis.set_yticks(range(len(lines)), [f"{line:g}" for line in lines], fontsize=8)
        axis.set(xlabel=x, ylabel=y)
        axis.set_title(name, fontsize=10)
    figure.colorbar(image, ax=axes, format=lambda share, _: f"{100 * share:.0f} %")
    figure.suptitle(title, fontsize=11)
    return save_figure(figure, path, plt)


def line_width(index: int, lines: Mapping[str, object]) -> float:
    """Return the width of the line with this index. Earlier lines are thicker, so that overlapping lines stay
    visible.
    """
    return 1.2 + 2.4 * (len(lines) - 1 - index) / len(lines)


def save_figure(figure: Figure, path: Path, plt: ModuleType) -> Path:
    """Write a figure as PNG, atomically, and close it. Returns the path."""
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)
    return path
