"""The report's parts, from top to bottom, and its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite, isinf
from pathlib import Path
from typing import Any

from remanence.io.files import replacing
from remanence.io.migrations import current_fields
from remanence.io.outputs import make_folder
from remanence.report import plots
from remanence.report.comparisons import Compared, Measured, compare, short
from remanence.report.document import MARK, Heading, Part, Picture, Table, Text, markdown, page
from remanence.report.rows import Found, Row, Run, read
from remanence.verticals import kinds

TITLE = "What was measured"
SOURCE = ("from", "recipe", "model", "parameters", "training_tokens", "tokenizer")
ORIGIN = (*SOURCE, "commit", "seed", "date", "hardware")

LARGE = 1e5
"""Numbers from here on are written with an exponent: an untrained model's perplexity would fill the table."""


def write(paths: Sequence[Path], out: Path, *, force: bool = False) -> list[Path]:
    """Write the Markdown to `out`, its pictures to a folder beside it, and the same as an HTML page; returns the paths.

    Everything is read, checked and drawn before the first file is written. A document that is not an earlier report is
    not overwritten, unless `force` is given.
    """
    if out.suffix != ".md":
        raise ValueError(f"--out: expected a file that ends with .md, got {out}")
    for path in (out, out.with_suffix(".html")):
        if path.exists() and not force and not _earlier(path):
            raise ValueError(f"--out: expected a new file, or an earlier report's, got {path}")
    parts = compose(read(paths))
    folder = out.with_name(f"{out.stem}-plots")
    pictures = [part for part in parts if isinstance(part, Picture)]
    contents: dict[Path, bytes] = {folder / f"{picture.name}.png": picture.png for picture in pictures}
    contents[out.with_suffix(".html")] = page(parts, TITLE).encode()
    # Written last, when all the files that it names exist.
    contents[out] = markdown(parts, folder.name).encode()
    make_folder("--out", out)
    if pictures:
        folder.mkdir(exist_ok=True)
    for path, content in contents.items():
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    return list(contents)


def _earlier(path: Path) -> bool:
    """Whether a file was written by `write`."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return MARK.encode() in file.read(200)


def compose(found: Found) -> list[Part]:
    parts: list[Part] = [Heading(TITLE, 1)]
    counts = [_counted(len(found.rows), "evaluation row"), _counted(len(found.runs), "training run")]
    papers = "The papers' numbers are those of Titans (arXiv 2501.00663v1, NeurIPS 2025)."
    parts.append(Text(f"From {' and '.join(filter(None, counts))}. {papers}"))
    for comparison in compare(found.rows):
        parts += _compared(comparison)
    parts += _worth(found.rows)
    if found.runs:
        parts += _trained(found.runs)
    if found.rows:
        parts += _measured(found.rows)
    return parts


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count > 1)}" if count else ""


def _compared(found: Compared) -> list[Part]:
    paper, columns = found.paper, found.columns
    rows = []
    for name, numbers in paper.lines.items():
        cells = [_cell([] if number is None else [Measured(number)]) for number in numbers]
        theirs = dict(zip(paper.columns, cells, strict=True))
        rows.append([name, *[theirs.get(column, "") for column in columns]])
    own = [[name, *[_cell(ours.get(column, [])) for column in columns]] for name, ours in found.ours.items()]
    parts: list[Part] = [Heading(found.title)]
    legend = "ours stand out, ± is over seeds. Shares are in percent."
    parts.append(Text(f"The paper's lines are {paper.where}; {legend}"))
    verdicts: dict[str, list[str]] = {}
    for subject, reasons in found.reasons.items():
        verdicts.setdefault(_verdict(reasons, found.doubts[subject]), []).append(subject)
    parts += [Text(f"{' and '.join(subjects)}: {verdict}.") for verdict, subjects in verdicts.items()]
    parts.append(Table(["", *columns], rows + own, frozenset(range(len(rows), len(rows) + len(own)))))
    if (png := plots.lengths(found)) is not None:
        name = found.title.lower().replace(",", "").replace(" ", "-")
        caption = f"{found.title}: ours in colour, the paper's lines ({paper.where}) in grey."
        parts.append(Picture(name, caption, png))
    return parts


def _verdict(reasons: Sequence[str], doubts: Sequence[str]) -> str:
    if reasons:
        return f"not comparable with the paper: {'; '.join([*reasons, *doubts])}"
    if doubts:
        return f"of the paper's size and tokens, and perhaps comparable with it: {'; '.join(doubts)}"
    return "of the paper's size, tokens and tokenizer"


def _cell(values: Sequence[Measured]) -> str:
    """Several values where rows of one subject differ in something the table does not show."""
    forms = [".2f" if abs(each.value) < LARGE else ".3g" for each in values]
    return " / ".join(_number(each, form, ".2f") for each, form in zip(values, forms, strict=True)) or "-"


def _number(of: Measured | Row, form: str = ".6g", spread: str = ".3g") -> str:
    """A value, with its deviation if it is a mean over seeds."""
    if not isfinite(of.value):
        return "∞" if isinf(of.value) else "-"
    return format(of.value, form) + (f" ± {of.deviation:{spread}}" if of.deviation is not None else "")


def _worth(rows: Sequence[Row]) -> list[Part]:
    """What the memory is worth: a line for everything that was measured with it and without it."""
    groups: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        mode = row.setting.get("memory")
        if mode is not None and not row.detail:
            source = [row.provenance.get(name) for name in ("from", "model", "recipe")]
            key = (row.name, row.task, row.metric, _line(_settings(row)), _line(source))
            groups.setdefault(key, {})[str(mode)] = row
    measured = {mode for group in groups.values() if "off" in group for mode in group}
    modes = [mode for mode in ("on", "frozen", "fresh") if mode in measured]
    if not modes:
        return []
    table = []
    for (name, task, metric, *_), group in groups.items():
        if "off" in group and len(group) > 1:
            off = group["off"]
            cells = [_against(group[mode], off) if mode in group else "-" for mode in modes]
            table.append([name, task, metric, _number(off), *cells, _setting(off)])
    header = ["of", "task", "metric", "memory off", *[f"memory {mode}" for mode in modes], "setting"]
    legend = "The same model, text and seed with its memory off, and otherwise; in brackets the difference."
    return [Heading("What the memory is worth"), Text(legend), Table(header, table)]


def _against(row: Row, off: Row) -> str:
    """A value, and its difference to the one without memory where both are finite."""
    difference = row.value - off.value
    return _number(row) + (f" ({difference:+.3g})" if isfinite(difference) else "")


def _trained(runs: Sequence[Run]) -> list[Part]:
    header = ["run", "blocks", "parameters", "steps", "tokens", "last loss", "tokens/s", "skipped", "clamped"]
    rows = []
    for run in runs:
        model = current_fields("model", run.config["model"])
        last = next(line for line in reversed(run.lines) if isinstance(line.get("loss"), (int, float)))
        rates = run.values("tokens_per_s", (int, float))
        rate = f"{sorted(rates)[len(rates) // 2]:,.0f}" if rates else "-"
        steps = f"{last['step']:,} of {run.config.get('steps', '?')}"
        blocks = f"{' '.join(model.get('pattern', []))}, {model.get('num_layers', '?')} layers"
        tokens, loss = short(last["tokens"]), f"{last['loss']:.4f}"
        cells = [run.name, blocks, _parameters(run), steps, tokens, loss, rate]
        clamped = [*run.values("clamped", (int,)), *run.values("leash", (int,))]  # "leash" in earlier runs
        rows.append([*cells, str(run.lines[-1].get("skipped", 0)), f"{sum(clamped):,}" if clamped else "-"])
    legend = Text("Tokens per second are the middle of all logged steps.")
    picture = Picture("training", "Loss by tokens read.", plots.losses(runs))
    return [Heading("Training"), legend, Table(header, rows), picture]


def _parameters(run: Run) -> str:
    from remanence.config import ModelConfig
    from remanence.model import parameters

    data = run.config.get("data")
    kind = kinds().get(data.get("kind", "")) if isinstance(data, dict) else None
    if kind is not None and not kind.causal:
        return "-"  # its config tells of a part of the model
    try:
        return f"{parameters(ModelConfig.from_dict(run.config['model'])):,}"
    except (ValueError, TypeError) as error:
        raise ValueError(f"{run.name}/config.json: model: {error}") from None


def _measured(rows: Sequence[Row]) -> list[Part]:
    parts: list[Part] = [Heading("All rows")]
    shown = [row for row in rows if not row.detail]
    if len(shown) < len(rows):
        parts.append(Text(f"{len(rows) - len(shown):,} more rows are details, shown in plots only."))
    if (png := plots.positions(rows)) is not None:
        caption = "Loss against position, the memory carried from the text's beginning."
        parts.append(Picture("positions", caption, png))
    for task in dict.fromkeys(row.task for row in shown):
        own = [row for row in shown if row.task == task]
        header = ["of", "metric", "value", "count", "95 % interval", "setting"]
        parts += [Heading(task, 3), Table(header, [_cells(row) for row in own])]
    parts += [Heading("Where the numbers come from")]
    origins = list({_line(row.provenance): row.provenance for row in rows}.values())
    names = [name for name in ORIGIN if any(name in origin for origin in origins)]
    parts.append(Table(names, [[_line(origin.get(name, "-")) for name in names] for origin in origins]))
    return parts


def _cells(row: Row) -> list[str]:
    interval = "-" if row.interval is None else f"{row.interval[0]:.4g} to {row.interval[1]:.4g}"
    count = "-" if row.count is None else f"{row.count:,}"
    return [row.subject, row.metric, _number(row), count, interval, _setting(row)]


def _setting(row: Row) -> str:
    return ", ".join(f"{name} {_line(value)}" for name, value in _settings(row).items()) or "-"


def _settings(row: Row) -> dict[str, Any]:
    """All settings but the memory's mode, which is in the subject's name."""
    return {name: value for name, value in row.setting.items() if name != "memory" and value is not None}


def _line(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
