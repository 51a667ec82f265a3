"""What `run.py` measured, as tables and a plot: ours, and Titans' Table 3 beside it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

from experiments.forecast.published import TABLE3, TABLE3_COLUMNS
from experiments.shared import comparable, table_row, table_rule
from remanence.forecast.online import SHIFTS
from remanence.forecast.protocol import HORIZONS

Row = dict[str, Any]
Pair = tuple[float, float]
Cells = dict[tuple[str, str, int], dict[int, Pair]]
"""Both errors by data set, run and horizon, and by seed."""
TITLES = {
    "memory": "memory",
    "cycle": "memory and a season",
    "off": "trained without it",
    "attention": "attention",
    "dlinear": "DLinear",
}
MODES = ("on", "frozen", "fresh", "off")
# A row whose "what" names a "recipe" is of the recipe as that commit had it: a table of its own, and not drawn.


def cells(rows: list[Row], mode: str = "on") -> Cells:
    found: Cells = {}
    for row in rows:
        if mode in row["errors"]:
            what, own = row["what"], row["errors"][mode]
            place = what["dataset"], what["run"], what["horizon"]
            found.setdefault(place, {})[what["seed"]] = own["mse"], own["mae"]
    return found


def average(found: Cells, dataset: str, run: str) -> Any:
    """The mean over all horizons of both errors, and the deviation of the first (nan for a single one), over the seeds
    that have every horizon; None if there is none.
    """
    own = [found.get((dataset, run, horizon), {}) for horizon in HORIZONS]
    seeds = set.intersection(*(set(each) for each in own))
    if not seeds:
        return None
    means = [[statistics.mean(each[seed][side] for each in own) for seed in sorted(seeds)] for side in (0, 1)]
    return *map(statistics.mean, means), statistics.stdev(means[0]) if len(seeds) > 1 else nan


def both(pair: Any) -> str:
    return "" if pair is None else f"{pair[0]:.3f} / {pair[1]:.3f}"


def table(rows: list[Row]) -> str:
    """A group of tables for all rows of one device and one setting."""
    groups = comparable(rows, "run", "dataset", "horizon", "seed")
    return "\n\n".join("\n".join(_table(group)) for group in groups) or "no rows"


def _table(rows: list[Row]) -> Iterator[str]:
    named = ("lookback", "steps", "rows", "recipe")
    what = {name: value for name in named if (value := rows[0]["what"].get(name))}
    yield f"On {rows[0]['device']}, torch {rows[0]['torch']}, {what}"
    on = cells(rows)
    kinds = {"memory": on, "memory, off in the test": cells(rows, "off")}
    kinds |= {"memory, frozen in the test": cells(rows, "frozen")}
    kinds |= dict.fromkeys([name for name in TITLES if name != "memory"], on)
    titles = [TITLES.get(kind, kind) for kind in kinds]
    yield from _means(kinds, titles)
    yield from _dlinear(on)
    yield from ("", "By horizon:", "", table_row("data", "horizon", *titles, "seeds"))
    yield table_rule(len(titles) + 3)
    for dataset, horizon in sorted({(row["what"]["dataset"], row["what"]["horizon"]) for row in rows}):
        own = [found.get((dataset, kind.split(",")[0], horizon), {}) for kind, found in kinds.items()]
        told = [both([*map(statistics.mean, zip(*each.values(), strict=True))] or None) for each in own]
        seeds = sorted({len(each) for each in own if each})
        yield table_row(dataset, horizon, *told, " or ".join(map(str, seeds)))
    yield from _streams([row for row in rows if "rolling" in row])


def _means(kinds: dict[str, Cells], titles: list[str]) -> Iterator[str]:
    yield from ("", "Means over four horizons (mse / mae), and the deviation of mse over seeds:", "")
    yield table_row("data", *titles, "best other of Table 3", "Titans", "DLinear, published")
    yield table_rule(len(titles) + 4)
    for dataset, (titans, *others) in TABLE3.items():
        own = [average(found, dataset, kind.split(",")[0]) for kind, found in kinds.items()]
        told = [both(each) + (f" (± {each[2]:.3f})" if each and each[2] == each[2] else "") for each in own]
        told = told if any(own) else ["not measured", *[""] * (len(own) - 1)]
        best = min(pair[0] for pair in others), min(pair[1] for pair in others)
        yield table_row(dataset, *told, both(best), both(titans), both(others[-1]))


def _dlinear(on: Cells) -> Iterator[str]:
    yield from ("", "DLinear here against its published means:", "")
    for dataset, columns in TABLE3.items():
        if (ours := average(on, dataset, "dlinear")) is not None:
            theirs = columns[TABLE3_COLUMNS.index("DLinear")]
            shares = [f"{100 * (ours[side] / theirs[side] - 1):+.1f} %" for side in (0, 1)]
            yield f"- {dataset}: {both(ours)}, {' / '.join(shares)}"


def _streams(online: list[Row]) -> Iterator[str]:
    if not online:
        return
    yield from ("", "Rolling errors along the test part (mse / mae), of networks trained on streams:", "")
    yield table_row("data", "shift", "forecasts made", *(f"memory {mode}" for mode in MODES))
    yield table_rule(len(MODES) + 3)
    for dataset in dict.fromkeys(row["what"]["dataset"] for row in online):
        own = [row["rolling"] for row in online if row["what"]["dataset"] == dataset]
        for shift in SHIFTS:
            for when in ("before", "after"):
                pairs = [[each[f"{shift} {mode}"][when] for each in own] for mode in MODES]
                means = [[statistics.mean(side) for side in zip(*each, strict=True)] for each in pairs]
                told = [f"{mse:.4f} / {mae:.4f}" for mse, mae in means]
                yield table_row(dataset, shift, f"{when} the middle", *told)


def plot(rows: list[Row], path: Path) -> None:
    """The means beside the published ones; and, of online runs, the error along the stream."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from remanence.io.files import replacing

    rows = [row for row in rows if "recipe" not in row["what"]]
    online = [row for row in rows if "rolling" in row]
    data = [name for name in TABLE3 if any(row["what"]["dataset"] == name for row in rows)]
    found = cells(rows)
    high = 1 + bool(online)
    figure, axes = plt.subplots(
        high, len(data), figsize=(2.9 * len(data) + 0.6, 3.1 * high), layout="constrained", squeeze=False
    )
    colours = dict(zip(TITLES, ("#1b6ca8", "#4fb0ae", "#e07a1f", "#3a8f5c", "#8a4f9e"), strict=True))
    for axis, dataset in zip(axes[0], data, strict=True):
        bars = [(TITLES[run], average(found, dataset, run), colours[run]) for run in TITLES]
        bars = [bar for bar in bars if bar[1] is not None]
        titans, *others = TABLE3[dataset]
        names = dict(zip(TABLE3_COLUMNS[1:], others, strict=True))
        published = {"Titans": titans, "Simba": names["Simba"], "PatchTST": names["PatchTST"]}
        labels = [*(bar[0] for bar in bars), *(f"{name}, published" for name in published)]
        values = [*(bar[1][0] for bar in bars), *(pair[0] for pair in published.values())]  # type: ignore[index]
        shades = [*(bar[2] for bar in bars), *["#b0b0b0"] * len(published)]
        axis.barh(range(len(values)), values, color=shades)
        for place, value in enumerate(values):
            axis.text(value, place, f" {value:.3f}", va="center", fontsize=7)
        axis.set_yticks(range(len(values)), labels if axis is axes[0, 0] else [], fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.25 * max(values))
        axis.tick_params(axis="x", labelsize=7)
        axis.locator_params(axis="x", nbins=5)
        axis.set_title(f"{dataset}: mse, mean of 4 horizons", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    looks = {"on": "#1b6ca8", "frozen": "#e07a1f", "fresh": "#3a8f5c", "off": "#8a8a8a"}
    for axis, dataset in zip(axes[1] if online else (), data, strict=False):
        own = [row for row in online if row["what"]["dataset"] == dataset]
        for mode, colour in looks.items():
            curves = [row["rolling"][f"frequency {mode}"]["curve"] for row in own]
            if curves:
                points = [
                    (each[0][0], statistics.mean(p[1] for p in each)) for each in zip(*curves, strict=True)
                ]
                style = "--" if mode in ("frozen", "fresh") else "-"  # they lie over "on"
                axis.plot(
                    *zip(*points, strict=True), style, color=colour, linewidth=1.3, label=f"memory {mode}"
                )
        if own:
            axis.axvline(own[0]["middle"], color="#8a8a8a", linewidth=1, linestyle="--")
            axis.set_title(f"{dataset}: twice as fast from the line", fontsize=8)
            axis.set_xlabel("row", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.locator_params(axis="x", nbins=4)
        axis.spines[["top", "right"]].set_visible(False)
    if online:
        axes[1, 0].set_ylabel("rolling mse", fontsize=8)
        handles, labels = axes[1, 0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside lower center", ncols=4)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)
