"""Threads on a CPU: one where several are no faster, chosen around a model's own calls and never against the user."""

import json

import pytest
import torch
from models import model

from remanence import Model, Session
from remanence.cli import main
from remanence.inference import threads
from remanence.runtime import device

MOST = 4


@pytest.fixture
def cores(monkeypatch):
    """A machine of four cores at PyTorch's default; `cores(busy)` says whether other processes use them."""
    for name in device.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: set(range(MOST)), raising=False)
    monkeypatch.setattr(device, "INITIAL_THREADS", MOST)
    monkeypatch.setattr(threads, "_FASTEST", type(threads._FASTEST)())
    before = torch.get_num_threads()
    torch.set_num_threads(MOST)

    def set_load(busy):
        def seconds(work):
            work()
            number = torch.get_num_threads()
            return number * 10.0 if busy else 1 / number

        monkeypatch.setattr(device, "_seconds", seconds)

    yield set_load
    torch.set_num_threads(before)


@pytest.fixture
def used(monkeypatch):
    """The numbers of threads with which models have been run, outside of trials."""
    found, trace, trial = [], Model.trace, threads._run
    inside = []

    def traced(self, *given, **fields):
        if not inside:
            found.append(torch.get_num_threads())
        return trace(self, *given, **fields)

    def tried(subject, tokens):
        inside.append(True)
        trial(subject, tokens)
        inside.pop()

    monkeypatch.setattr(Model, "trace", traced)
    monkeypatch.setattr(threads, "_run", tried)
    return found


def subject():
    return model("lmm", torch.float32, vocab_size=257).eval()


@pytest.mark.parametrize("busy", [True, False])
def test_a_session_runs_with_the_faster_number_and_restores_it(cores, used, busy):
    cores(busy)
    session = Session(subject())
    session.read("A text to read.")
    for _ in session.stream("And then", max_tokens=3):
        assert torch.get_num_threads() == MOST, "between two tokens the user's code runs"
    assert torch.get_num_threads() == MOST
    assert set(used) == {1 if busy else MOST}


def test_a_small_gain_is_not_worth_the_cores(cores, monkeypatch):
    cores(busy=False)
    monkeypatch.setattr(device, "_seconds", lambda work: 1.0 if torch.get_num_threads() == 1 else 0.95)
    assert device.fastest_threads(lambda: None, lambda: None) == 1


def test_the_choice_is_made_once_for_a_model(cores, used):
    cores(busy=True)
    shared = subject()
    Session(shared).read("one")
    cores(busy=False)
    Session(shared).read("two")
    assert set(used) == {1}, "the same numbers to the last bit, however the load changes"


@pytest.mark.parametrize("how", [*device.VARIABLES, "set_num_threads"])
def test_a_number_that_the_user_has_set_stays(cores, used, monkeypatch, how):
    cores(busy=True)
    if how == "set_num_threads":
        torch.set_num_threads(3)
    else:
        monkeypatch.setenv(how, str(MOST))
    Session(subject()).read("A text.")
    assert set(used) == {torch.get_num_threads()} == {3 if how == "set_num_threads" else MOST}
    assert device.fastest_threads(pytest.fail, pytest.fail) == torch.get_num_threads(), (
        "there is nothing to try"
    )


def test_commands_choose_too(cores, used, tmp_path, monkeypatch, capsys):
    cores(busy=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("It was a dark and stormy night. " * 40)
    main(["new", "tiny", "m", "--variant", "lmm"])
    commands = {
        "read": ["read", "m", "text", "--save", "a.mem"],
        "generate": ["generate", "m", "--prompt", "So", "--max-tokens", "2"],
        "lens": ["lens", "m", "--text", "text"],
        "eval": ["eval", "m", "lm", "--lm.data=text", "--json", "rows.json"],
    }
    for name, command in commands.items():
        used.clear()
        main(command)
        assert set(used) == {1}, name
        assert torch.get_num_threads() == MOST, name
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert all(row["provenance"]["hardware"].endswith(", 1 thread") for row in rows)
