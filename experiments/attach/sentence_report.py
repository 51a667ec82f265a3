"""Tables and plots of the rows that `sentence_tests` and `baselines` wrote.

    python -m experiments.attach.sentence_report ROWS.json ... --baselines ROWS.json ... --plot attach-sentences.png

Rows of several files, for example of several seeds, are added up.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from remanence.evaluate.plots import COLOURS, pyplot

KINDS = {
    "trained": "trained relations, other wordings",
    "as written": "other kinds, fixed wording",
    "held out": "other relations, other wordings",
    "reversed": "reversed questions",
    "free": "free first-person text",
    "passages": "passages, several facts a sentence",
    "notes": "facts in plain text",
    "asked before": "asked before, not answered",
    "updates": "stated again: the later value",
    "unknown": 'never stated: "I don\'t know"',
    "free unknown": "never stated, free text",
    "general": "questions that need no memory",
}
"""Kinds of questions (`sentence_tests.Cell.kind`) in the order of the tables, with their titles."""
Key = tuple[str, int, int, str]


def short(number: float) -> str:
    """4000 as 4K."""
    return f"{number / 1000:g}K" if number >= 1000 else f"{number:g}"


def totals(files: list[Path]) -> dict[Key, list[int]]:
    """The number of correct answers, of questions, and of stated facts that were said to be unknown, by cell."""
    found: dict[Key, list[int]] = {}
    for file in files:
        for row in json.loads(file.read_text())["rows"]:
            key = row["kind"], row["facts"], row["distance"], row.get("method", row["mode"])
            own = found.setdefault(key, [0, 0, 0])
            for n, name in enumerate(("correct", "questions", "wrongly_unknown")):
                own[n] += row.get(name, row.get("unknown", 0))
    return found


def table(cells: dict[Key, list[int]]) -> str:
    """The rows as a table in Markdown."""
    lines = ['| questions | facts | tokens in between | memory | correct | | wrongly "I don\'t know" |']
    lines.append("|---|---|---|---|---|---|---|")
    order = list(KINDS)
    for key in sorted(cells, key=lambda k: (order.index(k[0]), k[3] != "on", k[3], k[1], k[2])):
        (kind, facts, distance, mode), (correct, asked, unknown) = key, cells[key]
        share = f"{100 * correct / max(asked, 1):.1f} %"
        wrong = "" if "unknown" in kind else f"{100 * unknown / max(asked, 1):.1f} %"
        lines.append(
            f"| {KINDS[kind]} | {facts or ''} | {short(distance)} | {mode} | {correct} of {asked} | {share} "
            f"| {wrong} |"
        )
    return "\n".join(lines)


def plot(cells: dict[Key, list[int]], path: Path) -> None:
    """Accuracy by kind, by distance and by the number of facts."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), layout="constrained", width_ratios=(1.5, 1, 1))
    share = {key: 100 * own[0] / max(own[1], 1) for key, own in cells.items()}
    kinds = [kind for kind in KINDS if any(k[0] == kind and k[2:] == (4000, "on") for k in cells)]
    for place, kind in enumerate(reversed(kinds)):
        own = next(k for k in sorted(cells) if k[0] == kind and k[1] in (0, 20) and k[2:] == (4000, "on"))
        axes[0].barh(place, share[own], color=COLOURS[0], height=0.6)
        axes[0].annotate(f"{share[own]:.0f}", (share[own] + 1, place), va="center", fontsize=9)
        frozen = (*own[:3], "frozen")
        if frozen in share:
            axes[0].barh(place, share[frozen], color=COLOURS[4], height=0.6)
    axes[0].set_yticks(range(len(kinds)), [KINDS[kind] for kind in reversed(kinds)], fontsize=9)
    axes[0].set(xlim=(0, 108), xlabel="correct, %", title="by kind: 20 facts, 4K tokens of a book later")
    names = {"on": "with the memory", "frozen": "frozen memory", "off": "window of 512 alone"}
    for index, mode in enumerate(names):
        for axis, position, fixed in ((axes[1], 2, (1, 20)), (axes[2], 1, (2, 4000))):
            points = sorted(
                (k[position], share[k])
                for k in cells
                if k[0] == "held out" and k[3] == mode and k[fixed[0]] == fixed[1]
            )
            if points:
                axis.plot(
                    *zip(*points, strict=True), "o-", color=COLOURS[(0, 4, 1)[index]], label=names[mode]
                )
    for axis, position, fixed in ((axes[1], 2, (1, 20)), (axes[2], 1, (2, 4000))):
        places = sorted({k[position] for k in cells if k[0] == "held out" and k[fixed[0]] == fixed[1]})
        axis.set_xscale("log", base=2)
        axis.set_xticks(places, [short(x) for x in places])
    for axis, text in ((axes[1], "tokens in between"), (axes[2], "facts")):
        axis.set(ylim=(0, 103), xlabel=text, title=f"other relations, by {text}")
        axis.minorticks_off()
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, loc="lower left", fontsize=9)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--baselines", type=Path, nargs="*", default=[])
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    cells = totals(args.rows)
    print(table(cells))
    if args.baselines:
        print(table(totals(args.baselines)))
    if args.plot:
        plot(cells, args.plot)


if __name__ == "__main__":
    main()
