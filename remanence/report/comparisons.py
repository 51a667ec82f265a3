"""Our rows in the papers' tables: which cell a row belongs to, and why two numbers may not be compared.

A comparison is an entry of `COMPARISONS`. A row finds its cell by its task, its metric and a few names in its setting:

    wikitext, lambada                 "word perplexity"; "perplexity", "accuracy"
    commonsense, or a task's own name "acc", of hellaswag and arc_challenge "acc_norm"; setting benchmark
                                      ("all": "mean accuracy")
    niah                              "said"; setting kind (pk, n, w) and length, no depth
    babilong                          "right"; setting length and qa, which is "mean"; fine_tuned if the model is
    ablate                            any; setting variant
    depth                             "perplexity"; setting variant (the depth) and length

Rows that are details are left out. A row's model is like the paper's if its provenance has parameters, training_tokens
and tokenizer, and they agree with the paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

from remanence.evaluate import published
from remanence.evaluate.published import Number, Trained
from remanence.report.rows import Row
from remanence.runtime.overrides import format_length, parse_length

BABI = 20
"""Tasks of bAbI."""
NEAR = 0.1
"""How far our parameters and tokens may be from the paper's, as a share, to be of the same size."""

ACCURACY = ("accuracy", "acc", "said", "right")
NORMALISED = ("normalised accuracy", "accuracy, normalised", "acc_norm")
ALIASES = {
    "social_iqa": "siqa",
    "social iqa": "siqa",
    "arc-e": "arc_easy",
    "arc-c": "arc_challenge",
    "lambada_openai": "lambada",
}
KINDS = {"niah_single_1": "PK", "niah_single_2": "N", "niah_single_3": "W"}
NEEDLES = ("PK", "N", "W")
VARIANTS = published.TABLE5_VARIANTS | {
    "lmm": "LMM (base)",
    "mac": "+ Attn MAC",
    "mag": "+ Attn MAG",
    "mal": "+ Attn MAL",
    "no_convolution": "w/o convolution",
    "no_forgetting": "w/o weight decay",
}

Cell = tuple[str, str]
"""Line and column of a table. An empty line is the subject's own."""


class Paper(NamedTuple):
    """A table or figure of the papers: its lines by name, and what their models were."""

    where: str
    columns: Sequence[str]
    lines: Mapping[str, Sequence[Number]]
    trained: Trained


class Comparison(NamedTuple):
    """How rows belong to a table: the cell of each (None: not here), and the papers' part of it for these rows."""

    title: str
    cell: Callable[[Row], Cell | None]
    paper: Callable[[Sequence[Row]], Paper]
    percent: Callable[[str], bool] = lambda column: True


class Measured(NamedTuple):
    """A row's number as its table has it, and its deviation over seeds."""

    value: float
    deviation: float | None = None


class Compared(NamedTuple):
    """A comparison with rows in it. `ours` is by line (a subject's, and its variant's if it has several) and column."""

    title: str
    paper: Paper
    ours: dict[str, dict[str, list[Measured]]]
    reasons: dict[str, list[str]]
    doubts: dict[str, list[str]]
    rows: list[Row]

    @property
    def lengths(self) -> dict[str, tuple[str, float]] | None:
        """Each column's kind and length, in their order; None if some column is something else."""
        kinds: list[str] = []
        found: dict[str, tuple[str, float]] = {}
        for column in self._columns:
            kind, _, text = column.rpartition(" ")
            try:
                found[column] = kind, float(parse_length(text.replace(",", "")))
            except ValueError:
                return None
            kinds += [kind] if kind not in kinds else []
        order = sorted(found, key=lambda column: (kinds.index(found[column][0]), found[column][1]))
        return {column: found[column] for column in order}

    @property
    def columns(self) -> list[str]:
        """The paper's columns, then those that only we have; lengths in their order."""
        return self._columns if self.lengths is None else list(self.lengths)

    @property
    def _columns(self) -> list[str]:
        ours = [column for cells in self.ours.values() for column in cells]
        return list(dict.fromkeys([*self.paper.columns, *ours]))


def label(length: float) -> str:
    """A length as the papers write it: 2K is 2,048, and 2,000 is itself, so that they do not share a column."""
    return format_length(length, ",")


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _benchmark(row: Row) -> str:
    name = str(row.setting.get("benchmark", row.task) if row.task == "commonsense" else row.task).lower()
    return ALIASES.get(name, name)


def _table1(row: Row) -> Cell | None:
    name = _benchmark(row)
    if (name, row.metric) in (("wikitext", "word perplexity"), ("lambada", "perplexity")):
        return "", f"{name} perplexity"
    if (row.task, name, row.metric) == ("commonsense", "all", "mean accuracy"):
        return "", "average"
    wanted = NORMALISED if name in ("hellaswag", "arc_challenge") else ACCURACY
    return ("", name) if name in published.TABLE1_COLUMNS and row.metric in wanted else None


def _table2(row: Row) -> Cell | None:
    kind = KINDS.get(str(row.setting.get("kind")), str(row.setting.get("kind")).upper())
    if row.task != "niah" or row.metric not in ACCURACY or kind not in NEEDLES:
        return None
    if row.setting.get("depth") is not None:
        return None
    return ("", f"{kind} {label(row.setting['length'])}") if _is_count(row.setting.get("length")) else None


def _figure6(row: Row, *, tuned: bool) -> Cell | None:
    if row.task != "babilong" or row.metric not in ACCURACY or row.setting.get("qa") != "mean":
        return None
    if not _is_count(row.setting.get("length")) or bool(row.setting.get("fine_tuned")) != tuned:
        return None
    return "", label(row.setting["length"])


def _table5(row: Row) -> Cell | None:
    variant = str(row.setting.get("variant", ""))
    line = VARIANTS.get(variant.replace(" ", "_"), variant)
    return (line, row.metric) if row.task == "ablate" and line in published.TABLE5 else None


def _figure7(row: Row) -> Cell | None:
    depth, length = str(row.setting.get("variant")), row.setting.get("length")
    if row.task != "depth" or row.metric != "perplexity" or not depth.isdecimal() or not _is_count(length):
        return None
    return f"depth {depth}", label(float(str(length)))


def _nearest(sizes: dict[str, Trained], rows: Sequence[Row]) -> str:
    """The papers' size nearest to ours; the smallest if ours is not known."""
    own = [row.provenance["parameters"] for row in rows if _is_count(row.provenance.get("parameters"))]
    return published.nearest(sizes, max(own, default=0))


def _paper1(rows: Sequence[Row]) -> Paper:
    size = _nearest(published.TABLE1_TRAINED, rows)
    version = "NeurIPS 2025" if size == "1.3B" else "arXiv v1"
    lines, trained = published.TABLE1[size], published.TABLE1_TRAINED[size]
    return Paper(f"Table 1, {size} ({version})", published.TABLE1_COLUMNS, lines, trained)


def _paper2(rows: Sequence[Row]) -> Paper:
    columns = [f"{kind} {label(length)}" for kind in NEEDLES for length in published.TABLE2_LENGTHS]
    lines = {name: [x for kind in NEEDLES for x in cells[kind]] for name, cells in published.TABLE2.items()}
    return Paper("Table 2 (arXiv v1)", columns, lines, published.TABLE2_TRAINED)


def _paper6(panel: str) -> Paper:
    columns = [label(length) for length in published.FIGURE6_LENGTHS]
    where = f"Figure 6, {panel} (arXiv v1, read off the plot)"
    return Paper(where, columns, published.FIGURE6[panel], published.FIGURE6_TRAINED)


def _paper5(rows: Sequence[Row]) -> Paper:
    return Paper("Table 5 (arXiv v1)", published.TABLE5_COLUMNS, published.TABLE5, published.TABLE5_TRAINED)


def _paper7(rows: Sequence[Row]) -> Paper:
    size = _nearest(published.FIGURE7_TRAINED, rows)
    columns = [label(length) for length in published.FIGURE7_LENGTHS]
    lines, trained = published.FIGURE7[size], published.FIGURE7_TRAINED[size]
    return Paper(f"Figure 7, {size} (arXiv v1, read off the plot)", columns, lines, trained)


def _share(column: str) -> bool:
    return "perplexity" not in column


def _share5(column: str) -> bool:
    return column in (*ACCURACY, "reasoning", "long context")


COMPARISONS = (
    Comparison("Language modelling and commonsense", _table1, _paper1, _share),
    Comparison("A needle in a haystack", _table2, _paper2),
    Comparison("BABILong", partial(_figure6, tuned=False), lambda rows: _paper6("few-shot")),
    Comparison("BABILong, fine-tuned", partial(_figure6, tuned=True), lambda rows: _paper6("fine-tuned")),
    Comparison("What the parts are worth", _table5, _paper5, _share5),
    Comparison("Depth of the memory", _figure7, _paper7, lambda column: False),
)


def compare(rows: Sequence[Row]) -> list[Compared]:
    """Every comparison that some row belongs to, in the papers' order."""
    found = (_compare(comparison, rows) for comparison in COMPARISONS)
    return [each for each in found if each is not None]


def _compare(comparison: Comparison, rows: Sequence[Row]) -> Compared | None:
    here = [(row, cell) for row in rows if not row.detail and (cell := comparison.cell(row)) is not None]
    if not here:
        return None
    paper = comparison.paper([row for row, _ in here])
    ours: dict[str, dict[str, list[Measured]]] = {}
    reasons: dict[str, list[str]] = {}
    uncertain: dict[str, list[str]] = {}
    for row, (line, column) in here:
        share = comparison.percent(column)
        if share and isfinite(row.value) and not 0 <= row.value <= 1:
            expected = f"expected a share from 0 to 1 for {row.metric!r}"
            raise ValueError(f"{row.location}: value: {expected}, got {row.value:g}")
        name = f"{line}: {row.subject}" if line else row.subject
        unit = 100 if share else 1
        own = Measured(unit * row.value, None if row.deviation is None else unit * row.deviation)
        ours.setdefault(name, {}).setdefault(column, []).append(own)
        uncertain.setdefault(row.subject, doubts(paper.trained, row))
        listed = reasons.setdefault(row.subject, [])
        listed += [reason for reason in differences(paper.trained, row, rows) if reason not in listed]
    ours = dict(sorted(ours.items()))
    return Compared(comparison.title, paper, ours, reasons, uncertain, [row for row, _ in here])


def differences(theirs: Trained, row: Row, rows: Sequence[Row] = ()) -> list[str]:
    """Why a number may not be compared with the paper's; empty if it may. `rows` are all, to see what a mean is of."""
    ours, reasons = row.provenance, []
    for what, wanted, own in (
        ("parameters", theirs.parameters, ours.get("parameters")),
        ("training tokens", theirs.tokens, ours.get("training_tokens")),
    ):
        if wanted is None:
            reasons.append(f"the paper does not tell its {what}")
        elif own is None or not _is_count(own):
            reasons.append(f"our {what} are not told in the rows (the paper: {short(wanted)})")
        elif abs(own / wanted - 1) > NEAR:
            reasons.append(f"{what}: ours {short(own)}, the paper's {short(wanted)}")
    tokenizer = ours.get("tokenizer")
    if tokenizer is None:
        reasons.append(f"our tokenizer is not told in the rows (the paper: {theirs.tokenizer})")
    elif str(tokenizer).lower() != theirs.tokenizer and not _as_large(tokenizer, theirs):
        reasons.append(f"tokenizer: ours {tokenizer}, the paper's {theirs.tokenizer}")
    mode = row.setting.get("memory")
    reasons += [f"our memory is {mode}, the paper's on"] if mode not in (None, "on") else []
    return reasons + (_babilong(row, rows) if row.task == "babilong" else _measured(row))


def doubts(theirs: Trained, row: Row) -> list[str]:
    """What the rows leave open: of a tokenizer.json they have only the size."""
    tokenizer = row.provenance.get("tokenizer")
    other = f"the paper's {theirs.tokenizer}, or another of its size"
    return [f"our {tokenizer} may be {other}: the rows do not tell"] if _as_large(tokenizer, theirs) else []


def _as_large(tokenizer: Any, theirs: Trained) -> bool:
    size = published.VOCABULARIES.get(str(theirs.tokenizer))
    return size is not None and str(tokenizer).lower() == f"tokenizer.json of {size:,} tokens"


def _measured(row: Row) -> list[str]:
    """What of Table 1's benchmarks was left out or made easier."""
    name, samples, reasons = _benchmark(row), row.setting.get("samples"), []
    full = published.TABLE1_COUNTS.get(name)
    count, what = (row.setting.get("pages"), "pages") if name == "wikitext" else (row.count, "questions")
    if full is not None and _is_count(count) and int(str(count)) < full:
        reasons.append(f"{name}: only {count:,} of {full:,} {what}")
    elif name == "all" and samples is not None:
        reasons.append(f"the average: only the first {samples} questions of each")
    if name == "wikitext" and row.setting.get("unk") is True:
        reasons.append("wikitext: our text has its rare words replaced by <unk>, which is easier")
    if row.setting.get("siqa asks") == "letters":
        reasons.append("siqa: our lines ask for a letter, the paper's for the answer's words")
    return reasons


def _babilong(row: Row, rows: Sequence[Row]) -> list[str]:
    """What differs in how BABILong's questions were asked, and in the tasks that the mean is of."""
    shots, tuned, reasons = row.setting.get("shots"), bool(row.setting.get("fine_tuned")), []
    if shots is None:
        reasons.append("babilong: how many examples were shown is not told in the rows")
    elif tuned and shots:
        reasons.append(f"babilong: {shots} examples were shown, the paper's tuned models need none")
    elif not tuned:
        shown = f"babilong: {shots or 'no'} examples were shown"
        reasons.append(f"{shown}, the paper's are few-shot and it does not tell how many")
    tasks = row.setting.get("tasks")
    if not isinstance(tasks, list | int):
        tasks = _tasks(row, rows)
    count = tasks if isinstance(tasks, int) else len(tasks)
    if 0 < count < BABI:
        mean = f"babilong: the mean is of {count} of {BABI} tasks"
        reasons.append(f"{mean}, the paper does not tell of which its own is")
    return reasons


def _tasks(row: Row, rows: Sequence[Row]) -> set[str]:
    """The tasks whose rows belong to this mean."""

    def same(each: Row) -> bool:
        alike = all(each.setting.get(name) == value for name, value in row.setting.items() if name != "qa")
        return alike and (each.task, each.metric, each.provenance) == (row.task, row.metric, row.provenance)

    return {str(each.setting.get("qa")) for each in rows if same(each)} - {"mean"}


def short(number: float) -> str:
    """A count in thousands, millions or billions: 340 M."""
    for size, sign in ((1e9, " B"), (1e6, " M"), (1e3, " K")):
        if number >= size:
            return f"{number / size:.3g}{sign}"
    return f"{number:g}"
