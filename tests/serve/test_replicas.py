"""Replicas on a Ray cluster of this machine: one is killed under load, and no answer is lost or given twice."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import httpx
import pytest
from serving import GREEDY, MODEL, assistant, chat_session, folder_session, noted_session, user

from remanence import Session
from remanence.inference.chat import Turns
from remanence.serve.server import Settings, listen

pytest.importorskip("ray")
ROOT = Path(__file__).parents[2]
TURNS, CLIENTS = 8, 6
"""The number of messages of each client, and of clients."""


@pytest.fixture
def replicas(tmp_path):
    """The address of two replicas with a SQLite file and a folder, and the folder of their process numbers."""
    from remanence.serve import ray

    (pids := tmp_path / "pids").mkdir()
    chat_session(tmp_path / "model")
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    settings = Settings(name=MODEL, folder=tmp_path / "data", grace=5, keep_versions=2 * TURNS)
    app = ray.application(partial(noted_session, tmp_path / "model", pids), settings, replicas=2)
    options = {"num_cpus": 4, "num_gpus": 0, "object_store_memory": 10**8, "include_dashboard": False}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    ray.start(app, "127.0.0.1", port, runtime_env={"env_vars": {"PYTHONPATH": paths}}, **options)
    try:
        yield f"http://127.0.0.1:{port}", pids
    finally:
        ray.stop()


def numbers(folder):
    return {int(path.name) for path in folder.iterdir()}


class Client(threading.Thread):
    """Asks with its own memory, and sends a request again, with the same key, until it is answered."""

    def __init__(self, url, name):
        super().__init__()
        self.name, self.url, self.answers, self.failed, self.error = name, url, [], 0, None

    def run(self):
        try:
            self.talk()
        except BaseException as error:
            self.error = error

    def talk(self):
        messages = []
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as http:
            for number in range(TURNS):
                messages.append(user(f"I am {self.name}. This is message {number}."))
                done = self.send(http, messages, f"{self.name} {number}")
                text = done.json()["choices"][0]["message"]["content"]
                messages.append(assistant(text))
                tokens = done.json()["usage"]["total_tokens"]
                self.answers.append((done.headers["X-Memory-Version"], text, tokens))

    def send(self, http, messages, key):
        headers = {"X-Session-Id": self.name, "Idempotency-Key": key}
        body, ends = {"model": MODEL, "messages": messages, **GREEDY}, time.monotonic() + 120
        while True:
            try:
                done = http.post("/v1/chat/completions", json=body, headers=headers)
                if done.status_code == 200:
                    return done
                assert done.status_code in (409, 500, 502, 503), done.text
            except httpx.TransportError:
                pass
            self.failed += 1
            assert time.monotonic() < ends, "not answered in time"
            time.sleep(0.1)


def wait_for(condition, seconds=120):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.slow
def test_a_replica_that_is_killed_under_load_loses_no_answer(replicas, tmp_path):
    """Every message of every client is read once, and answered as by a session alone. The replica is replaced."""
    url, pids = replicas
    assert len(numbers(pids)) == 2
    check_affinity(url)
    clients = [Client(url, f"client {number}") for number in range(CLIENTS)]
    for client in clients:
        client.start()
    wait_for(
        lambda: (
            all(len(client.answers) >= 2 for client in clients)
            or not any(map(threading.Thread.is_alive, clients))
        )
    )
    assert any(len(client.answers) < TURNS for client in clients), "there are requests under way"
    os.kill(min(numbers(pids)), signal.SIGKILL)
    for client in clients:
        client.join()
    assert [client.error for client in clients] == [None] * CLIENTS
    assert any(client.failed for client in clients), "some were lost, and sent again"
    session = folder_session(tmp_path / "model")
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        for client in clients:
            shown = http.get(f"/v1/memories/{client.name}").raise_for_status().json()
            versions = http.get(f"/v1/memories/{client.name}/versions").json()["data"]
            made = [version for version, *_ in client.answers]
            assert [each["id"] for each in versions][1:] == made, "one version for each message, and no other"
            assert shown["version"] == made[-1]
            assert shown["tokens"] == sum(tokens for *_, tokens in client.answers), "each token was read once"
            own, turns = Session(session.model, session.tokenizer), Turns(session.tokenizer)
            for number, (_, text, _) in enumerate(client.answers):
                told = turns.text(f"I am {client.name}. This is message {number}.")
                assert text == own.generate(told, **GREEDY, no_repeat=16)
    wait_for(lambda: len(numbers(pids)) == 3)


def check_affinity(url):
    """Requests with the same header are answered by the same replica, and both replicas are used."""
    generated = "tokens_generated"

    def count(name):
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            text = http.get("/metrics", headers={"X-Session-Id": name}).raise_for_status().text
        (line,) = [line for line in text.splitlines() if generated in line and not line.startswith("#")]
        return float(line.split()[-1])

    def ask(name):
        body = {"model": MODEL, "messages": [user("Good morning.")], **GREEDY}
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            done = http.post("/v1/chat/completions", json=body, headers={"X-Session-Id": name})
        return done.raise_for_status().json()["usage"]["completion_tokens"]

    ask("warm 0")
    names = [f"warm {number}" for number in range(32)]
    wait_for(lambda: len({count(name) for name in names}) == 2)  # the proxy has heard of both
    for name in names[:8]:
        before = count(name)
        assert before + ask(name) == count(name), name
