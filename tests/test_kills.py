"""Killed before any system call that writes, a command that is started again ends as if it had not been."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killing.py")


def killed(folder, *arguments):
    """The program is a process of its own, as it forks: what has computed something has threads, and may not."""
    command = [sys.executable, str(PROGRAM), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(result):
    assert not result["failed"], result["failed"]
    assert not result["not flushed"], result["not flushed"]
    assert result["kills"] == result["identical"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ptrace is Linux's")
def test_some_of_the_writes_of_every_command(tmp_path):
    found = killed(tmp_path, "--some", "3")
    assert [result["command"] for result in found] == ["train", "read", "prepare", "eval", "chat", "serve"]
    for result in found:
        check(result)


@pytest.mark.exhaustive
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ptrace is Linux's")
@pytest.mark.parametrize("command", ["train", "read", "prepare", "eval", "chat", "serve"])
def test_all_writes(tmp_path, command):
    [result] = killed(tmp_path, command)
    assert result["kills"] == result["writes"]
    check(result)
