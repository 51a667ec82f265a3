"""A report has the numbers of its rows and runs; wrong input leaves no files."""

import base64
import json
import re
from functools import partial
from html.parser import HTMLParser

import pytest

from remanence.config import preset
from remanence.evaluate import published
from remanence.evaluate.grid import ABLATIONS
from remanence.model import parameters
from remanence.report import write

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


def test_the_reports_numbers_are_the_rows(report, home):
    said = report("rows.json", "run", "--out", "r.md").splitlines()
    assert set(said) == {"r.md", "r.html", "r-plots/training.png", "r-plots/positions.png"}
    assert all((home / name).is_file() for name in said)
    trained, *found = tables((home / "r.md").read_text())
    assert trained[2] == [
        "run",
        "mac, 2 layers",
        f"{parameters(preset('tiny', 'mac')):,}",
        "30 of 40",
        "30,000",
        "0.1333",
        "530",
        "1",
        "6",
    ]
    effect = found[-2]
    assert effect[2:] == [
        ["my_model (01234567)", "niah", "said", "0.0125", "0.9 (+0.888)", "kind pk, length 2048"]
    ]
    everything = [cells for table in found for cells in table]
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
    assert len(inside) == 2 and inside == [(home / name).read_bytes() for name in named]
    assert all(data.startswith(b"\x89PNG") for data in inside)
    assert not re.search(r"(href|@import|url\(|https?:)", page) and "<b>" not in page and "<b>" not in text


def test_an_infinity_is_shown_and_counts_nowhere(report, home, monkeypatch):
    """Evaluations write null for what is not finite."""
    drawn = []

    def curves(path, lines, **_):
        drawn.append(lines)
        path.write_bytes(b"")
        return path

    monkeypatch.setattr("remanence.report.sections.curves", curves)
    rows = [
        row("wikitext", "word perplexity", None, memory="on"),
        row("wikitext", "word perplexity", 50.0, memory="off"),
        row("lambada", "acc", None),
        *[row("lm", "loss by position", value, **{"from": n}) for n, value in enumerate((2.0, None, 1.0))],
    ]
    (home / "a.json").write_text(json.dumps(rows))
    report("a.json")
    wikitext, lambada, lm, effect, _ = tables((home / "report.md").read_text())
    assert [cells[2] for cells in wikitext[2:]] == ["∞", "50"]
    assert [cells[2] for cells in lambada[2:]] == ["-"] and [cells[2] for cells in lm[2:]] == ["2", "∞", "1"]
    assert effect[2][-3:] == ["50", "∞", "-"]
    assert drawn == [{"my_model (01234567)": [(1, 2.0), (2, 1.0)]}]


def test_the_effect_of_the_memory_is_given_for_each_model(report, home):
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
    effect = next(table for table in tables((home / "report.md").read_text()) if "memory off" in table[0])
    assert [(cells[0], cells[3], cells[4]) for cells in effect[2:]] == [
        ("my_model (01234567)", "11", "10 (-1)"),
        ("other (01234567)", "21", "20 (-1)"),
        ("my_model (fedcba98)", "31", "30 (-1)"),
        ("recall.py (aaaaaaaa)", "41", "40 (-1)"),
        ("recall.py (bbbbbbbb)", "51", "50 (-1)"),
    ]


def test_deviations_are_shown(report, home):
    rows = [
        row("ablate", "perplexity", 31.5, variant="no_momentum", length=2048, seeds=3) | {"deviation": 0.256},
        row("ablate", "accuracy", 0.5, variant="no_momentum", length=2048, seeds=3) | {"deviation": 0.01},
        row("ablate", "perplexity", None, variant="linear", length=2048, seeds=2)
        | {"deviation": float("nan")},
    ]
    (home / "a.json").write_text(json.dumps(rows))
    report("a.json")
    ablate, *_ = tables((home / "report.md").read_text())
    assert [cells[2] for cells in ablate[2:]] == ["31.5 ± 0.256", "0.5 ± 0.01", "∞"]


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
        ("a.json", [{**ROWS[0], "interval": [1]}], "row 1: interval: expected two numbers, got [1]"),
        (
            "a.json",
            [{**ROWS[0], "deviation": "1"}],
            "row 1: deviation: expected a number of at least 0, got '1'",
        ),
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
    assert f"--out: expected a new file or an earlier report, got {name}" in report(
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

    monkeypatch.setattr("remanence.report.sections._position_plot", fails)
    (home / "rows.json").write_text(json.dumps(ROWS[1:]))
    before[home / "rows.json"] = (home / "rows.json").read_bytes()
    assert "disk full" in report("rows.json", code=2)
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before


def test_the_published_numbers_are_complete():
    assert set(published.TABLE5) == set(ABLATIONS), "every variant of the task ablate"
    assert published.figure6("few-shot")["Mamba2.8B"] == [(1024, 52), (2048, 35), (4096, 9), (8192, 0)]
    assert published.figure6("fine-tuned")["RMT-FT"][-1] == (10_485_760, 34)
    assert published.nearest_figure7(400e6) == "360M"
    for lines, lengths in (
        (published.FIGURE6, published.FIGURE6_LENGTHS),
        (published.FIGURE7, published.FIGURE7_LENGTHS),
    ):
        assert all(len(cells) == len(lengths) for panel in lines.values() for cells in panel.values())
