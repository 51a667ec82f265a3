"""The engine: any interleaving of sessions gives each session what it would have alone."""

import queue
import threading
import time

import pytest
import torch
from sentence_models import chat_folder, message

from remanence import Model, Session, preset
from remanence.attached.folder import load_model
from remanence.inference.sampling import Sampling
from remanence.runtime.errors import DivergedError
from remanence.serve.engine import BusyError, CancelledError, Engine, Job, Result
from remanence.testing import assert_close
from remanence.tokenizers.tokens import ByteTokenizer, load_tokenizer

TEXTS = [
    "The otter swims in the river and looks for a fish.",
    "x",
    "A mill, a door that is green, and a key. " * 3,
]


def model(pattern):
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 2, "window": 8, "segment": 8, "vocab_size": 257, "ffn": 16}
    return Model(preset("tiny", pattern, memory={"heads": 2, "chunk": 4}, **sizes)).double().eval()


class Client:
    """A job whose events are kept in a queue."""

    def __init__(self, engine, text, state, submit=True, tokenizer=None, **settings):
        self.events = queue.Queue()
        sampling = Sampling(**{"max_tokens": 7, "temperature": 0.0, **settings})
        tokens = (tokenizer or ByteTokenizer()).encode(text)
        self.job = Job(tokens, state, sampling, self.events.put)
        if submit:
            engine.submit(self.job)

    def result(self):
        text = ""
        while True:
            event = self.events.get(timeout=60)
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Result):
                assert text == event.text, "the pieces are the answer"
                return event
            text += event


def same_state(one, other):
    for a, b in zip(one.blocks, other.blocks, strict=True):
        for x, y in zip(a.tensors(), b.tensors(), strict=True):
            if x.dim() > 1 and x.shape != y.shape:  # full attention: shorter rows have zeros in front
                x, y = (z[:, z.shape[1] - min(x.shape[1], y.shape[1]) :] for z in (x, y))
            assert_close(x, y, 1e-10)
    assert one.position.tolist() == other.position.tolist()


@pytest.mark.sample(6)
@pytest.mark.parametrize("pattern", [("mag",), ("mac",), ("lmm", "attention"), ("mal",)])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_every_session_is_as_if_alone(pattern, rows):
    """Sessions of different lengths, sampling and arrival; two turns each, the second joins others' first."""
    shared = model(pattern)
    settings = [
        {},
        {"temperature": 0.9, "seed": 4, "max_tokens": 11},
        {"max_tokens": 3, "stop": ("e",)},
        {"max_tokens": 0},
    ]
    turns = [(TEXTS[n % 3], settings[n % 4]) for n in range(8)]
    with Engine(shared, ByteTokenizer(), max_rows=rows, piece=16) as engine:
        first = [Client(engine, text, shared.start(1), **each) for text, each in turns]
        states = [client.result() for client in first[::-1]][::-1]
        second = [Client(engine, " And?", found.state, max_tokens=4) for found in states]
        after = [client.result() for client in second]
    for (text, each), found, last in zip(turns, states, after, strict=True):
        session = Session(shared)
        sampling = {"max_tokens": 7, "temperature": 0.0, **each}
        assert session.generate(text, **sampling) == found.text
        same_state(session.state, found.state)
        assert session.generate(" And?", max_tokens=4, temperature=0.0) == last.text
        same_state(session.state, last.state)
        assert found.tokens_read == len(text) and last.tokens_read == 5


def test_sessions_do_not_see_each_other():
    """The same question beside different neighbours."""
    shared = model(("mag",))
    with Engine(shared, ByteTokenizer(), max_rows=4) as engine:
        first = [Client(engine, text, shared.start(1)) for text in ("the key", "aaaa", "bbbb" * 30)]
        one = first[0].result()
        second = [Client(engine, text, shared.start(1)) for text in ("the key", "zz" * 50, "1", "2")]
        two = second[0].result()
    assert one.text == two.text
    same_state(one.state, two.state)


def test_sessions_of_different_memory_modes_are_answered_together():
    shared = model(("mag",))
    with Engine(shared, ByteTokenizer()) as engine:
        clients = {
            mode: Client(engine, TEXTS[0], shared.start(1), submit=False) for mode in ("on", "frozen", "off")
        }
        for mode, client in clients.items():
            client.job.memory_mode = mode
            engine.submit(client.job)
        found = {mode: client.result() for mode, client in clients.items()}
    for mode, result in found.items():
        session = Session(shared, memory_mode=mode)
        assert session.generate(TEXTS[0], max_tokens=7, temperature=0.0) == result.text
        same_state(session.state, result.state)


def test_a_full_queue_refuses():
    shared = model(("lmm",))
    with Engine(shared, ByteTokenizer(), max_rows=1, max_waiting=2) as engine:
        running = Client(engine, TEXTS[0], shared.start(1), max_tokens=2000)
        while engine.num_active == 0:
            time.sleep(0.001)
        waiting = [Client(engine, "x", shared.start(1)) for _ in range(2)]
        with pytest.raises(BusyError, match="2 requests are waiting already"):
            Client(engine, "x", shared.start(1))
        running.job.cancel()
        with pytest.raises(CancelledError, match="cancelled"):
            running.result()
        assert len({client.result().text for client in waiting}) == 1


def test_a_job_ends_at_its_time_limit():
    shared = model(("lmm",))
    with Engine(shared, ByteTokenizer()) as engine:
        client = Client(engine, "x", shared.start(1), submit=False, max_tokens=10**6)
        client.job.deadline = time.monotonic() + 0.2
        engine.submit(client.job)
        with pytest.raises(CancelledError, match="time limit"):
            client.result()
        assert Client(engine, "x", shared.start(1)).result().finish_reason == "length"


def test_an_error_ends_its_own_job_only():
    """A memory that diverges, or a state of another model."""
    shared = model(("mag",))
    with Engine(shared, ByteTokenizer(), max_rows=4) as engine:
        good = Client(engine, TEXTS[0], shared.start(1), max_tokens=30)
        bad = shared.start(1)
        bad = bad._replace(blocks=tuple(part.map(lambda x: torch.full_like(x, 1e300) if x.is_floating_point() else x)
                                        for part in bad.blocks))  # fmt: skip
        with pytest.raises(DivergedError, match="diverged"):
            Client(engine, "x", bad).result()
        with pytest.raises(ValueError, match="state"):
            Client(engine, "x", model(("lmm", "mac")).start(1)).result()
        assert good.result().text == Session(shared).generate(TEXTS[0], max_tokens=30, temperature=0.0)


@pytest.mark.parametrize("finish", [True, False])
def test_closing_completes_or_cancels(finish):
    shared = model(("lmm",))
    engine = Engine(shared, ByteTokenizer(), max_rows=2)
    clients = [
        Client(engine, TEXTS[n % 3], shared.start(1), max_tokens=20 if finish else 10**5) for n in range(5)
    ]
    engine.close(finish=finish)
    assert not engine.is_running and "remanence-engine" not in [
        thread.name for thread in threading.enumerate()
    ]
    for client in clients:
        if finish:
            assert client.result().finish_reason == "length"
        else:
            with pytest.raises(CancelledError, match="closed"):
                client.result()
    with pytest.raises(CancelledError):
        Client(engine, "x", shared.start(1))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A tiny chat model with a memory of sentences, and its tokenizer."""
    with torch.device("cpu"):
        folder = chat_folder(tmp_path_factory.mktemp("chat"))
        found = load_model(folder, dtype=torch.float64).eval()
    return found, load_tokenizer(folder)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_every_session_with_a_memory_of_sentences_is_as_if_alone(chat_model, rows):
    """Two turns of each session: texts in several pieces, answers of different lengths, and a text without an answer,
    beside which a batch of open answers cannot be decoded in place.
    """
    shared, tokenizer = chat_model
    settings = [
        {"max_tokens": 30},
        {"temperature": 0.9, "seed": 4, "max_tokens": 11},
        {"max_tokens": 3},
        {"max_tokens": 0},
    ]
    texts = [message(text) for text in TEXTS] + ["A letter. It is short. It has an end"]
    turns = [(texts[n % 4], settings[(n // 2) % 4]) for n in range(8)]
    question = "\x06\n" + message("What is it?")
    with Engine(shared, tokenizer, max_rows=rows, piece=16) as engine:
        first = [Client(engine, text, shared.start(1), tokenizer=tokenizer, **each) for text, each in turns]
        states = [client.result() for client in first[::-1]][::-1]
        second = [
            Client(engine, question, found.state, tokenizer=tokenizer, max_tokens=4 + place)
            for place, found in enumerate(states)
        ]
        after = [client.result() for client in second]
    for place, ((text, each), found, last) in enumerate(zip(turns, states, after, strict=True)):
        session = Session(shared, tokenizer)
        sampling = {"max_tokens": 7, "temperature": 0.0, **each}
        assert session.generate(text, **sampling) == found.text
        same_state(session.state.saved(), found.state)
        assert session.generate(question, max_tokens=4 + place, temperature=0.0) == last.text
        same_state(session.state.saved(), last.state)
    assert max(len(each) for found in after for each in shared.stored(found.state)) > 1


def test_answers_of_a_memory_of_sentences_are_decoded_in_place(chat_model, monkeypatch):
    """While all rows are in answers, the model is called for texts only."""
    shared, tokenizer = chat_model
    calls = []
    trace = type(shared).trace

    def counted(self, tokens, *given, **settings):
        calls.append(tokens.shape[1])
        return trace(self, tokens, *given, **settings)

    monkeypatch.setattr(type(shared), "trace", counted)
    with Engine(shared, tokenizer, max_rows=4) as engine:
        clients = [
            Client(engine, message(text), shared.start(1), tokenizer=tokenizer, max_tokens=20)
            for text in TEXTS
        ]
        generated = sum(client.result().tokens_generated for client in clients)
    assert generated == 60 and sorted(calls)[0] > 1, "a call for each text, and none for a token"
