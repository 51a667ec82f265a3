"""Many sessions on one server: tokens per second, time to the first token, and the time to load and save a session.

    python benchmarks/serve.py                             the shipped chat model, on this machine's CPU
    python benchmarks/serve.py --device cuda --rows 64
    python benchmarks/serve.py --http                      over HTTP on the loopback interface (extra `serve`)

(a) 1, 8 and 64 sessions that ask at the same time, against the same requests one at a time.
(b) 1,000 sessions in turn, of which 64 are in RAM: each is read from its file, answers, and is saved.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from remanence.attached.folder import load_model
from remanence.inference.chat import Turns
from remanence.inference.sampling import Sampling
from remanence.inference.session import Session
from remanence.runtime.device import resolve
from remanence.serve.engine import Engine, Job, Result
from remanence.serve.memories import Memories

QUESTION = "My dog is called Rex. Write a story about him."


class Asked(NamedTuple):
    """One request: seconds to the first text and to the end, and the number of tokens generated."""

    first: float
    end: float
    tokens: int


class InProcess:
    """Requests to an engine, without HTTP."""

    def __init__(self, session: Session, rows: int) -> None:
        self.session = session
        self.engine = Engine(session.model, session.tokenizer, max_rows=rows, max_waiting=10**6)
        text = Turns(session.tokenizer).conversation([{"role": "user", "content": QUESTION}], continues=False)
        self.tokens = session.tokenizer.encode(text)

    def ask(self, max_tokens: int) -> Asked:
        begun, events, first = time.monotonic(), queue.Queue[Any](), None
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
        self.engine.submit(Job(self.tokens, self.session.model.start(1), sampling, events.put))
        while True:
            event = events.get()
            if isinstance(event, Exception):
                raise event
            first = time.monotonic() - begun if first is None else first
            if isinstance(event, Result):
                return Asked(first, time.monotonic() - begun, event.tokens_generated)

    def close(self) -> None:
        self.engine.close()


class OverHttp:
    """Requests to a server on the loopback interface, which keeps no memory."""

    def __init__(self, session: Session, rows: int) -> None:
        import httpx

        from remanence.serve.access import Limits
        from remanence.serve.server import Server, Settings, address, listen

        self.folder = tempfile.TemporaryDirectory()
        limits = Limits(max_waiting=10**6, timeout=10**6)
        settings = Settings(name="model", folder=Path(self.folder.name), max_rows=rows, limits=limits)
        self.server, listener = Server(session, settings), listen("127.0.0.1", 0)
        self.thread = threading.Thread(target=self.server.run, args=(listener,))
        self.thread.start()
        self.client = httpx.Client(
            base_url=address(listener),
            timeout=None,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )

    def ask(self, max_tokens: int) -> Asked:
        body = {"model": "model", "stream": True, "max_tokens": max_tokens, "temperature": 0, "no_repeat": 0}
        body |= {"messages": [{"role": "user", "content": QUESTION}]}
        begun, first, tokens = time.monotonic(), None, 0
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if '"content": "' in line and '"content": ""' not in line:
                    first, tokens = first or time.monotonic() - begun, tokens + 1
        return Asked(first or 0.0, time.monotonic() - begun, tokens)

    def close(self) -> None:
        self.client.close()
        self.server.stop()
        self.thread.join()
        self.server.close()
        self.folder.cleanup()


def percentiles(values: list[float]) -> str:
    """The median and the 95th percentile of times in seconds."""
    ordered = sorted(values)
    return f"p50 {statistics.median(ordered):6.2f} s  p95 {ordered[int(0.95 * (len(ordered) - 1))]:6.2f} s"


def together(ask: Callable[[int], Asked], sessions: int, max_tokens: int) -> None:
    """Ask in many sessions at the same time, and print what it took."""
    found: list[Asked] = []
    threads = [threading.Thread(target=lambda: found.append(ask(max_tokens))) for _ in range(sessions)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report(f"{sessions:4} at a time", found, time.monotonic() - begun)


def one_at_a_time(ask: Callable[[int], Asked], sessions: int, max_tokens: int) -> None:
    """Ask in one session after the other; the time to the first token includes the wait for the others."""
    begun, found = time.monotonic(), []
    for _ in range(sessions):
        waited = time.monotonic() - begun
        asked = ask(max_tokens)
        found.append(asked._replace(first=asked.first + waited))
    report(f"{sessions:4} in turn  ", found, time.monotonic() - begun)


def report(name: str, found: list[Asked], seconds: float) -> None:
    tokens = sum(each.tokens for each in found)
    first = percentiles([each.first for each in found])
    print(
        f"{name}  {tokens / seconds:8.1f} tokens/s  first token {first}  ({tokens} tokens, {seconds:.1f} s)"
    )


def in_turn(session: Session, sessions: int, in_memory: int, rounds: int) -> None:
    """Many sessions, each of which is loaded, answers and is saved in its turn."""
    with tempfile.TemporaryDirectory() as folder:
        memories = Memories(session.model, Path(folder), tokenizer=session.tokenizer, keep_versions=1)
        first = memories.database.create("bench", "0")
        own = memories.new_session()
        own.generate(Turns(own.tokenizer).text(QUESTION), max_tokens=8, temperature=0)
        memories.cache_bytes = in_memory * own.state.saved().nbytes
        saved = own.fork()
        saved.advance(own.state.saved(), is_answer=True)
        version = memories.commit(memories.head(first), saved)
        for number in range(1, sessions):
            memories.fork("bench", version, str(number))
        size = memories.database.usage("bench").bytes
        loads, saves, turns = [], [], []
        for number in list(range(sessions)) * rounds:
            begun = time.monotonic()
            head = memories.head(memories.find("bench", str(number)))
            one = memories.load(head)
            loads.append(time.monotonic() - begun)
            text = Turns(one.tokenizer).conversation([{"role": "user", "content": "And?"}], continues=True)
            one.generate(text, max_tokens=4, temperature=0)
            one.advance(one.state.saved(), is_answer=True)
            begun_saving = time.monotonic()
            memories.commit(head, one)
            saves.append(time.monotonic() - begun_saving)
            turns.append(time.monotonic() - begun)
        print(f"{sessions} sessions in turn, {in_memory} in RAM, {size / 1e9:.2f} GB on disk:")
        for name, values in (("load", loads), ("save", saves), ("whole turn", turns)):
            ordered = sorted(values)
            p95 = ordered[int(0.95 * (len(ordered) - 1))]
            print(f"  {name:10}  p50 {statistics.median(ordered) * 1000:7.1f} ms  p95 {p95 * 1000:7.1f} ms")
        memories.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="remanence-smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=16, help="rows of the engine")
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--sessions", type=int, default=1000, help="sessions in turn; 0: none")
    parser.add_argument("--in-memory", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--http", action="store_true")
    given = parser.parse_args()
    session = Session(load_model(given.model, device=resolve(given.device)).eval())
    model = session.model
    dtype = str(model.embed.weight.dtype).removeprefix("torch.")
    print(f"{given.model}, {model.device}, {dtype}, {torch.get_num_threads()} threads, {given.rows} rows")
    print(f"state of one session: {session.state.nbytes / 1e6:.1f} MB")
    if given.at_once:
        client = (OverHttp if given.http else InProcess)(session, given.rows)
        client.ask(4)  # loads and measures what is done once
        for number in given.at_once:
            together(client.ask, number, given.tokens)
            if number > 1:
                one_at_a_time(client.ask, min(number, 8), given.tokens)
        client.close()
    if given.sessions:
        in_turn(session, given.sessions, given.in_memory, given.rounds)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
