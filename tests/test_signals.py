"""Commands that save a memory: a signal ends them with what they have read saved, and two never save the same file."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from models import model

from remanence import Session
from remanence.cli import main
from remanence.io.files import locked_target

TEXT = "It was the best of times, it was the worst of times. " * 200

SLOW = """
import sys, time
from remanence.inference import session
from remanence.cli import main
read, stream = session.Session._read, session.Session.stream

def slow(self, tokens):
    piece = read(self, tokens)
    print("piece", flush=True)
    time.sleep(0.5)
    return piece

def slow_stream(self, *args, **kwargs):
    for text in stream(self, *args, **kwargs):
        yield text
        print("piece", flush=True)
        time.sleep(0.5)

session.Session._read, session.Session.stream = slow, slow_stream
main(sys.argv[1:])
"""


@pytest.fixture
def folder(tmp_path):
    model("lmm", torch.float32, vocab_size=257).save(tmp_path / "m")
    (tmp_path / "book.txt").write_text(TEXT)
    return tmp_path


def started(folder, *arguments, lines=b""):
    """A slow command, once it has read or said something."""
    command = [sys.executable, "-c", SLOW, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        command,
        cwd=folder,
        **pipes,
        env={**os.environ, "REMANENCE_AUTOSAVE": "999"},
        preexec_fn=interruptible,
    )
    process.stdin.write(lines)
    process.stdin.flush()
    while b"piece" not in (line := process.stdout.readline()):
        assert line, process.stderr.read().decode()
    return process


def interruptible():
    """Ctrl-C interrupts, also where the tests run in the background of a shell, which ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ended(process, sent):
    process.send_signal(sent)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors.decode()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_read_saves_what_it_has_read(folder, capsys, sent, code):
    process = started(folder, "read", "m", "book.txt", "--save", "a.mem")
    found, errors = ended(process, sent)
    assert found == code and "Traceback" not in errors
    assert "saved in a.mem; --resume continues" in errors
    session = Session(folder / "m").load(folder / "a.mem")
    assert 0 < session.tokens < len(TEXT)
    assert sorted(os.listdir(folder)) == ["a.mem", "book.txt", "m"], "nothing is left"
    main(["read", str(folder / "m"), str(folder / "book.txt"), "--save", str(folder / "a.mem"), "--resume"])
    assert session.load(folder / "a.mem").tokens == len(TEXT)


@pytest.mark.slow
def test_chat_saves_what_was_said(folder):
    process = started(folder, "chat", "m", "--memory-file", "a.mem", "--max-tokens", "50", lines=b"hello\n")
    found, errors = ended(process, signal.SIGTERM)
    assert found == 143 and errors.strip().splitlines()[-1] == "remanence: terminated"
    assert 6 < Session(folder / "m").load(folder / "a.mem").tokens < 56
    assert ".a.mem.lock" not in os.listdir(folder)


def test_the_handler_is_there_for_a_command_alone(folder):
    before = signal.getsignal(signal.SIGTERM)
    main(["info"])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [
    ["read", "m", "book.txt", "--save", "a.mem"],
    ["read", "m", "book.txt", "--save", "a.mem", "--resume"],
    ["generate", "m", "--prompt", "a", "--save", "a.mem", "--max-tokens", "1"],
    ["chat", "m", "--memory-file", "a.mem"],
])  # fmt: skip
def test_the_second_to_save_a_file_is_refused(folder, capsys, monkeypatch, command):
    monkeypatch.chdir(folder)
    with (
        locked_target(folder / "a.mem", "another command"),
        pytest.raises(SystemExit) as stopped,
    ):
        main(command)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert stopped.value.code == 2
    assert error == f"remanence: error: {folder / 'a.mem'}: in use by another command that is still going on; wait " \
        "for it or end it"  # fmt: skip
    assert sorted(os.listdir(folder)) == ["book.txt", "m"]
    monkeypatch.setattr("builtins.input", lambda _: (_ for _ in ()).throw(EOFError))
    main(command)  # free again


def test_a_lock_of_another_process_ends_with_it(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    process = started(folder, "read", "m", "book.txt", "--save", "a.mem")
    with pytest.raises(SystemExit) as stopped:
        main(["read", "m", "book.txt", "--save", "a.mem"])
    assert stopped.value.code == 2 and "a.mem: in use by another command" in capsys.readouterr().err
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert ".a.mem.lock" in os.listdir(folder)
    main(["read", "m", "book.txt", "--save", "a.mem"])
    assert ".a.mem.lock" not in os.listdir(folder)
    assert Session(folder / "m").load(folder / "a.mem").tokens == len(TEXT)


def test_a_link_and_its_file_are_one(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    os.symlink("a.mem", "link.mem")
    with (
        locked_target(folder / "a.mem", "another command"),
        pytest.raises(ValueError, match=r"a\.mem: in use"),
        locked_target(folder / "link.mem", "another command"),
    ):
        pass
    with locked_target(folder / "b.mem", "x"), locked_target(folder / "c.mem", "x"):
        time.sleep(0)
