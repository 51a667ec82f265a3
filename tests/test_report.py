"""A report says what its rows say, beside what the papers say, and what cannot be compared; wrong input leaves nothing
behind.
"""

import base64
import json
import re
from functools import partial
from html.parser import HTMLParser

import pytest

from remanence.config import preset
from remanence.evaluate import published
from remanence.evaluate.grid import PARTS
from remanence.model import parameters
from remanence.report import plots, write
from remanence.report.comparisons import COMPARISONS, Measured, compare, label
from remanence.report.compose import _cell
from remanence.report.rows import read

ORIGIN = {
    "model": {"config": "c" * 32, "weights": "0123456789abcdef"},
    "from": "my_model",
    "seed": 3,
    "date": "2026-01-02",
    "commit": "f00d",
    "hardware": "two cores",
}


def row(task, metric, value, origin=None, /, **setting):
    return {
        "task": task,
        "metric": metric,
        "value": value,
        "setting": setting,
        "provenance": {**ORIGIN, **(origin or {})},
    }


ROWS = [
    row("wikitext", "word perplexity", 123.456, memory="on"),
    row("lambada", "perplexity", 77.25, memory="on"),
    row("lambada", "accuracy", 0.1234, memory="on") | {"count": 5153, "interval": [0.11, 0.13]},
    row("commonsense", "acc", 0.5678, memory="on", benchmark="piqa"),
    row("commonsense", "acc_norm", 0.2512, memory="on", benchmark="hellaswag"),
    row("commonsense", "acc", 0.2444, memory="on", benchmark="hellaswag"),
    *[row("niah", "said", 0.9 / n, memory="on", kind="pk", length=2048 * n) for n in (1, 2, 4, 64)],
    row("niah", "said", 0.0125, memory="off", kind="pk", length=2048),
    row("niah", "said", 0.333, memory="on", kind="w", length=4096, depth=0.5) | {"detail": True},
    row("babilong", "right", 0.41, memory="on", length=1024, qa="mean"),
    row("babilong", "right", 0.99, memory="on", length=1024, qa="qa1"),
    row("ablate", "perplexity", 31.5, variant="no_momentum", length=2048),
    row("depth", "perplexity", 21.5, variant="2", length=2048),
    row("depth", "perplexity", 20.5, variant="2", length=4096),
    *[
        row("lm", "loss by position", 3 - n / 10, memory="on", **{"from": 2**n, "before": 2 ** (n + 1)})
        | {"detail": True}
        for n in range(9)
    ],
    row("my own | task", "score <b>", -1.5, note="a*b_c"),
]


@pytest.fixture
def home(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps({"made_by": "remanence eval", "rows": ROWS}))
    run = tmp_path / "run"
    run.mkdir()
    config = preset("tiny", "mac")
    (run / "config.json").write_text(json.dumps({"model": config.to_dict(), "steps": 40}))
    counts = {"skipped": 0, "leash": 2}
    lines = [
        {"step": n, "loss": 4 / n, "tokens": 1000 * n, "tokens_per_s": 500.0 + n, **counts}
        for n in (10, 20, 30)
    ]
    lines.append({"step": 40, "loss": None, "tokens": 40_000, "tokens_per_s": 540.0, "skipped": 1})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5')
    return tmp_path


@pytest.fixture
def report(home, command, monkeypatch):
    monkeypatch.chdir(home)
    return partial(command, "report")


def tables(text):
    """Markdown's tables, as lists of rows of cells, bold and escapes taken away."""
    found = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [
                re.sub(r"\\(.)", r"\1", cell.replace("**", "")).strip()
                for cell in re.split(r"(?<!\\)\|", line)[1:-1]
            ]
            found[-1].append(cells)
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


class Tables(HTMLParser):
    """HTML's tables likewise."""

    def __init__(self, text):
        super().__init__()
        self.found, self.inside = [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.found.append([])
        elif tag == "tr":
            self.found[-1].append([])
        elif tag in ("td", "th"):
            self.found[-1][-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.found[-1][-1][-1] += data


def cell(table, line, column):
    return next(cells for cells in table if cells[0] == line)[table[0].index(column)]


def test_the_reports_numbers_are_the_rows_and_the_papers(report, home):
    said = report("rows.json", "run", "--out", "r.md").splitlines()
    assert {"r.md", "r.html", "r-plots/training.png"} <= set(said) and all(
        (home / name).is_file() for name in said
    )
    text = (home / "r.md").read_text()
    found = tables(text)
    first, needle, babilong, parts, depth, worth, trained = found[:7]
    on, off = "my_model (01234567), memory on", "my_model (01234567), memory off"
    assert [cell(first, on, name) for name in ("wikitext perplexity", "lambada", "piqa", "hellaswag", "boolq")] == [
        "123.46", "12.34", "56.78", "25.12", "-",
    ]  # fmt: skip
    assert cell(first, "Titans MAC", "piqa") == f"{published.TABLE1['340M']['Titans MAC'][3]:.2f}"
    assert [cell(needle, on, f"PK {n}K") for n in (2, 4, 8, 128)] == ["90.00", "45.00", "22.50", "1.41"]
    assert needle[0].index("PK 16K") < needle[0].index("PK 128K") < needle[0].index("N 2K"), (
        "our lengths stand among theirs"
    )
    assert cell(needle, off, "PK 2K") == "1.25" and cell(needle, on, "W 4K") == "-", (
        "one depth is not the whole"
    )
    assert cell(needle, "Titans MAG", "N 16K") == "98.60"
    assert cell(babilong, on, "1K") == "41.00", "one task of twenty is not the whole"
    assert cell(parts, "w/o momentum: my_model (01234567)", "perplexity") == "31.50"
    assert (
        cell(depth, "depth 2: my_model (01234567)", "4K") == "20.50"
        and cell(depth, "depth 2", "4K") == "15.37"
    )
    assert trained[2] == [
        "run",
        "mac, 2 layers",
        f"{parameters(preset('tiny', 'mac')):,}",
        "30 of 40",
        "30 K",
        "0.1333",
        "530",
        "1",
        "6",
    ]
    assert worth[2:] == [
        ["my_model (01234567)", "niah", "said", "0.0125", "0.9 (+0.888)", "kind pk, length 2048"]
    ]
    everything = [cells for table in found[7:] for cells in table]
    for each in ROWS:
        values = [
            cells
            for cells in everything
            if cells[1:3] == [each["metric"].replace("<", "&lt;"), f"{each['value']:.6g}"]
        ]
        assert bool(values) != bool(each.get("detail"))
    assert any("5,153" in cells and "0.11 to 0.13" in cells for cells in everything)
    assert found[-1][2][1:] == [json.dumps(ORIGIN["model"]), "f00d", "3", "2026-01-02", "two cores"]


def test_the_page_is_the_same_in_one_file(report, home):
    report("rows.json", "run")
    text, page = (home / "report.md").read_text(), (home / "report.html").read_text()
    plain = [
        [[cell.replace("&lt;", "<").replace("&amp;", "&") for cell in cells] for cells in table]
        for table in tables(text)
    ]
    assert Tables(page).found == [[table[0], *table[2:]] for table in plain]
    inside = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]
    named = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert len(inside) >= 5 and inside == [(home / name).read_bytes() for name in named]
    assert all(data.startswith(b"\x89PNG") for data in inside)
    assert not re.search(r"(href|@import|url\(|https?:)", page) and "<b>" not in page and "<b>" not in text


def test_what_is_not_comparable_says_why(report, home):
    report("rows.json")
    text = (home / "report.md").read_text()
    assert "not comparable with the paper: our parameters are not told in the rows (the paper: 340 M)" in text
    assert "the paper does not tell its parameters" in text and "our memory is off, the paper's on" in text
    known = {"parameters": 400_000, "training_tokens": 10**7, "tokenizer": "bytes"}
    same = {"parameters": 350_000_000, "training_tokens": 15 * 10**9, "tokenizer": "Llama-2"}
    for name, origin, expected in (
        (
            "small",
            known,
            "parameters: ours 400 K, the paper's 340 M; training tokens: ours 10 M, the paper's 15 B; tokenizer: ours bytes",  # noqa: E501
        ),
        ("same", same, "of the paper's size, tokens and tokenizer"),
        (
            "perhaps",
            {**same, "tokenizer": "tokenizer.json of 32,000 tokens"},
            "perhaps comparable with it: our tokenizer.json of 32,000 tokens may be the paper's llama-2, or another of its size",  # noqa: E501
        ),
        (
            "other",
            {**same, "tokenizer": "tokenizer.json of 50,000 tokens"},
            "not comparable with the paper: tokenizer: ours",
        ),
        ("large", {**same, "parameters": 1_300_000_000}, "training tokens: ours 15 B, the paper's 100 B"),
    ):
        (home / f"{name}.json").write_text(json.dumps([row("lambada", "accuracy", 0.5, origin)]))
        report(f"{name}.json")
        assert expected in (home / "report.md").read_text()


def test_an_infinity_is_shown_and_counts_nowhere(report, home, monkeypatch):
    """Evaluations write null for what is not finite."""
    drawn = {}
    monkeypatch.setattr(plots, "_drawn", lambda panels, **_: drawn.update(panels) or b"")
    rows = [
        row("wikitext", "word perplexity", None, memory="on"),
        row("wikitext", "word perplexity", 50.0, memory="off"),
        row("lambada", "acc", None),
        *[
            row("depth", "perplexity", value, variant="2", length=2048, run=n)
            for n, value in enumerate((10.0, None, 20.0))
        ],
    ]
    (home / "a.json").write_text(json.dumps(rows))
    report("a.json")
    first, depth, worth, *rest = tables((home / "report.md").read_text())
    assert cell(first, "my_model (01234567), memory on", "wikitext perplexity") == "∞"
    assert cell(first, "my_model (01234567)", "lambada") == "-"
    assert cell(depth, "depth 2: my_model (01234567)", "2K") == "10.00 / ∞ / 20.00"
    assert worth[2][-3:] == ["50", "∞", "-"]
    assert [cells[2] for cells in rest[0] if cells[0].endswith("memory on")] == ["∞"]
    assert drawn[""][1] == {"depth 2: my_model (01234567)": [(2048, 15.0)]}


def test_what_the_memory_is_worth_is_told_of_each_subject(report, home):
    """Models of one name, models of one fingerprint, and recipes: none takes another's place."""
    recipe = {"model": None, "from": "recall.py"}
    origins = [
        {},
        {"from": "other"},
        {"model": {"weights": "fedcba9876543210"}},
        {**recipe, "recipe": "a" * 32},
        {**recipe, "recipe": "b" * 32},
    ]
    rows = [
        row("ablate", "perplexity", 10.0 * (n + 1) + (mode == "off"), origin, memory=mode, variant="linear")
        for n, origin in enumerate(origins)
        for mode in ("on", "off")
    ]
    (home / "a.json").write_text(json.dumps(rows))
    report("a.json")
    worth = next(table for table in tables((home / "report.md").read_text()) if "memory off" in table[0])
    assert [(cells[0], cells[3], cells[4]) for cells in worth[2:]] == [
        ("my_model (01234567)", "11", "10 (-1)"),
        ("other (01234567)", "21", "20 (-1)"),
        ("my_model (fedcba98)", "31", "30 (-1)"),
        ("recall.py (aaaaaaaa)", "41", "40 (-1)"),
        ("recall.py (bbbbbbbb)", "51", "50 (-1)"),
    ]


def test_deviations_and_the_average_are_shown(report, home):
    rows = [
        row("ablate", "perplexity", 31.5, variant="no_momentum", length=2048, seeds=3) | {"deviation": 0.256},
        row("ablate", "accuracy", 0.5, variant="no_momentum", length=2048, seeds=3) | {"deviation": 0.01},
        row("ablate", "perplexity", None, variant="linear", length=2048, seeds=2)
        | {"deviation": float("nan")},
        row("commonsense", "mean accuracy", 0.4321, benchmark="all"),
    ]
    (home / "a.json").write_text(json.dumps(rows))
    report("a.json")
    first, parts, ablate, *_ = tables((home / "report.md").read_text())
    assert cell(first, "my_model (01234567)", "average") == "43.21"
    line = "w/o momentum: my_model (01234567)"
    assert (cell(parts, line, "perplexity"), cell(parts, line, "accuracy")) == (
        "31.50 ± 0.26",
        "50.00 ± 1.00",
    )
    assert cell(parts, "linear memory: my_model (01234567)", "perplexity") == "∞"
    assert [cells[2] for cells in ablate[2:]] == ["31.5 ± 0.256", "0.5 ± 0.01", "∞"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row("wikitext", "word perplexity", 20.0, pages=62, unk=False)], []),
        (
            [row("wikitext", "word perplexity", 20.0, pages=62, unk=True)],
            ["wikitext: our text has its rare words replaced"],
        ),
        ([row("wikitext", "word perplexity", 20.0, pages=3, unk=False)], ["wikitext: only 3 of 62 pages"]),
        ([row("lambada", "accuracy", 0.5) | {"count": 5153}], []),
        ([row("lambada", "accuracy", 0.5) | {"count": 100}], ["lambada: only 100 of 5,153 questions"]),
        (
            [row("commonsense", "acc", 0.5, benchmark="piqa", samples=9) | {"count": 9}],
            ["piqa: only 9 of 1,838 questions"],
        ),
        (
            [row("commonsense", "mean accuracy", 0.5, benchmark="all", samples=9, digest="hub")],
            ["the average: only the first 9 questions of each"],
        ),
        ([row("commonsense", "acc", 0.5, benchmark="siqa", **{"siqa asks": "answers"})], []),
        (
            [row("commonsense", "acc", 0.5, benchmark="siqa", **{"siqa asks": "letters"})],
            ["siqa: our lines ask for a letter"],
        ),
        (
            [row("commonsense", "mean accuracy", 0.5, benchmark="all", **{"siqa asks": "letters"})],
            ["siqa: our lines ask for a letter"],
        ),
        (
            [row("babilong", "right", 0.5, length=1024, qa="mean", shots=0)],
            ["no examples were shown, the paper's are few-shot"],
        ),
        ([row("babilong", "right", 0.5, length=1024, qa="mean", shots=0, fine_tuned=True, tasks=20)], []),
        (
            [row("babilong", "right", 0.5, length=1024, qa="mean", shots=2, fine_tuned=True, tasks=["qa1"])],
            ["2 examples were shown, the paper's tuned models need none", "the mean is of 1 of 20 tasks"],
        ),
        (
            [
                *[
                    row(
                        "babilong",
                        "right",
                        0.5,
                        length=1024,
                        qa=f"qa{n}",
                        shots=0,
                        fine_tuned=True,
                        options=n,
                    )
                    for n in (1, 2, 3)
                ],
                row("babilong", "right", 0.5, length=2048, qa="qa4", shots=0, fine_tuned=True),
                row("babilong", "right", 0.5, length=1024, qa="mean", shots=0, fine_tuned=True),
            ],
            ["the mean is of 3 of 20 tasks"],
        ),
    ],
)
def test_what_was_asked_in_part_or_otherwise_is_said(report, home, rows, expected):
    (home / "a.json").write_text(json.dumps(rows))
    named = ("wikitext", "lambada", "piqa", "siqa", "the average", "babilong")
    (found,) = compare(read([home / "a.json"]).rows)
    (reasons,) = found.reasons.values()
    own = [reason for reason in reasons if reason.startswith(named)]
    assert len(own) == len(expected) and all(
        part in reason for part, reason in zip(expected, own, strict=True)
    ), own


def test_tuned_models_have_the_papers_tuned_panel(report, home):
    """Models that were fine-tuned and others do not share a panel."""
    rows = [
        row("babilong", "right", 0.5 + 0.25 * tuned, length=1024, qa="mean", fine_tuned=tuned)
        for tuned in (False, True)
    ]
    (home / "a.json").write_text(json.dumps(rows))
    assert "report-plots/babilong-fine-tuned.png" in report("a.json")
    shot, tuned, *_ = tables((home / "report.md").read_text())
    assert cell(shot, "my_model (01234567)", "1K") == "50.00" and cell(shot, "Titans (MAC)", "1K") == "76.00"
    assert (
        cell(tuned, "my_model (01234567)", "1K") == "75.00"
        and cell(tuned, "Titans (MAC)-FT", "1K") == "99.00"
    )


def test_every_rows_reasons_are_told(report, home):
    rows = [
        row("lambada", "accuracy", 0.5),
        row("wikitext", "word perplexity", 20.0, pages=3),
        row("wikitext", "word perplexity", 20.0, unk=True),
    ]
    (home / "a.json").write_text(json.dumps(rows))
    report("a.json")
    text = (home / "report.md").read_text()
    assert "only 3 of 62 pages; wikitext: our text has its rare words replaced" in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.json", None, "missing.json: no such file or folder"),
        ("a.json", "{", "a.json: not JSON"),
        ("a.json", b"\xff\xfe", "a.json: not a text file"),
        ("a.json", '{"rows": []}', "a.json: expected rows, as `remanence eval --json` writes them, got none"),
        ("a.json", "[3]", "a.json: row 1: expected an object, got int"),
        (
            "a.json",
            [{**ROWS[0], "value": "7"}],
            "a.json: row 1: value: expected a finite number, or null for an infinity, got '7'",
        ),
        (
            "a.json",
            [{**ROWS[0], "value": float("nan")}],
            "value: expected a finite number, or null for an infinity, got nan",
        ),
        (
            "a.json",
            [ROWS[0], {**ROWS[0], "setting": None}],
            "a.json: row 2: setting: expected an object, got None",
        ),
        (
            "a.json",
            [{k: v for k, v in ROWS[0].items() if k != "provenance"}],
            "row 1: provenance: expected an object",
        ),
        (
            "a.json",
            [row("lambada", "accuracy", 93.0)],
            "row 1: value: expected a share from 0 to 1 for 'accuracy', got 93",
        ),
        ("a.json", [{**ROWS[0], "interval": [1]}], "row 1: interval: expected two numbers, got [1]"),
        ("a.json", [{**ROWS[0], "deviation": "1"}], "row 1: deviation: expected a number from 0 on, got '1'"),
        ("rows.json", None, "rows.json: given twice"),
    ],
)
def test_wrong_files_are_one_line_and_leave_nothing(report, home, name, content, message):
    if content is not None:
        data = (
            content
            if isinstance(content, bytes)
            else (content if isinstance(content, str) else json.dumps(content)).encode()
        )
        (home / name).write_bytes(data)
    before = sorted(home.iterdir())
    assert message in report("rows.json", name, code=2)
    assert sorted(home.iterdir()) == before


def test_wrong_runs_are_one_line(report, home):
    assert "expected files of evaluation rows or folders of training runs, got none" in report(code=2)
    assert "--out: expected a file that ends with .md, got r.txt" in report(
        "rows.json", "--out", "r.txt", code=2
    )
    assert "--out: expected a folder that can be made" in report(
        "rows.json", "--out", "rows.json/r.md", code=2
    )
    metrics = home / "run" / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole.replace('"loss": 0.2,', '"loss": ', 1))
    assert "metrics.jsonl: line 2: not JSON" in report("run", code=2)
    metrics.write_text('{"step": 1, "loss": null, "tokens": 3}\n')
    assert "expected at least one logged step with a loss, got none" in report("run", code=2)
    metrics.unlink()
    assert "run: expected a training run with its metrics.jsonl, which is missing" in report("run", code=2)
    assert not (home / "report.md").exists()


@pytest.mark.parametrize("name", ["r.md", "r.html"])
def test_a_document_of_somebody_else_is_not_overwritten(report, home, name):
    (home / name).write_text("# My notes\n")
    before = sorted(home.iterdir())
    assert f"--out: expected a new file, or an earlier report's, got {name}" in report(
        "rows.json", "--out", "r.md", code=2
    )
    assert (home / name).read_text() == "# My notes\n" and sorted(home.iterdir()) == before
    write([home / "rows.json"], home / "r.md", force=True)
    assert "My notes" not in (home / name).read_text()
    report("rows.json", "--out", "r.md")  # its own it may


def test_a_failure_while_drawing_leaves_the_old_report(report, home, monkeypatch):
    report("rows.json")
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}

    def fails(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("remanence.report.plots.positions", fails)
    (home / "rows.json").write_text(json.dumps(ROWS[1:]))
    before[home / "rows.json"] = (home / "rows.json").read_bytes()
    assert "disk full" in report("rows.json", code=2)
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before


def test_lengths_have_the_papers_names(report, home):
    lengths = (1024, 1000, 2048, 131_072, 1_048_576, 10_000_000, 300)
    assert [label(n) for n in lengths] == ["1K", "1,000", "2K", "128K", "1M", "10,000,000", "300"]
    rows = [
        row("niah", "said", share, kind="pk", length=length) for share, length in ((0.25, 2000), (0.75, 2048))
    ]
    (home / "a.json").write_text(json.dumps(rows))
    assert "report-plots/a-needle-in-a-haystack.png" in report("a.json")
    needle = tables((home / "report.md").read_text())[0]
    assert [cell(needle, "my_model (01234567)", name) for name in ("PK 2K", "PK 2,000")] == ["75.00", "25.00"]


def test_every_row_belongs_to_one_comparison_at_most(home):
    for each in read([home / "rows.json"]).rows:
        assert sum(comparison.cell(each) is not None for comparison in COMPARISONS) <= 1
    assert len(compare(read([home / "rows.json"]).rows)) == 5


def test_the_published_numbers_by_variant_and_as_points():
    assert published.table5()["no_momentum"] == 28.98 and published.table5("long context")["linear"] == 85.34
    assert set(published.table5()) == set(PARTS), "every variant of the grid"
    assert published.figure6("few-shot")["Mamba2.8B"] == [(1024, 52), (2048, 35), (4096, 9), (8192, 0)]
    assert published.figure6("fine-tuned")["RMT-FT"][-1] == (10_485_760, 34)


def test_the_published_numbers_agree_with_one_another():
    """The papers' averages are those of their rows but for the four that are known not to be; Table 5's first rows are
    means of Tables 1 and 2.
    """
    wrong = set()
    for size, lines in published.TABLE1.items():
        for name, cells in lines.items():
            assert len(cells) == len(published.TABLE1_COLUMNS)
            if abs(sum(cells[2:10]) / 8 - cells[10]) > 0.012:
                wrong.add((size, name))
    assert wrong == {
        ("760M", "TTT"),
        ("400M", "Gated DeltaNet-H2"),
        ("400M", "Titans LMM"),
        ("1.3B", "Titans MAC"),
    }
    for name, key in (
        ("LMM (base)", "LMM"),
        ("+ Attn MAC", "MAC"),
        ("+ Attn MAG", "MAG"),
        ("+ Attn MAL", "MAL"),
    ):
        cells = published.TABLE1["400M"][f"Titans {key}"]
        needles = [x for kind in published.TABLE2[f"Titans {key}"].values() for x in kind]
        assert published.TABLE5[name] == pytest.approx(
            (sum(cells[:2]) / 2, cells[10], sum(needles) / 12), abs=0.006
        )
    for lines, lengths in (
        (published.FIGURE6, published.FIGURE6_LENGTHS),
        (published.FIGURE7, published.FIGURE7_LENGTHS),
    ):
        assert all(len(cells) == len(lengths) for panel in lines.values() for cells in panel.values())


def test_a_large_perplexity_does_not_fill_the_table():
    assert _cell([Measured(140726806364.76), Measured(31.524)]) == "1.41e+11 / 31.52"
    assert _cell([Measured(float("inf"))]) == "∞"
