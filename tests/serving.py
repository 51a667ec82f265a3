"""A server for tests, in a thread, with a tiny chat model."""

import os
import queue
import threading
import time
from contextlib import contextmanager

import httpx
import torch
from sentence_models import chat_folder

from remanence import Session
from remanence.attached.folder import load_model
from remanence.serve.access import Limits
from remanence.serve.server import Server, Settings, address, listen

MODEL = "tiny"
GREEDY = {"temperature": 0, "max_tokens": 9}


def chat_session(folder):
    """A session with a tiny chat model with a memory of sentences, in float64."""
    with torch.device("cpu"):
        return folder_session(chat_folder(folder))


def folder_session(folder):
    """A session with the chat model in a folder, in float64."""
    return Session(load_model(folder, dtype=torch.float64).eval())


def noted_session(folder, pids):
    """The same, in a process whose number is noted."""
    (pids / str(os.getpid())).touch()
    return folder_session(folder)


class Running:
    """A running server: its address, and clients."""

    def __init__(self, server, url):
        self.server, self.url = server, url

    def http(self, key=None, **settings):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False, **settings)

    def openai(self, key="none"):
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    @property
    def memories(self):
        return self.server.memories

    def wait_until_idle(self):
        ends = time.monotonic() + 30
        while self.server.engine.num_active or self.server.service.num_requests:
            assert time.monotonic() < ends, "a request is still under way"
            time.sleep(0.01)


@contextmanager
def running(session, folder, limits=None, **settings):
    """A server that runs in a thread."""
    limits = Limits(**(limits or {}))
    own = Settings(name=MODEL, folder=folder, limits=limits, grace=5, **settings)
    failed = queue.Queue()
    folder.mkdir(exist_ok=True)
    with listen("127.0.0.1", 0) as listener, Server(session, own) as server:

        def serve():
            try:
                server.run(listener)
            except BaseException as error:
                failed.put(error)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Running(server, address(listener))
        finally:
            server.stop()
            thread.join(timeout=60)
            assert not thread.is_alive(), "the server has not stopped"
            assert failed.empty(), failed.get()


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}
