"""Messages in the first person for training a memory: what is asked was said, what a message leaves open is not among
its answers, and a correction changes the value.
"""

import json
import lzma
import re

import numpy as np
import pytest

from experiments.attach import first_person, relations
from experiments.attach.chats import UNKNOWN, Chats
from remanence.attached.sentences.training import Exchange


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Conversations with a relation of KAMEL; the first ones are for tests."""
    relation = {"question": "What is the colour of {x}?", "statements": ["{x} is {y}."],
                "subjects": ["the Dome"], "values": ["red", "blue"]}  # fmt: skip
    path = tmp_path_factory.mktemp("kamel") / "kamel.jsonl.xz"
    lines = [json.dumps({**relation, "id": f"P{n}", "subjects": [f"dome {n}"]}) for n in range(20)]
    path.write_bytes(lzma.compress("\n".join(lines).encode()))
    return Chats(path, [("What is 2 + 2?", "4.", True)])


def slots(template):
    return set(re.findall(r"{(\w+)}", template))


def test_slots():
    assert len(first_person.MESSAGES) >= 150
    for message in first_person.MESSAGES:
        known, where = set(message.slots), message.text[:50]
        assert 4 <= len(known) <= 10, where
        assert known >= {slot for slot, _, _ in message.questions}, where
        assert len(message.never) >= 3, where
        for slot, questions, answers in message.questions:
            assert len(questions) >= 2, (where, slot)
            assert all(slots(q) <= known - {slot} for q in questions), (where, slot)
            assert all(slot in slots(a) <= known for a in answers), (where, slot)
        assert all(slots(question) <= known for question in message.never), where
        for slot, texts in message.corrections:
            assert slot in known, where
            assert all("new" in slots(text) <= known | {"new"} for text in texts), where
    corrected = sum(bool(message.corrections) for message in first_person.MESSAGES)
    assert corrected >= len(first_person.MESSAGES) / 2


def test_near_misses_belong_to_passages():
    texts = [passage.text.replace("\n", "\\n")[: first_person.BEGIN] for passage in first_person.PASSAGES]
    assert len(set(texts)) == len(texts)
    assert set(first_person.NEAR_MISSES) <= set(texts)
    assert sum(bool(passage.never) for passage in first_person.PASSAGES) == len(first_person.NEAR_MISSES)
    for passage in first_person.PASSAGES:
        assert all(slots(question) <= set(passage.slots) for question in passage.never), passage.text[:50]


@pytest.mark.parametrize("seed", range(3))
def test_drawn(seed):
    """Every slot is filled, a value stands in the message or in its correction, and nothing unknown is answered."""
    rng = np.random.default_rng(seed)
    for message in (*first_person.MESSAGES, *first_person.PASSAGES):
        drawn = first_person.draw(rng, message, correct=0.7)
        asked = [*drawn.asked, *drawn.asked_after]
        said = [drawn.text, drawn.correction, *drawn.never, *(text for each in asked for text in each[1:])]
        assert not [text for text in said if re.search(r"[{}]", text)]
        for slot, _, full, short in drawn.asked:
            assert drawn.values[slot].lower() in drawn.text.lower()
            assert short.lower() in full.lower()
        for slot, _, full, short in drawn.asked_after:
            assert slot == drawn.changed
            assert drawn.new.lower() in drawn.correction.lower()
            assert drawn.new not in drawn.values.values()
            assert short == relations.as_answer(drawn.new)
            assert short.lower() in full.lower()
        assert bool(drawn.correction) == bool(drawn.asked_after)
        every = {first_person.fill(q, **drawn.values) for _, known, _ in message.questions for q in known}
        assert not every & set(drawn.never)


def test_conversations(chats):
    """A seed gives one conversation, the evidence of an answer is said before it, and some questions are unknown."""
    books = np.arange(1000)
    known = unknown = 0
    for seed in range(60):
        items = chats.items(np.random.default_rng(seed), books, (10, 20))
        again = chats.items(np.random.default_rng(seed), books, (10, 20))
        assert [str(item) for item in items] == [str(item) for item in again]
        for place, item in enumerate(items):
            if not isinstance(item, Exchange):
                continue
            for number, value in item.evidence:
                stated = items[number]
                assert number < place
                text = stated.user if isinstance(stated, Exchange) else stated
                assert value.lower() in text.lower()
            known += item.kind == "question"
            unknown += item.answer in UNKNOWN
    assert 0.12 < unknown / (known + unknown) < 0.25


def test_later_value_is_the_answer(chats):
    """No question about a corrected value is answered with the old value once the correction was said."""
    found = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        drawn = chats._passages(rng, 4)
        for group in (each for each in drawn if each.correction):
            old = group.values[group.changed]
            found += 1
            assert group.new != old
            assert all(short != relations.as_answer(old) for _, _, _, short in group.asked_after)
    assert found > 20
