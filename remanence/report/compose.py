"""The report's parts, from top to bottom, and its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite, isinf
from pathlib import Path
from typing import Any

from remanence.core.files import replacing
from remanence.report import plots
from remanence.report.comparisons import Beside, Measured, beside, short
from remanence.report.document import MARK, Heading, Part, Picture, Table, Text, markdown, page
from remanence.report.rows import Found, Row, Run, read

TITLE = "What was measured"
ORIGIN = ("from", "recipe", "model", "parameters", "training_tokens", "tokenizer", "commit", "seed", "date", "hardware")

LARGE = 1e5
"""From here on a number beside the papers' is written with an exponent: an untrained model's perplexity would fill the table."""


def write(paths: Sequence[Path], out: Path, *, force: bool = False) -> list[Path]:
    """Write the Markdown to `out`, its pictures in a folder beside it, and the same as one HTML page; returns the files.

    Everything is read, checked and drawn before the first file is written. A document that is not an earlier report's is not
    overwritten, unless `force` is given.
    """
    if out.suffix != ".md":
        raise ValueError(f"--out: expected a file that ends with .md, got {out}")
    if not out.parent.is_dir():
        raise ValueError(f"--out: expected a folder that exists, got {out.parent}")
    for path in (out, out.with_suffix(".html")):
        if path.exists() and not force and not _earlier(path):
            raise ValueError(f"--out: expected a new file, or an earlier report's, got {path}")
    parts = compose(read(paths))
    folder = out.with_name(f"{out.stem}-plots")
    pictures = [part for part in parts if isinstance(part, Picture)]
    contents: dict[Path, bytes] = {folder / f"{picture.name}.png": picture.png for picture in pictures}
    contents[out.with_suffix(".html")] = page(parts, TITLE).encode()
    contents[out] = markdown(parts, folder.name).encode()  # last: it is there when all it names is
    if pictures:
        folder.mkdir(exist_ok=True)
    for path, content in contents.items():
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    return list(contents)


def _earlier(path: Path) -> bool:
    """Whether a file is a report of ours."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return MARK.encode() in file.read(200)


def compose(found: Found) -> list[Part]:
    parts: list[Part] = [Heading(TITLE, 1)]
    told = " and ".join(filter(None, [_counted(len(found.rows), "evaluation row"), _counted(len(found.runs), "training run")]))
    parts.append(Text(f"From {told}. The papers' numbers are those of Titans (arXiv 2501.00663v1, NeurIPS 2025)."))
    for comparison in beside(found.rows):
        parts += _compared(comparison)
    parts += _worth(found.rows)
    if found.runs:
        parts += _trained(found.runs)
    if found.rows:
        parts += _measured(found.rows)
    return parts


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count > 1)}" if count else ""


def _compared(found: Beside) -> list[Part]:
    rows = []
    for name, cells in found.paper.lines.items():
        theirs = {column: _cell([] if x is None else [Measured(x)]) for column, x in zip(found.paper.columns, cells, strict=True)}
        rows.append([name, *[theirs.get(column, "") for column in found.columns]])
    own = [[name, *[_cell(cells.get(column, [])) for column in found.columns]] for name, cells in found.ours.items()]
    parts: list[Part] = [Heading(found.title)]
    parts.append(Text(f"The paper's lines are {found.paper.where}; ours stand out, ± is over seeds. Shares are in percent."))
    verdicts: dict[str, list[str]] = {}
    for subject, reasons in found.reasons.items():
        verdicts.setdefault(_verdict(reasons, found.doubts[subject]), []).append(subject)
    parts += [Text(f"{' and '.join(subjects)}: {told}.") for told, subjects in verdicts.items()]
    parts.append(Table(["", *found.columns], rows + own, frozenset(range(len(rows), len(rows) + len(own)))))
    if (png := plots.lengths(found)) is not None:
        name = found.title.lower().replace(",", "").replace(" ", "-")
        parts.append(Picture(name, f"{found.title}: ours in colour, the paper's lines ({found.paper.where}) in grey.", png))
    return parts


def _verdict(reasons: Sequence[str], doubts: Sequence[str]) -> str:
    if reasons:
        return f"not comparable with the paper: {'; '.join([*reasons, *doubts])}"
    if doubts:
        return f"of the paper's size and tokens, and perhaps comparable with it: {'; '.join(doubts)}"
    return "of the paper's size, tokens and tokenizer"


def _cell(values: Sequence[Measured]) -> str:
    """Several values where rows of one subject differ in something the table does not show."""
    return " / ".join(_number(each, ".2f" if abs(each.value) < LARGE else ".3g", ".2f") for each in values) or "-"


def _number(of: Measured | Row, form: str = ".6g", spread: str = ".3g") -> str:
    """A value, with its deviation if it is a mean over seeds."""
    if not isfinite(of.value):
        return "∞" if isinf(of.value) else "-"
    return format(of.value, form) + (f" ± {of.deviation:{spread}}" if of.deviation is not None else "")


def _worth(rows: Sequence[Row]) -> list[Part]:
    """What the memory is worth: a line for everything measured with it and without."""
    groups: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        mode = row.setting.get("memory")
        if mode is not None and not row.detail:
            setting = {name: value for name, value in row.setting.items() if name != "memory" and value is not None}
            whose = [row.provenance.get(name) for name in ("from", "model", "recipe")]
            key = (row.name, row.task, row.metric, _line(setting), _line(whose))
            groups.setdefault(key, {})[str(mode)] = row
    modes = [mode for mode in ("on", "frozen", "fresh") if any({mode, "off"} <= set(group) for group in groups.values())]
    if not modes:
        return []
    table = []
    for (name, task, metric, *_), group in groups.items():
        if "off" in group and len(group) > 1:
            off = group["off"]
            cells = [_against(group[mode], off) if mode in group else "-" for mode in modes]
            table.append([name, task, metric, _number(off), *cells, _setting(off)])
    header = ["of", "task", "metric", "memory off", *[f"memory {mode}" for mode in modes], "setting"]
    told = "The same model, text and seed with its memory off, and otherwise; in brackets the difference."
    return [Heading("What the memory is worth"), Text(told), Table(header, table)]


def _against(row: Row, off: Row) -> str:
    """A value, and its difference to the one without memory where both are finite."""
    difference = row.value - off.value
    return _number(row) + (f" ({difference:+.3g})" if isfinite(difference) else "")


def _trained(runs: Sequence[Run]) -> list[Part]:
    header = ["run", "blocks", "parameters", "steps", "tokens", "last loss", "tokens/s", "skipped", "leashed"]
    rows = []
    for run in runs:
        last = next(line for line in reversed(run.lines) if isinstance(line.get("loss"), (int, float)))
        rates = [line["tokens_per_s"] for line in run.lines if isinstance(line.get("tokens_per_s"), (int, float))]
        rate = f"{sorted(rates)[len(rates) // 2]:,.0f}" if rates else "-"
        steps = f"{last['step']:,} of {run.config.get('steps', '?')}"
        blocks = f"{' '.join(run.config['model'].get('pattern', []))}, {run.config['model'].get('depth', '?')} layers"
        told = [run.name, blocks, _parameters(run), steps, short(last["tokens"]), f"{last['loss']:.4f}", rate]
        held = [line["leash"] for line in run.lines if isinstance(line.get("leash"), int)]
        rows.append([*told, str(run.lines[-1].get("skipped", 0)), f"{sum(held):,}" if held else "-"])
    picture = Picture("training", "Loss by tokens read.", plots.losses(runs))
    return [Heading("Training"), Text("Tokens per second are the middle of all logged steps."), Table(header, rows), picture]


def _parameters(run: Run) -> str:
    from remanence.config import ModelConfig
    from remanence.model import parameters

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
        parts.append(Picture("positions", "Loss against position, the memory carried from the text's beginning.", png))
    for task in dict.fromkeys(row.task for row in shown):
        own = [row for row in shown if row.task == task]
        header = ["of", "metric", "value", "count", "95 % interval", "setting"]
        parts += [Heading(task, 3), Table(header, [_told(row) for row in own])]
    parts += [Heading("Where the numbers come from")]
    origins = list({_line(row.provenance): row.provenance for row in rows}.values())
    names = [name for name in ORIGIN if any(name in origin for origin in origins)]
    parts.append(Table(names, [[_line(origin.get(name, "-")) for name in names] for origin in origins]))
    return parts


def _told(row: Row) -> list[str]:
    interval = "-" if row.interval is None else f"{row.interval[0]:.4g} to {row.interval[1]:.4g}"
    count = "-" if row.count is None else f"{row.count:,}"
    return [row.subject, row.metric, _number(row), count, interval, _setting(row)]


def _setting(row: Row) -> str:
    """All of it but what became of the memory, which the subject tells."""
    told = [f"{name} {_line(value)}" for name, value in row.setting.items() if name != "memory" and value is not None]
    return ", ".join(told) or "-"


def _line(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
