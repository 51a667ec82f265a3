"""Compose the sections of a report in order, and write its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite, isinf
from pathlib import Path
from tempfile import TemporaryDirectory

from remanence.evaluate.plots import Points, curves
from remanence.io.files import replacing
from remanence.io.migrations import current_fields
from remanence.io.outputs import make_folder
from remanence.report.document import MARK, Heading, Part, Picture, Table, Text, markdown, page
from remanence.report.rows import Inputs, Row, Run, read
from remanence.verticals import data_configs, imported

TITLE = "Results"
"""Title of every report."""
PROVENANCE = (
    *("from", "recipe", "model", "parameters", "training_tokens", "tokenizer"),
    *("commit", "seed", "date", "hardware"),
)
"""The fields of a row's provenance that the provenance table shows."""


def write(paths: Sequence[Path], out: Path, *, force: bool = False) -> list[Path]:
    """Write a report as Markdown to `out`, its plots to a folder beside it, and an HTML page. Returns all
    paths.

    All inputs are read and all plots drawn before the first file is written. A file that is not an earlier
    report is overwritten only if `force` is set.
    """
    if out.suffix != ".md":
        raise ValueError(f"--out: expected a file that ends with .md, got {out}")
    for path in (out, out.with_suffix(".html")):
        if path.exists() and not force and not _is_report(path):
            raise ValueError(f"--out: expected a new file or an earlier report, got {path}")
    parts = compose(read(paths))
    folder = out.with_name(f"{out.stem}-plots")
    pictures = [part for part in parts if isinstance(part, Picture)]
    contents: dict[Path, bytes] = {folder / f"{picture.name}.png": picture.png for picture in pictures}
    contents[out.with_suffix(".html")] = page(parts, TITLE).encode()
    contents[out] = markdown(parts, folder.name).encode()  # last, when the files that it links to exist
    make_folder("--out", out)
    if pictures:
        folder.mkdir(exist_ok=True)
    for path, content in contents.items():
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    return list(contents)


def _is_report(path: Path) -> bool:
    """Whether a file is an earlier report."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return MARK.encode() in file.read(200)


def compose(inputs: Inputs) -> list[Part]:
    """Return the parts of the report: training runs, evaluation results, effect of the memory and provenance."""
    rows = [row for row in inputs.rows if not row.detail]
    parts: list[Part] = [Heading(TITLE, 1)]
    if inputs.runs:
        parts += [Heading("Training"), _training_table(inputs.runs), _loss_plot(inputs.runs)]
    if inputs.rows:
        parts += [Heading("Evaluation")]
        parts += _position_plot(inputs.rows)
        for task in dict.fromkeys(row.task for row in rows):
            parts += [Heading(task, 3), _task_table([row for row in rows if row.task == task])]
        parts += _memory_effect(rows)
        parts += [Heading("Provenance"), _provenance_table(inputs.rows)]
    return parts


def _training_table(runs: Sequence[Run]) -> Table:
    """Return a table with one row per training run."""
    header = [
        "run",
        "blocks",
        "parameters",
        "steps",
        "tokens",
        "last loss",
        "median tokens/s",
        "skipped",
        "clamped",
    ]
    rows = []
    for run in runs:
        last = [line for line in run.lines if isinstance(line.get("loss"), int | float)][-1]
        rates = sorted(run.numbers("tokens_per_s"))
        clamped = run.numbers("clamped", "leash")  # "leash" in runs of earlier versions
        model = current_fields("model", run.model)
        blocks = f"{' '.join(model.get('pattern', []))}, {model.get('num_layers', '?')} layers"
        cells = [run.name, blocks, _parameters(run), f"{last['step']:,} of {run.config.get('steps', '?')}"]
        cells += [f"{last['tokens']:,}", f"{last['loss']:.4f}"]
        cells += [f"{rates[len(rates) // 2]:,.0f}" if rates else "-", str(run.lines[-1].get("skipped", 0))]
        rows.append([*cells, f"{sum(clamped):,}" if clamped else "-"])
    return Table(header, rows)


def _parameters(run: Run) -> str:
    """Return the number of parameters of a run's model as text, or "-" if the config does not describe all of
    it.
    """
    from remanence.config import ModelConfig
    from remanence.model import parameters

    data = run.config.get("data")
    kind = data_configs().get(data.get("kind", "")) if isinstance(data, dict) else None
    if kind is not None and not imported(kind).causal_lm:
        return "-"  # the config describes only a part of the model
    try:
        return f"{parameters(ModelConfig.from_dict(run.model)):,}"
    except (ValueError, TypeError) as error:
        raise ValueError(f"{run.name}/config.json: model: {error}") from None


def _loss_plot(runs: Sequence[Run]) -> Picture:
    """Plot the training loss of all runs over the number of tokens."""
    lines: dict[str, Points] = {}
    for run in runs:
        name, number = run.name, 2
        while name in lines:
            name, number = f"{run.name} {number}", number + 1
        logged = [line for line in run.lines if isinstance(line.get("loss"), int | float)]
        lines[name] = [(line["tokens"], line["loss"]) for line in logged]
    return _plot("training", "Training loss", lines, x="tokens", y="loss", linear=True)


def _position_plot(rows: Sequence[Row]) -> list[Part]:
    """Plot the loss by position in the text, which the task ``lm`` measures. Empty if it was not measured."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        start = row.setting.get("from")
        if row.metric == "loss by position" and isfinite(row.value) and isinstance(start, int):
            lines.setdefault(row.subject, []).append((max(1, start), row.value))
    points = {name: sorted(line) for name, line in lines.items()}
    return [_plot("positions", "Loss by position", points, x="position", y="nats per token")] if lines else []


def _plot(
    name: str, title: str, lines: Mapping[str, Points], *, x: str, y: str, linear: bool = False
) -> Picture:
    """Draw lines by name as a picture. `x` and `y` are axis labels."""
    with TemporaryDirectory() as folder:
        path = curves(Path(folder) / "plot.png", lines, title=title, x=x, y=y, linear=linear)
        return Picture(name, title, path.read_bytes())


def _task_table(rows: Sequence[Row]) -> Table:
    """Return a table with one row per measured value of a task."""
    cells = []
    for row in rows:
        interval = "-" if row.interval is None else f"{row.interval[0]:.4g} to {row.interval[1]:.4g}"
        count = "-" if row.count is None else f"{row.count:,}"
        cells.append([row.subject, row.metric, _number(row), count, interval, _settings(row)])
    return Table(["model", "metric", "value", "count", "95 % interval", "setting"], cells)


def _memory_effect(rows: Sequence[Row]) -> list[Part]:
    """Return a table that compares memory off with the other memory modes.

    It contains values that were measured both with the memory off and in another mode. Empty if there are
    none.
    """
    groups: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        if row.setting.get("memory") is not None:
            source = [row.provenance.get(name) for name in ("from", "model", "recipe")]
            key = (row.name, row.task, row.metric, _settings(row), _line(source))
            groups.setdefault(key, {})[str(row.setting["memory"])] = row
    compared = [group for group in groups.values() if "off" in group and len(group) > 1]
    modes = [mode for mode in ("on", "frozen", "fresh") if any(mode in group for group in compared)]
    table = []
    for group in compared:
        off = group["off"]
        cells = [_with_difference(group[mode], off) if mode in group else "-" for mode in modes]
        table.append([off.name, off.task, off.metric, _number(off), *cells, _settings(off)])
    header = ["model", "task", "metric", "memory off", *[f"memory {mode}" for mode in modes], "setting"]
    text = Text("The same model, text and seed; in parentheses the difference to memory off.")
    return [Heading("Effect of the memory"), text, Table(header, table)] if modes else []


def _provenance_table(rows: Sequence[Row]) -> Table:
    """Return a table with one row per different provenance."""
    origins = list({_line(row.provenance): row.provenance for row in rows}.values())
    names = [name for name in PROVENANCE if any(name in origin for origin in origins)]
    return Table(names, [[_line(origin.get(name, "-")) for name in names] for origin in origins])


def _with_difference(row: Row, off: Row) -> str:
    """Return a value as text, with its difference to the value with memory off in parentheses."""
    difference = row.value - off.value
    return _number(row) + (f" ({difference:+.3g})" if isfinite(difference) else "")


def _number(row: Row) -> str:
    """Return a value as text, with its standard deviation over seeds if known."""
    if not isfinite(row.value):
        return "∞" if isinf(row.value) else "-"
    return f"{row.value:.6g}" + (f" ± {row.deviation:.3g}" if row.deviation is not None else "")


def _settings(row: Row) -> str:
    """Return all settings of a row as text, except the memory mode, which other columns show."""
    shown = {name: value for name, value in row.setting.items() if name != "memory" and value is not None}
    return ", ".join(f"{name} {_line(value)}" for name, value in shown.items()) or "-"


def _line(value: object) -> str:
    """Return a value as text on one line: strings unchanged, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
