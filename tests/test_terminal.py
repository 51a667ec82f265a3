"""Nothing from a file reaches the terminal raw: control characters are shown, not sent.

The commands meet files of a stranger, on a terminal and on a pipe. What rich sends itself, colours and the cursor's way
along a bar, is taken out of what came before it is looked at.
"""

import io
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from remanence import cli
from remanence.cli import models
from remanence.cli.console import Console
from remanence.cli.evaluate import table
from remanence.cli.progress import Progress
from remanence.evaluate.task import Row
from remanence.inference import generate, memfile
from remanence.io.tensors import describe, write_tensors
from remanence.runtime.terminal import escape_controls
from remanence.tokenizers.tokens import byte_level_json

ROOT = Path(__file__).parent.parent
SEQUENCES = "\x1b]0;owned\x07\x1b[2J\x9b2J\b\r\n\x7f\u202e"
HOSTILE = f"{SEQUENCES}[red]owned[/red][link=x]owned[/link]"
NAME = HOSTILE.replace("/", "")
"""The same, as a file can be named."""
HARMLESS = "\\x1b]0;owned\\x07\\x1b[2J\\u009b2J\\x08\\r\\n\\u007f\\u202e[red]owned"
RICH = re.compile(r"\r?\x1b\[[0-9;]*[mAK]|\x1b\[\?25[hl]")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Terminal(io.StringIO):
    """In the place of stdout and stderr; `said` is what came, without rich's own sequences."""

    def isatty(self):
        return True

    @property
    def said(self):
        return RICH.sub("", self.getvalue())


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    """Terminals are so wide that nothing is wrapped, and have colours."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "2000")


@contextmanager
def on_terminal():
    terminal = Terminal()
    with redirect_stdout(terminal), redirect_stderr(terminal):
        yield terminal


def run(*arguments, code=0):
    """``remanence ...`` on a terminal: what it said, after checking that, and the exit code."""
    came = 0
    with on_terminal() as terminal:
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            came = stop.code
    assert came == code, terminal.said
    assert not CONTROL.search(terminal.said), ascii(terminal.said)
    if code == 2:  # a bar may have been there before
        error = terminal.said[terminal.said.rindex("remanence: error: ") :]
        assert error.endswith("\n") and error.count("\n") == 1, terminal.said
    return terminal.said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untrained model of bytes."""
    folder = tmp_path_factory.mktemp("home") / "m"
    cli.main(["new", "tiny", str(folder), "--variant", "lmm"])
    return folder


def memory_file(path):
    """A memory file that is whole, whose every word is hostile."""
    tensors = {f"{HOSTILE}.layers.0": torch.ones(1, 1, 1, 2, 2), f"{HOSTILE}.position": torch.tensor([3])}
    tensors |= {f"{HOSTILE}.store.written": torch.tensor([1]), f"{HOSTILE}.store.position": torch.ones(1, 1)}
    header = {
        "format": memfile.FORMAT,
        "schema": str(memfile.SCHEMA),
        "config": json.dumps({"pattern": [HOSTILE], HOSTILE: HOSTILE}),
        "fingerprint": json.dumps([HOSTILE, HOSTILE]),
        "tokens": "[3]",
        "state": json.dumps({name: describe(tensor) for name, tensor in tensors.items()}),
        "notes": json.dumps({"source": HOSTILE, HOSTILE: 1}),
        "large": "{}",
    }
    checksum = memfile._checksum(tensors, header)
    write_tensors(path, tensors, {**header, "checksum": checksum}, digest=False)
    return path


def test_control_characters_are_shown_one_by_one():
    assert escape_controls(HOSTILE, allowed="").startswith(HARMLESS)
    assert escape_controls("a\tb\nc") == "a\tb\nc" and escape_controls("a\tb\nc", allowed="") == "a\\tb\\nc"
    assert escape_controls("\udc9b") == "\\udc9b", "a byte of a file's name that is no UTF-8"
    whole = "".join(map(chr, [*range(0x3000), *range(0xD7F0, 0xE010)]))
    assert not CONTROL.search(escape_controls(whole, allowed="\n")) and escape_controls(
        escape_controls(whole)
    ) == escape_controls(whole)
    written = "Ünï \\x1b 日本語 שלום 👩\u200d🔬 می\u200cخ"
    assert escape_controls(written) == written, (
        "letters, and the joiners that some scripts need, are as they are"
    )
    text = json.dumps({HOSTILE: HOSTILE}, ensure_ascii=False)
    assert json.loads(escape_controls(text)) == {HOSTILE: HOSTILE}, "JSON is still JSON, of the same text"


def test_a_strangers_memory_file(folder, tmp_path):
    path = memory_file(tmp_path / "x.mem")
    said = run("inspect", path)
    assert said.count(HARMLESS) >= 2, "the names of a memory and of a store, with their brackets"
    assert json.loads(run("inspect", path, "--json"))["config"]["pattern"] == [HOSTILE]
    assert "another configuration" in run("generate", folder, "--memory-file", path, "--prompt", "x", code=2)
    write_tensors(path, {HOSTILE: torch.ones(1)}, {"format": memfile.FORMAT, "schema": HOSTILE})
    run("inspect", path, code=2)
    path.write_bytes((20 + len(HOSTILE)).to_bytes(8, "little") + json.dumps({HOSTILE: 1}).encode())
    run("inspect", path, code=2)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": HOSTILE},
        {"remanence": {"pattern": [HOSTILE]}},
        {"remanence": {HOSTILE: 1}},
        {"remanence": {"memory": {"net": HOSTILE}}},
        {"remanence": {"dim": HOSTILE}},
    ],
)
def test_a_strangers_model(tmp_path, change):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "remanence", "remanence": {}} | change))
    run("inspect", tmp_path, code=2)


def test_a_strangers_tokenizer(folder, tmp_path):
    path = tmp_path / "tokenizer.json"
    for content in (
        f'{{"{HOSTILE}',
        json.dumps({HOSTILE: 1}),
        json.dumps(byte_level_json() | {"decoder": {"type": HOSTILE}}),
    ):
        path.write_text(content)
        assert "tokenizer.json" in run("new", "tiny", tmp_path / "m", "--tokenizer", path, code=2)
    path.write_text(json.dumps(byte_level_json() | {"version": "1.0", "truncation": None, "model": {}}))
    (tmp_path / "tokenizer_config.json").write_text(HOSTILE)
    run("new", "tiny", tmp_path / "m", "--tokenizer", path, code=2)


def test_names_of_files(folder, tmp_path):
    save, text = tmp_path / f"{NAME}.mem", tmp_path / NAME
    assert "no such file" in run("inspect", text, code=2)
    text.write_text("some text")
    assert HARMLESS in run("read", folder, text, "--save", save)
    assert HARMLESS in run("inspect", save)
    assert HARMLESS in run("lens", folder, "--text", text, "--out", tmp_path / f"{NAME}.html")
    run("data", "prepare", text, "--out", text, code=2)
    run("inspect", folder, NAME, code=2)
    run("train", NAME, "--dry-run", code=2)
    run("train", "recall", "--dry-run", f"--{NAME}=1", code=2)
    undecodable = os.fsdecode(bytes(tmp_path) + b"/\x9b2J.mem")
    assert "\\udc9b2J.mem: no such file" in run("inspect", undecodable, code=2)


def test_a_strangers_corpus(tmp_path):
    source, out = tmp_path / "texts", tmp_path / "out"
    source.mkdir()
    (source / f"{NAME}.jsonl").write_text(json.dumps({HOSTILE: HOSTILE}) + "\n")
    assert HARMLESS in run("data", "prepare", source, "--out", out, code=2)
    (source / f"{NAME}.jsonl").write_text(json.dumps({"text": HOSTILE}) + "\n")
    run("data", "prepare", source, "--out", out)
    path = next(out.glob("*.json"))
    index = json.loads(path.read_text())
    train = ["train", "books_small", "--dry-run", f"--data.path={out}"]
    for change in ({"format": HOSTILE}, {"shards": [{**index["shards"][0], "name": HOSTILE}]}):
        path.write_text(json.dumps(index | change))
        run(*train[:2], "--out", tmp_path / "run", *train[3:], "--device=cpu", code=2)


def test_a_strangers_results(tmp_path):
    row = {"task": HOSTILE, "metric": HOSTILE, "value": 1.0, "setting": {HOSTILE: HOSTILE}}
    path, out = tmp_path / "r.json", tmp_path / f"{NAME}.md"
    path.write_text(json.dumps({"rows": [row]}))
    assert "provenance" in run("report", path, "--out", out, code=2)
    path.write_text(json.dumps({"rows": [row | {"provenance": {"from": HOSTILE, HOSTILE: HOSTILE}}]}))
    said = run("report", path, "--out", out)
    assert said.count("\n") == said.count(HARMLESS) == 2, "a line for each file"


def test_a_table_shows_text_as_it_is_typed():
    settings = [{"memory": "on", "text": HOSTILE, HOSTILE: number} for number in (1, 2)]
    rows = [Row(task=HOSTILE, metric=HOSTILE, value=1.0, setting=setting) for setting in settings]
    with on_terminal() as terminal:
        Console().print(table(rows, ["on"]))
    whole = f"{HARMLESS}[/red][link=x]owned[/link]"
    assert terminal.said.count(whole) == 5 and not CONTROL.search(terminal.said), ascii(terminal.said)


def test_bars_and_what_is_said_beside_them():
    with on_terminal() as terminal, Progress(every=0, keep=True) as progress:
        bar = progress.add("reading", 4, HOSTILE)
        bar.update(1, HOSTILE)
        progress.bars.refresh()
        bar.begin(HOSTILE, 4)
        bar.update(2)
        progress.bars.refresh()
        print("beside\x1b]8;;http://owned\x1b\\\x9b2J", file=sys.stderr)
    assert terminal.said.count(HARMLESS) >= 3 and not CONTROL.search(terminal.said), ascii(terminal.said)
    assert "beside\\x1b]8;;http://owned" in terminal.said


def test_plain_lines_of_a_bar(capsys):
    Progress(every=0).add(HOSTILE, 4).update(1, HOSTILE)
    said = capsys.readouterr().err
    assert said.count(HARMLESS) == 2 and said.count("\n") == 1 and not CONTROL.search(said)


@pytest.fixture
def says(monkeypatch):
    """Has any model say a text, whatever its weights."""

    def force(text):
        tokens = {}
        raw = text.encode()

        def choose(logits, sampling, generator):
            place = tokens[generator] = tokens.get(generator, -1) + 1
            return raw[place] if place < len(raw) else 256

        monkeypatch.setattr(generate, "choose", choose)

    return force


def test_what_a_model_says(says, folder, monkeypatch):
    ask = ["generate", folder, "--prompt"]
    says(f"a\tb\n{SEQUENCES}")
    assert run(*ask, "x") == escape_controls(f"a\tb\n{SEQUENCES}\n")
    says("\x1b[2J\x9b")
    lines = [json.loads(line) for line in run(*ask, "x", HOSTILE).splitlines()]
    assert lines == [{"prompt": prompt, "text": "\x1b[2J\x9b"} for prompt in ("x", HOSTILE)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert run("chat", folder) == "\\x1b[2J\\u009b\n"


def test_what_a_model_says_stays_raw_on_a_pipe_and_nothing_else_does(says, folder, capfdbinary, monkeypatch):
    says("\x1b[2J\x9b\r\n")
    cli.main(["generate", str(folder), "--prompt", "x"])
    assert capfdbinary.readouterr().out == b"\x1b[2J\xc2\x9b\r\n\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    cli.main(["chat", str(folder)])
    assert capfdbinary.readouterr().out == b"\x1b[2J\xc2\x9b\r\n\n"
    cli.main(["generate", str(folder), "--prompt", "x", "y"])
    line = json.dumps({"prompt": "y", "text": "\x1b[2J\x9b\r\n"}, ensure_ascii=False)
    assert capfdbinary.readouterr().out.split(b"\n")[1] == line.encode()
    with pytest.raises(SystemExit):
        cli.main(["inspect", NAME])
    said = capfdbinary.readouterr().err.decode()
    assert HARMLESS in said and said.count("\n") == 1 and not CONTROL.search(said)


def test_what_others_print_and_our_own_defects(monkeypatch):
    def speak(self):
        print(HOSTILE)
        sys.stdout.writelines([HOSTILE])
        sys.stderr.write(HOSTILE)
        raise RuntimeError(HOSTILE)

    monkeypatch.setattr(models.Info, "run", speak)
    said = run("info", code=1)
    assert "Traceback" in said and said.count(escape_controls(HOSTILE)) == 4


def test_a_wrong_argument_is_one_plain_line(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as the parser's own library colours its message on a terminal
    said = run("nonsense", code=2)
    assert said.startswith("remanence: error: ") and said.count("\n") == 1
    assert "x1b" not in said and "╭" not in said and "nonsense" in said


def test_a_real_terminal(tmp_path):
    """A memory file, a warning, a log's line: as a terminal gets them."""
    pty = pytest.importorskip("pty")
    path = memory_file(tmp_path / f"{NAME}.mem")
    code = """
import logging, sys, warnings
from remanence.cli import Inspect, main
def run(self, inspect=Inspect.run):
    inspect(self)
    warnings.warn(sys.argv[1])
    logging.warning(sys.argv[1])
Inspect.run = run
main(["inspect", sys.argv[1]])
"""
    ours, theirs = pty.openpty()
    options = {"cwd": ROOT, "stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], **options) as process:
        os.close(theirs)
        came = b""
        try:
            while piece := os.read(ours, 1 << 16):
                came += piece
        except OSError:  # how Linux says that the other end has been closed
            pass
        os.close(ours)
    said = RICH.sub("", came.decode().replace("\r\n", "\n"))
    assert process.returncode == 0 and b"\x1b[" in came, "with rich's own colours"
    assert "UserWarning" in said and "WARNING:root" in said
    assert said.count(HARMLESS) >= 3 and said.count("owned\\x07") >= 5, ascii(said)
    assert not CONTROL.search(said), ascii(said)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = set()

    def handle_starttag(self, tag, attributes):
        self.found.add(tag)


def test_pages_have_no_tags_but_their_own(folder, tmp_path):
    """A page is no terminal, but a file's words are no part of its source either."""
    injected = "</script><owned onload=x>\"'&lt;owned>"
    name = injected.replace("/", "")
    (tmp_path / name).write_text(injected)
    provenance = {"from": injected, injected: injected}
    row = {"task": injected, "metric": injected, "value": 1.0, "setting": {injected: injected}}
    (tmp_path / "r.json").write_text(json.dumps({"rows": [row | {"provenance": provenance}]}))
    cli.main(["lens", str(folder), "--text", str(tmp_path / name), "--out", str(tmp_path / "lens.html")])
    cli.main(["report", str(tmp_path / "r.json"), "--out", str(tmp_path / "report.md")])
    for page in ("lens.html", "report.html"):
        tags = Tags()
        text = (tmp_path / page).read_text()
        tags.feed(text)
        assert "body" in tags.found and "owned" in text and "owned" not in tags.found
    assert "<owned" not in (tmp_path / "report.md").read_text()
