"""A plot of metrics.jsonl: the loss, the gradient norm, and the surprise and gates of the memories."""

from __future__ import annotations

import json
from pathlib import Path

from remanence.io.files import replacing

PANELS = {
    "loss": ("loss",),
    "validation": ("validation",),
    "gradient's length": ("gradient",),
    "surprise": ("surprise",),
    "gates": ("step_size", "momentum", "keep"),
}
"""The title of each panel, and the metrics that it shows."""


def plot(run: str | Path) -> Path:
    """Write ``RUN/metrics.png`` and return its path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    run = Path(run)
    try:
        text = (run / "metrics.jsonl").read_text(encoding="utf-8")
        lines: list[dict[str, float | None]] = [json.loads(line) for line in text.splitlines()]
    except ValueError as error:
        raise ValueError(f"{run / 'metrics.jsonl'}: not lines of JSON ({error})") from None
    if not lines:
        raise ValueError(f"{run / 'metrics.jsonl'}: expected at least one logged step, got none")
    known = {name for line in lines for name in line}
    panels = {title: [name for name in names if name in known] for title, names in PANELS.items()}
    panels = {title: names for title, names in panels.items() if names}
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4 * len(panels), 3.2), layout="constrained", squeeze=False
    )
    for axis, (title, names) in zip(axes[0], panels.items(), strict=True):
        for name, colour in zip(names, ("#1b6ca8", "#e07a1f", "#3a8f5c"), strict=False):
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            axis.plot(*zip(*points, strict=True), label=name.replace("_", " "), color=colour, linewidth=1.5)
        axis.set(title=title, xlabel="step")
        axis.spines[["top", "right"]].set_visible(False)
        if len(names) > 1:
            axis.legend(frameon=False, fontsize=8, loc="center right")
    with replacing(run / "metrics.png") as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)
    return run / "metrics.png"
