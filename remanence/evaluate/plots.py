"""Curves and heat maps, as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remanence.io.files import replacing
from remanence.runtime.overrides import format_length

COLOURS = ("#1b6ca8", "#e07a1f", "#3a8f5c", "#8a4f9e", "#8a8a8a", "#b3322e", "#6b675c", "#c9a227", "#4fb0ae")
PATTERNS = ("-", ":", "--", "-.")
Points = Sequence[tuple[float, float]]


def pyplot() -> Any:
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
    looks: Mapping[str, tuple[int, int]] | None = None,
    linear: bool = False,
) -> Path:
    """Lines over a logarithmic axis, or of many points over a linear one; published points are grey and dashed.

    `looks` are indices of each line's colour and pattern; without them every line has a colour. Earlier lines are
    broader, so that a line behind another can be seen.
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
        colour, pattern = looks[name] if looks else (index, 0)
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


def heat(
    path: Path,
    maps: Mapping[str, Mapping[tuple[float, float], float]],
    *,
    title: str,
    x: str,
    y: str,
    wide: int = 3,
) -> Path:
    """Shares from 0 to 1 by two axes, a map for each name, `wide` in a line."""
    plt = pyplot()
    columns = sorted({cell[0] for cells in maps.values() for cell in cells})
    lines = sorted({cell[1] for cells in maps.values() for cell in cells})
    wide = min(wide, len(maps))
    high = -(-len(maps) // wide)
    size = (1.5 + wide * max(2.6, 0.7 * len(columns)), 0.8 + high * (1.3 + 0.45 * len(lines)))
    figure, axes = plt.subplots(high, wide, figsize=size, layout="constrained", squeeze=False)
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


def line_width(index: int, lines: Mapping[str, Any]) -> float:
    """Earlier lines are broader, so that a line behind another can be seen."""
    return 1.2 + 2.4 * (len(lines) - 1 - index) / len(lines)


def save_figure(figure: Any, path: Path, plt: Any) -> Path:
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)
    return path
