"""Conversations about facts of many kinds, in many wordings: rows to train a memory on, and exams.

Facts come from `relations.py` and from the relations of KAMEL (a file ``kamel.jsonl``, perhaps compressed, with
shuffled values). In an exam the relations, or the passages, were not used in training.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.attach import relations

Rng = np.random.Generator
Fact = dict[str, Any]
Turns = list[tuple[str, float]]
"""Texts with the weight of their tokens in the loss."""
HELD_OUT = 15
"""The first so many relations of KAMEL are for exams."""
READ = [
    "Now read this.",
    "Here is a text to read.",
    "Read the following.",
    "Please read this chapter:",
    "Look at this.",
]
DONE = ["I have read it.", "Done.", "I've read the text.", "Okay, finished reading.", "Read."]
SHORT = ["It's", "It is", "That's", "Answer:", "I think it's", "You said"]
"""What stands in front of a short answer."""
ASSISTANT, END = "<|im_start|>assistant\n", "<|im_end|>\n"


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}{END}"


def pick(rng: Rng, some: Sequence[Any]) -> Any:
    return some[int(rng.integers(len(some)))]


class Conversation(NamedTuple):
    """What is said before the text in between, and the questions with their answers."""

    front: Turns
    questions: list[Turns]


class Question(NamedTuple):
    kind: str
    text: str
    value: str


class Exam(NamedTuple):
    front: str
    questions: list[Question]


class Facts:
    def __init__(self, kamel: Path) -> None:
        with lzma.open(kamel, "rt") if kamel.suffix == ".xz" else open(kamel) as file:
            known = [json.loads(line) for line in file]
        self.held_out, self.trained = known[:HELD_OUT], known[HELD_OUT:]

    def training_fact(self, rng: Rng) -> Fact:
        return _of_kamel(rng, self.trained) if rng.random() < 0.3 else _of_relations(rng, relations.TRAIN)

    def held_out_fact(self, rng: Rng) -> Fact:
        return _of_relations(rng, relations.HELD) if rng.random() < 0.6 else _of_kamel(rng, self.held_out)

    def conversation(self, rng: Rng, count: int) -> Conversation:
        """Facts in turns of one to five with small talk between them, some corrected later, sometimes a passage; then
        questions in other words, some of them reversed, some about what was never stated.
        """
        front: Turns = []
        questions: list[Turns] = []
        facts = _distinct(rng, count, self.training_fact)
        values = [fact["value"].lower() for fact in facts]
        say = lambda text: front.append((user(text) + ASSISTANT + str(pick(rng, relations.ACKS)) + END, 0.0))
        place = 0
        while place < len(facts):
            several = int(rng.integers(1, 6))
            prefix = str(pick(rng, relations.STATE_PREFIXES))
            stated = " ".join(fact["statement"] for fact in facts[place : place + several])
            say(f"{prefix} {stated}" if prefix else stated)
            place += several
            if rng.random() < 0.2:
                remark, reply = pick(rng, relations.SMALLTALK)
                front.append((user(remark) + ASSISTANT + reply + END, 0.0))
        for fact in facts:
            if rng.random() < 0.08 and fact["other"].lower() not in values:
                fact |= {
                    "value": fact["other"],
                    "answer_short": fact["other"],
                    "answer_full": None,
                    "reverse": None,
                }
                say(fact["update"](fact["value"]))
        if rng.random() < 0.35:
            passage = relations.draw_passage(rng, pick(rng, relations.PASSAGES_TRAIN))
            say(passage["text"])
            questions += [
                _asked(rng, q["question"], q["answer_short"], q["answer_full"]) for q in passage["qas"]
            ]
        for fact in facts:
            if fact.get("reverse") and rng.random() < 0.2 and values.count(fact["value"].lower()) == 1:
                questions.append(_asked(rng, fact["reverse"], fact["reverse_answer"]))
            else:
                questions.append(_asked(rng, fact["question"], _short(fact), fact["answer_full"]))
        stated = {(fact["id"], fact["subject"]) for fact in facts}
        for _ in range(max(1, len(facts) // 10)):
            other = self.training_fact(rng)
            if (other["id"], other["subject"]) not in stated and other["subject"] and rng.random() < 0.8:
                unknown = str(pick(rng, relations.UNKNOWN))
                questions.append([(user(other["question"]) + ASSISTANT, 0.0), (unknown, 0.15), (END, 0.05)])
        return Conversation(front, [questions[index] for index in rng.permutation(len(questions))])

    def exam(self, rng: Rng, count: int, kind: str) -> Exam:
        """`kind`: "trained" or "held out" relations, or "passages" that were held out."""
        if kind == "passages":
            chosen = [
                relations.PASSAGES_HELD[index] for index in rng.permutation(len(relations.PASSAGES_HELD))[:2]
            ]
            drawn = [relations.draw_passage(rng, passage) for passage in chosen]
            front = "".join(user(each["text"]) + ASSISTANT + "Okay." + END for each in drawn)
            found = [
                Question("passage", q["question"], q["answer_short"]) for each in drawn for q in each["qas"]
            ]
            return Exam(front, found)
        facts = _distinct(rng, count, self.training_fact if kind == "trained" else self.held_out_fact)
        values = [fact["value"].lower() for fact in facts]
        groups = [facts[index : index + 4] for index in range(0, len(facts), 4)]
        front = "".join(
            user("Please remember this. " + " ".join(fact["statement"] for fact in group))
            + ASSISTANT
            + "Okay."
            + END
            for group in groups
        )
        questions = []
        for fact in facts:
            if fact.get("reverse") and rng.random() < 0.15 and values.count(fact["value"].lower()) == 1:
                questions.append(Question("reversed", fact["reverse"], fact["reverse_answer"]))
            else:
                questions.append(Question(fact["source"], fact["question"], _short(fact)))
        return Exam(front, questions)


def _of_kamel(rng: Rng, known: list[dict[str, Any]]) -> Fact:
    relation = pick(rng, known)
    subject, value = pick(rng, relation["subjects"]), pick(rng, relation["values"])
    said, answered = pick(rng, relation["statements"]), pick(rng, relation["statements"])
    fill = lambda text, y: text.replace("{x}", subject).replace("{y}", y).replace("  ", " ")
    return {
        "source": "kamel", "id": relation["id"], "subject": subject, "value": value,
        "statement": fill(said, value), "question": relation["question"].replace("{x}", subject),
        "answer_full": fill(answered, value), "reverse": None, "other": pick(rng, relation["values"]),
        "update": lambda changed: f"Correction: {fill(said, changed)}",
    }  # fmt: skip


def _of_relations(rng: Rng, known: Sequence[relations.Relation]) -> Fact:
    relation = pick(rng, known)
    fact = relations.draw(rng, relation)
    other = relations.draw_value2(rng, relation, fact["value"])
    return {"source": "everyday", "id": relation.id, "other": other, **fact}


def _distinct(rng: Rng, count: int, draw: Callable[[Rng], Fact]) -> list[Fact]:
    """Facts of which no two have the same relation and subject."""
    found: dict[tuple[str, str], Fact] = {}
    for _ in range(20 * count):
        if len(found) == count:
            break
        fact = draw(rng)
        found.setdefault((fact["id"], (fact["subject"] or "").lower()), fact)
    return list(found.values())


def _short(fact: Fact) -> str:
    return fact.get("answer_short", fact["value"])


def _asked(rng: Rng, question: str, value: str, full: str | None = None) -> Turns:
    """A question and its answer: the value behind a few words, alone, or in a sentence. The value's tokens weigh 1."""
    asked, chance = user(question) + ASSISTANT, rng.random()
    if full is None or value not in full or chance < 0.5:
        return [(asked + pick(rng, SHORT), 0.0), (f" {value}", 1.0), (f".{END}", 0.2)]
    if chance < 0.6:
        return [(asked, 0.0), (value, 1.0), (END, 0.2)]
    before, after = full.split(value, 1)
    if before.endswith(" "):
        return [(asked, 0.0), (before[:-1], 0.05), (f" {value}", 1.0), (after + END, 0.05)]
    return [(asked, 0.0), *([(before, 0.05)] if before else []), (value, 1.0), (after + END, 0.05)]
