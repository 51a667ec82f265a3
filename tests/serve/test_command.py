"""``remanence serve`` and ``remanence keys`` as commands: arguments, a missing extra, and how a server ends."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from sentence_models import chat_folder

from remanence import cli
from remanence.cli.serve import Serve
from remanence.serve.database import Database
from remanence.serve.server import listen

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "model"
    path.mkdir()
    with torch.device("cpu"):
        return chat_folder(path)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", 70000), "--port: expected an integer from 0 to 65535, got 70000"),
        (("--timeout", 0), "--timeout: expected a number of at least 1, got 0.0"),
        (("--rows", 0), "--rows: expected a number of at least 1, got 0"),
        (("--replicas", 0), "--replicas: expected a number of at least 1, got 0"),
        (("--store", "nothing://x"), "--store: expected a URL that can be opened, got one of nothing://"),
        (("--keep-versions", 0), "--keep-versions: expected a number of at least 1, got 0"),
        (("--host", "0.0.0.0", "--port", 0), "host: expected an API key for a server that others can reach"),
        (("--host", "nowhere.invalid"), "--host: expected an address of this machine, got nowhere.invalid"),
        (("--data", "a.txt/x"), "--data: expected a folder that can be made, got a.txt/x"),
        (("nothing",), "nothing"),
    ],
)
def test_wrong_arguments(command, folder, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setenv("REMANENCE_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("")
    model = () if arguments == ("nothing",) else (folder,)
    assert message in command("serve", *model, *arguments, "--device", "cpu", code=2)


def test_a_port_in_use(command, folder, tmp_path):
    with listen("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        error = command("serve", folder, "--port", port, "--data", tmp_path / "data", code=2)
    assert f"--port: expected a free one of 127.0.0.1, got {port}" in error


def test_without_the_extra_one_line_names_it(command, folder, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("remanence.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    error = command("serve", folder, "--data", tmp_path / "data", code=2)
    assert "serve needs the extra 'serve': pip install 'remanence[serve]'" in error


def test_replicas_need_an_extra_of_their_own(command, folder, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "remanence.serve.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    error = command("serve", folder, "--data", tmp_path / "data", "--replicas", 2, code=2)
    assert "--replicas needs the extra 'ray': pip install 'remanence[ray]'" in error


def test_the_limits_of_the_command_are_those_of_the_server():
    from remanence.serve.server import Settings

    own, found = Serve(), Settings(name="x", folder=Path())
    assert (own.rows, own.waiting, own.timeout, own.grace, own.keep_versions) == (
        found.max_rows, found.limits.max_waiting, found.limits.timeout, found.grace, found.keep_versions,
    )  # fmt: skip
    assert (own.max_memories, own.tokens_per_minute) == (found.limits.max_memories, 0)


def test_keys(command, tmp_path):
    data = ("--data", tmp_path / "data")
    first, second = (command("keys", "add", "ann", *data).strip() for _ in range(2))
    assert first.startswith("sk-rem-") and first != second
    listed = command("keys", "list", *data).splitlines()
    assert [line.split()[-1] for line in listed] == ["ann", "ann"] and first not in "".join(listed)
    identifier = listed[0].split()[0]
    command("keys", "remove", identifier, *data)
    assert command("keys", "list", *data).splitlines() == listed[1:]
    assert "expected the identifier of a key" in command("keys", "remove", identifier, *data, code=2)
    assert "name: expected one to add, got None" in command("keys", "add", *data, code=2)
    assert (tmp_path / "data").stat().st_mode & 0o077 == 0
    database = Database(tmp_path / "data" / "memories.sqlite")
    assert len(database.all_keys()) == 1
    database.close()


@pytest.fixture
def started(folder, tmp_path):
    """A server in a process of its own, and its address."""
    command = [sys.executable, "-m", "remanence", "serve", str(folder), "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--data", str(tmp_path / "data")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    line = process.stdout.readline()
    yield process, re.search(r"http://127\.0\.0\.1:\d+", line)[0]
    process.kill()
    process.wait()


def ask(url, **settings):
    body = {"model": "model", "user": "ann", "messages": [{"role": "user", "content": "hello"}], **settings}
    return {"url": f"{url}/v1/chat/completions", "json": {"temperature": 0, **body}, "timeout": 60}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_stopped_completes_its_answers(started, tmp_path, number):
    """The answer under way is whole and on disk, and the exit code is 0."""
    process, url = started
    with httpx.stream("POST", **ask(url, stream=True, max_tokens=400)) as response:
        lines = response.iter_lines()
        while '"content": ""' in (line := next(lines)) or not line:
            pass
        process.send_signal(number)
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert rest[-1]["choices"][0]["finish_reason"] in ("length", "stop")
    assert process.wait(timeout=60) == 0, process.stderr.read()
    assert "Traceback" not in process.stderr.read()
    database = Database(tmp_path / "data" / "memories.sqlite")
    memory = database.memory("local", "ann")
    assert memory.head == response.headers["X-Memory-Version"]
    assert database.version("local", memory.head).tokens > 100
    database.close()


@pytest.mark.slow
def test_a_killed_server_leaves_the_version_before(started, tmp_path):
    process, url = started
    first = httpx.post(**ask(url, max_tokens=4))
    assert first.status_code == 200, first.text
    with httpx.stream("POST", **ask(url, stream=True, max_tokens=60_000)) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        process.kill()
        with pytest.raises(httpx.HTTPError):
            list(lines)
    process.wait()
    database = Database(tmp_path / "data" / "memories.sqlite")
    assert database.memory("local", "ann").head == first.headers["X-Memory-Version"]
    database.close()


def test_help_lists_the_commands(capsys):
    for name in ("serve", "keys"):
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        assert name in capsys.readouterr().out
