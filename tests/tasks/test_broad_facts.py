"""Facts of many kinds in books: what is asked was stated, what was not stated is unknown, and what is held out
for tests never occurs in training.
"""

import random
import re

import numpy as np
import pytest
import torch

from remanence.data import Tokens, prepare
from remanence.tasks import broad_facts
from remanence.tasks import fact_phrases as phrases
from remanence.tasks.broad_facts import BroadFacts, common_words, passage
from remanence.tasks.fact_phrases import Fact, Vocabulary, draw_fact, draw_form, draw_relation, fill
from remanence.tasks.fact_words import HELD_OUT, LISTS
from remanence.train import DataConfig, FactsData, TrainConfig
from remanence.train.config import override


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    folder = tmp_path_factory.mktemp("books")
    chance = random.Random(0)
    words = [
        "the",
        "rain",
        "fell",
        "on",
        "some",
        "hill",
        "and",
        "nobody",
        "came",
        "until",
        "evening",
        "jasmine",
    ]
    for book in range(3):
        text = "".join(" ".join(chance.choices(words, k=9)).capitalize() + ". " for _ in range(3000))
        (folder / f"{book}.txt").write_text(text)
    prepare(sorted(folder.glob("*.txt")), folder / "tokens")
    return Tokens(folder / "tokens")


def streams(source, row, steps):
    """The texts of a row's streams, as far as so many steps read them, and which of their bytes are answers."""
    found = []
    for step in range(steps):
        tokens, answers, begins = source.piece(row, step)
        if begins:
            found.append((b"", []))
        text, marks = found.pop()
        found.append((text + bytes(tokens[:-1].tolist()), marks + answers[:-1].tolist()))
    return [(text.decode("latin-1"), marks) for text, marks in found]


@pytest.mark.parametrize(("ramp", "least"), [(0, 40), (100, 200)])
def test_what_is_asked_was_stated_and_what_was_not_is_unknown(books, monkeypatch, ramp, least):
    """With statements and questions that name their subject and relation: the last statement about both, if any, has
    the value of the answer.
    """

    def marked(rng, vocabulary, relation, subject, form, max_digits):
        about = f"{subject}|{relation.name}" if form != phrases.DIRECT else f"{subject}|"
        value = str(rng.integers(10**6))
        return Fact(f" <{about}={value}>.", f" <{about}?>", value)

    monkeypatch.setattr(phrases, "draw_fact", marked)
    known = unknown = 0
    for row in range(2):
        for text, marks in streams(BroadFacts(books, 1024, 2, 0.1, ramp, seed=3), row, 150):
            assert len(text) == len(marks)
            for match in re.finditer(r"<([^<>=]*)\?> (\w+)\.", text):
                assert all(marks[match.start(2) - 1 : match.end()])
                before = re.findall(rf"<{re.escape(match[1])}=(\d+)>", text[: match.start()])
                if match[2] == phrases.UNKNOWN:
                    unknown += 1
                    assert not before
                else:
                    known += 1
                    assert before[-1] == match[2]
    assert known > least and unknown > least / 20


def test_the_answers_count_in_full_with_their_ends(books):
    source = BroadFacts(books, 2048, 8, 0.25, seed=1)
    batch = source.step(0)
    assert set(batch.weights.unique().tolist()) == {0.25, 1.0}
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    lengths = set()
    for step in range(30):
        batch = source.step(step)
        for row in range(8):
            answers = bytes(batch.targets[row][batch.weights[row] == 1].tolist()).decode()
            lengths |= {len(value) for value in re.findall(r" (\d+)\.", answers)}
    assert lengths >= set(range(1, 13)) and max(lengths) <= phrases.MAX_DIGITS


def test_steps_are_made_again_and_dealt_to_processes(books):
    one = BroadFacts(books, 1024, 4, 0.1, 20, seed=5)
    kept = [one.step(number) for number in range(30)]
    again = BroadFacts(books, 1024, 4, 0.1, 20, seed=5).step(29)
    two = [BroadFacts(books, 1024, 2, 0.1, 20, seed=5, rank=rank, world_size=2).step(29) for rank in range(2)]
    for name in ("tokens", "targets", "begins", "weights"):
        wanted = getattr(kept[29], name)
        assert torch.equal(wanted, getattr(again, name))
        assert torch.equal(wanted, torch.cat([getattr(each, name) for each in two]))
    assert not torch.equal(kept[3].tokens, BroadFacts(books, 1024, 4, 0.1, 20, seed=6).step(3).tokens)


def test_held_out_words_never_occur_in_training(books):
    """Neither in facts nor in other inserted text; nor do words of the corpus that are held out."""
    assert common_words(books) and not HELD_OUT & set(common_words(books))
    for words in LISTS:
        assert not set(words.trained) & set(words.held_out) and len(words.trained) > 5
        assert not HELD_OUT & {word.lower() for word in words.trained}
    rng, vocabulary = np.random.default_rng(0), Vocabulary(common_words(books))
    for _ in range(3000):
        form = draw_form(rng)
        relation = draw_relation(rng, form)
        fact = draw_fact(rng, vocabulary, relation, vocabulary.subject(rng, relation.subjects), form)
        said = f"{fact.statement} {fact.question} {fact.value} {passage(rng, vocabulary)}"
        names = set(re.findall(r"[a-z]+", said.lower())) & HELD_OUT
        assert not names, said


def test_held_out_wordings_and_relations_are_new():
    trained = {text for each in phrases.NAMED + phrases.SPOKEN for text in each.statements + each.questions}
    new = [*phrases.HELD_OUT_STATEMENTS, *phrases.HELD_OUT_QUESTIONS]
    names = {each.name for each in phrases.NAMED + phrases.SPOKEN}
    for relation in phrases.HELD_OUT_RELATIONS:
        assert relation.name not in names
        if relation.statements is not phrases.STATEMENTS:
            new += [*relation.statements, *relation.questions]
    assert not trained & set(new)
    words = Vocabulary(held_out=True)
    rng = np.random.default_rng(0)
    for _ in range(50):
        assert set(words.person(rng).lower().split()) <= HELD_OUT
        assert set(words.thing(rng).lower().split()) <= HELD_OUT | {"the"}


def test_every_wording_has_its_parts():
    for relation in (*phrases.NAMED, *phrases.SPOKEN, *phrases.HELD_OUT_RELATIONS):
        for text in relation.statements:
            assert text.count("{s}") == 1 and text.count("{v}") == 1, text
        for text in relation.questions:
            assert text.count("{s}") == 1 and "{v}" not in text, text


def test_statements_are_sentences():
    assert fill("{s} works as a {v}.", "Ada Bell", "actor", "job") == " Ada Bell works as an actor."
    assert fill("{v} is the {a} of {s}.", "the inn", "blue", "colour") == " blue is the colour of the inn."
    assert fill("{s}'s {a} is", "the inn", "blue", "colour") == " The inn's colour is"
    assert fill('"{s}\'s {a}?" "{v}," he said.', "the inn", "7", "age") == ' "The inn\'s age?" "7," he said.'


def test_relations_of_one_subject_can_be_told_apart():
    by_name = {each.name: each for each in phrases.NAMED + phrases.SPOKEN}
    assert not phrases.similar(by_name["code"], by_name["phone number"])
    assert not phrases.similar(by_name["code"], by_name["owner"])
    assert phrases.similar(by_name["years"], by_name["age"])
    assert phrases.similar(by_name["owned"], by_name["owner"])


def test_a_run_begins_with_plain_wordings(books):
    """The value directly after the name, and no unknown names."""
    source = BroadFacts(books, 2048, 8, 0.1, 1000, seed=0)
    first = bytes(source.step(0).tokens.flatten().tolist()).decode(errors="replace")
    assert "What" not in first and phrases.UNKNOWN not in first and first.count(":") > 100
    later = bytes(source.step(400).tokens.flatten().tolist()).decode(errors="replace")
    assert phrases.UNKNOWN in later and "What is the" in later


def test_some_streams_have_passages_full_of_numbers(books, monkeypatch):
    monkeypatch.setattr(broad_facts, "ARTICLE_SHARE", 1.0)
    many = BroadFacts(books, 2048, 4, 0.1, seed=0).step(0)
    monkeypatch.setattr(broad_facts, "ARTICLE_SHARE", 0.0)
    few = BroadFacts(books, 2048, 4, 0.1, seed=0).step(0)
    digits = [int(((each.tokens >= 48) & (each.tokens < 58)).sum()) for each in (many, few)]
    assert digits[0] > 2 * digits[1]


def test_the_kind_of_facts_is_a_field():
    """Files of runs without the field are those of numbers."""
    now = FactsData(facts="broad")
    assert now.to_dict()["facts"] == "broad" and DataConfig.from_dict(now.to_dict()) == now
    assert "facts" not in FactsData().to_dict()
    assert override(TrainConfig(data=FactsData()), {"data.facts": "broad"}).data == now
    with pytest.raises(ValueError, match=r"facts: expected one of numbers, broad, got 'all'"):
        FactsData(facts="all")
