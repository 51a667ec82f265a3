"""The sentences of a session: what was stored when, and removing one of them."""

import json
from datetime import datetime
from itertools import pairwise

import numpy as np
import pytest
import torch
from sentence_models import chat_folder, message

from remanence import Session
from remanence.inference import memfile, sentences
from remanence.inference.sentences import ReadTimes, StoredSentence, meant
from remanence.testing import assert_close

FACTS = ("My dog is called Rex.", "The code of the gate is 4711.", "I live in Bergen.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with torch.device("cpu"):
        return chat_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def clock(monkeypatch):
    """A time that goes on by an hour for every message."""
    now = [1_700_000_000.0]
    monkeypatch.setattr(sentences.time, "time", lambda: now[0])
    return now


def session_with(folder, clock, facts=FACTS):
    session = Session(folder)
    for fact in facts:
        session.generate(message(fact), max_tokens=6, temperature=0)
        clock[0] += 3600
        session.read("\x06\n")
    return session


def test_sentences_have_the_time_at_which_they_were_read(folder, clock, tmp_path):
    start = datetime.fromtimestamp(clock[0]).astimezone()
    session = session_with(folder, clock)
    listed = session.sentences()
    assert [each.text for each in listed] == list(FACTS)
    assert [(each.written - start).total_seconds() for each in listed] == [0, 3600, 7200]
    session.save(tmp_path / "a.mem")
    later = Session(folder).load(tmp_path / "a.mem")
    clock[0] += 86400
    later.read("\x03uWe met. \x06\n")
    assert later.sentences()[:3] == listed == session.fork().sentences()
    assert (later.sentences()[3].written - start).days == 1
    assert later.load(tmp_path / "a.mem").sentences() == listed


@pytest.mark.parametrize("way", ["session", "fork", "file", "batch"])
def test_a_text_that_is_read_after_an_answer_is_stored(folder, way, tmp_path):
    """It is not part of the answer. A transcript in several calls, whose answers are read, is as it is in one."""
    session = Session(folder)
    session.generate(message(FACTS[0]), max_tokens=6, temperature=0)
    session.save(tmp_path / "a.mem")
    others = {"session": session, "fork": session.fork(), "file": Session(folder)}
    if way == "file":
        others[way].load(tmp_path / "a.mem")
    text = "It was a dark night. The rain fell.\nA dog barked. "
    if way == "batch":
        others[way] = Session(folder)
        batch = Session.batch([others[way]])
        batch.generate([message(FACTS[0])], max_tokens=6, temperature=0)
        batch.read([text])
    else:
        others[way].read(text)
    listed = [each.text for each in others[way].sentences()]
    assert listed == [FACTS[0], "It was a dark night.", "The rain fell.", "A dog barked."][: len(listed)]
    assert len(listed) >= 3
    whole, parts = Session(folder), Session(folder)
    whole.read(message(FACTS[1]) + "I see it now.\x06\n" + message(FACTS[2]))
    for part in (message(FACTS[1]) + "I see", " it now.", "\x06\n" + message(FACTS[2])):
        parts.read(part)
        parts.save(tmp_path / "part.mem")
        parts = Session(folder).load(tmp_path / "part.mem")
    assert_close(parts.state.saved(), whole.state.saved(), 1e-4)


def test_a_file_without_times_is_loaded(folder, clock, tmp_path):
    session = session_with(folder, clock)
    memfile.save(tmp_path / "old.mem", session.model, session.state)
    assert [each.written for each in Session(folder).load(tmp_path / "old.mem").sentences()] == [None] * 3
    for wrong in ([[5, 1], [4, 1]], [[1, -1]], [[1, 2**40]], [[1]], {"a": 1}, [[True, 1]], [[1.5, 2]]):
        memfile.save(tmp_path / "forged.mem", session.model, session.state, {"times": wrong})
        with pytest.raises(ValueError, match=r"forged\.mem: times: expected pairs of tokens and seconds"):
            Session(folder).load(tmp_path / "forged.mem")


def test_a_search_lists_the_most_similar_first(folder, clock):
    session = session_with(folder, clock)
    before = session.state
    found = session.sentences("Where do I live?")
    assert sorted(each.text for each in found) == sorted(FACTS)
    assert all(a.similarity >= b.similarity for a, b in pairwise(found))
    assert_close(session.state, before, 0.0)
    with pytest.raises(ValueError, match="text: expected a text of at least one character"):
        session.sentences("")


def occurrences(path, text):
    """How often the tokens of a text follow each other in the bytes of a memory file, as integers of any size."""
    raw, tokens = path.read_bytes(), list(text.encode())
    return sum(raw.count(np.array(tokens, kind).tobytes()) for kind in ("u1", "i2", "i4", "i8"))


@pytest.mark.parametrize("text", ["4711", "the CODE of the gate is 4711", "The code of the gate is 4711."])
def test_forget_removes_one_fact_from_everything_that_is_saved(folder, clock, tmp_path, text):
    session = session_with(folder, clock)
    session.save(tmp_path / "a.mem")
    assert occurrences(tmp_path / "a.mem", "4711")
    (removed,) = session.forget(text)
    assert removed.text == FACTS[1] and removed.written is not None
    assert [each.text for each in session.sentences()] == [FACTS[0], FACTS[2]]
    session.save(tmp_path / "a.mem")
    assert not occurrences(tmp_path / "a.mem", "4711") and occurrences(tmp_path / "a.mem", "Rex")
    again = Session(folder).load(tmp_path / "a.mem")
    assert again.sentences() == session.sentences()
    assert again.generate(message("And?"), max_tokens=9, temperature=0) == session.generate(
        message("And?"), max_tokens=9, temperature=0
    )


def test_forget_removes_every_copy_and_the_last_sentence(folder, clock):
    session = session_with(folder, clock, [FACTS[0], FACTS[1], FACTS[0]])
    assert [each.text for each in session.forget("Rex")] == [FACTS[0]] * 2
    other = Session(folder)
    other.read("It rained. My bike is green")
    assert [each.text for each in other.forget("bike")] == ["My bike is green"]
    assert [each.text for each in other.sentences()] == ["It rained."]


@pytest.mark.parametrize(
    ("text", "message"),
    [("is", "which fits 2: 'My dog is called Rex.', 'The code"), ("", "at least one character")],
)
def test_what_is_not_one_sentence_is_not_removed(folder, clock, text, message):
    session = session_with(folder, clock)
    before = session.state
    with pytest.raises(ValueError, match=f"^text: expected .*{message}"):
        session.forget(text)
    assert_close(session.state, before, 0.0)


def test_what_a_text_means():
    made = lambda *pairs: [StoredSentence(text, None, cosine) for text, cosine in pairs]
    far = made(("My dog is Rex.", 0.8), ("My dog's food is fish.", 0.6))
    assert meant("the pet", far) == "My dog is Rex."
    assert meant("fish!", far) == "My dog's food is fish.", "its words count more than its similarity"
    assert meant("MY DOG IS REX", far) == "My dog is Rex."
    near = made(("My dog is Rex.", 0.8), ("My cat is Tom.", 0.75))
    with pytest.raises(
        ValueError, match=r"fits 2: 'My dog is Rex\.', 'My cat is Tom\.'; nothing was removed"
    ):
        meant("the pet", near)
    with pytest.raises(ValueError, match="'pet', which fits none; nothing was removed"):
        meant("pet", made(("My dog is Rex.", 0.3)))
    with pytest.raises(ValueError, match="fits none"):
        meant("pet", [])
    asked = made(("What is the dog called?", 0.9), ("My dog is Rex.", 0.6), ("Is it a cat?", 0.2))
    assert meant("the pet", asked) == meant("dog", asked) == "My dog is Rex.", "a question states nothing"
    assert meant("a cat", asked) == "Is it a cat?"
    assert meant("!", made(("!", 0.0), ("?", 0.0))) == "!"


def test_other_memories_cannot_be_listed():
    session = Session("remanence-small")
    for call in (session.sentences, lambda: session.forget("a")):
        with pytest.raises(ValueError, match="model: expected one with a memory of sentences, got a Model"):
            call()


def test_times(clock):
    times = ReadTimes()
    for tokens in (5, 9):
        times.add(tokens)
    clock[0] += 10
    times.add(12)
    assert [pair[0] for pair in times.pairs] == [9, 12] and times.at(13) is None
    assert times.at(12).timestamp() - times.at(1).timestamp() == 10
    times.add(12)
    assert json.loads(json.dumps(times.since(9))) == [[12, 1_700_000_010]]
    times.crop(11)
    assert [pair[0] for pair in times.pairs] == [9]
