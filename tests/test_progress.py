"""Progress: bars on a terminal, plain lines elsewhere, nothing where nothing is to be shown."""

import io
import sys

import pytest

from remanence.cli import progress
from remanence.cli.progress import Progress
from remanence.cli.sessions import show_tokens


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_reading_is_a_plain_line_every_ten_seconds(capsys, clock):
    bar = Progress().add("reading", 100)
    for now, tokens, surprise in ((11.0, 20, 1.5), (12.0, 30, None), (30.0, 60, None)):
        clock[0] = now
        show_tokens(bar, tokens, tokens, surprise)
    first, second = lines(capsys)
    assert first == "reading: 20 %, 20 tokens, 2/s, surprise 1.500, 44 s left"
    assert second == "reading: 60 %, 60 tokens, 2/s, 20 s left"


def test_steps_a_last_line_and_a_late_begin(capsys, clock):
    bar = Progress(steps=True, last=True).add("mac", 20, "a longer title")
    clock[0] = 4.0
    bar.update(10, "loss 1.00")
    bar.update(20, "loss 0.50")
    assert lines(capsys) == ["mac: step 20 of 20, loss 0.50, 0 s left"], "the last is always shown"
    bar = Progress(steps=True, every=0).add("training", 400)
    bar.first = 200  # of a run that was resumed
    clock[0] = 14.0
    bar.update(300)
    assert lines(capsys) == ["training: step 300 of 400, 10 s left"]


def test_other_work_and_a_total_that_is_not_known(capsys, clock):
    bar = Progress().add()
    bar.begin("lm, memory on", 50, 25)
    clock[0] = 10.0
    bar.update(25)
    clock[0] = 20.0
    bar.update(30, total=60)
    assert lines(capsys) == ["lm, memory on: 50 %", "lm, memory on: 50 %, 120 s left"]
    bar.begin("more", None)
    clock[0] = 30.0
    bar.update(3, "3 files")
    assert lines(capsys) == ["more: 3 files"]


def test_what_is_not_visible_prints_nothing(capsys):
    with Progress(every=0, visible=False) as shown:
        shown.add("training", 3).update(3)
    assert lines(capsys) == []


def test_a_terminal_has_bars(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(steps=True, every=0, keep=True) as shown:
        bar = shown.add("mac", 20, "MAC and attention")
        bar.update(10, "loss 1.00")
        bar.begin("lmm", 8)
        bar.update(8, "loss 0.25")
    text = sys.stderr.getvalue()
    assert "MAC and attention" in text and "8/8" in text and "loss 0.25" in text and "lmm" in text
    assert "step" not in text, "no plain lines"
