"""Conversations to train and to test a memory of sentences: facts of many kinds in many wordings, and questions.

A conversation is a list of items (`remanence.attached.sentences.training`): messages with answers, and plain text. In a
test, the relations and passages are ones that training does not use.
"""

from __future__ import annotations

import json
import lzma
import re
from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.attach import first_person, more_passages, more_relations, relations
from experiments.attach.conversations import HELD_OUT, _distinct, _of_kamel, _of_relations, _short, pick
from remanence.attached.sentences.training import AnswerKind, Exchange, Item

Rng = np.random.Generator
RELATIONS = [*relations.TRAIN, *more_relations.TRAIN]
ACKS = [*relations.ACKS, *more_passages.ACKS]
SMALLTALK = [*relations.SMALLTALK, *more_passages.SMALLTALK]
UNKNOWN = [
    "I don't know.",
    "I don't know. You haven't told me.",
    "I don't know, you never told me that.",
    "I don't know. That has not come up yet.",
]
"""All of them say "I don't know", so that a program can recognise them."""
BEFORE_QUESTIONS = [
    "Quick question:", "Hey,", "Remind me:", "Do you remember this?", "Tell me,", "By the way,", "One question.", "So,",
    "Sorry, I forgot.", "Hi again!", "Okay.", "Thanks. And", "Help me out here.", "Just to be sure:", "Back to me.",
    "Something else:", "I can't recall it.", "Good morning.", "Right,", "Do you know it?", "From what I told you:",
]  # fmt: skip
SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)
"""What the chat template of SmolLM2 writes in front of the first message."""
BOS = "<bos>"
"""The first token of texts for Gemma."""
OTHER_MARKS = {
    "<start_of_turn>": {
        SYSTEM: BOS,
        "<|im_start|>user": "<start_of_turn>user",
        "<|im_start|>assistant": "<start_of_turn>model",
        "<|im_end|>": "<end_of_turn>",
    }
}
"""How conversations, which are written with the marks of SmolLM2, read with the marks of another model."""


def in_format(text: str, vocabulary: Container[str]) -> str:
    """The text with the marks of the chat format that a vocabulary has."""
    for mark, changes in OTHER_MARKS.items():
        if mark in vocabulary:
            for own, other in changes.items():
                text = text.replace(own, other)
    return text


class Asked(NamedTuple):
    """A question of a test: its text, the values of which a correct answer contains one (none: it was never stated), a
    label, and the statement.
    """

    text: str
    values: tuple[str, ...]
    label: str
    statement: str = ""


class Test(NamedTuple):
    """The messages that state facts, and the questions."""

    said: list[str]
    questions: list[Asked]


class Chats:
    """Draws conversations. `kamel` is the file of KAMEL's relations, `general` holds messages and answers that need no
    memory, and `system_share` is the share of conversations for training that begin with `SYSTEM`.
    """

    def __init__(
        self, kamel: Path, general: list[tuple[str, str, bool]], *, system_share: float = 0.5
    ) -> None:
        with lzma.open(kamel, "rt") as file:
            known = [json.loads(line) for line in file]
        self.kamel_held, self.kamel, self.general = known[:HELD_OUT], known[HELD_OUT:], general
        self.system_share = system_share

    def _fact(self, rng: Rng, *, held: bool) -> dict[str, Any]:
        if rng.random() < (0.4 if held else 0.2):
            return _of_kamel(rng, self.kamel_held if held else self.kamel)
        return _of_relations(rng, relations.HELD if held else RELATIONS)

    # Training.

    def items(self, rng: Rng, books: np.ndarray, sizes: tuple[int, int] = (60, 400)) -> list[Item]:
        """A conversation for training: statements alone or several in a message, in prose, in plain text; small talk,
        corrections and part of a book between them; then, or among them, questions, also of what a message left open.
        """
        items: list[Item] = [SYSTEM] if rng.random() < self.system_share else []
        asked: list[Exchange] = []
        passages = int(rng.integers(1, 6)) if rng.random() < 0.75 else 0
        facts = _distinct(rng, int(rng.integers(2, 28 - 4 * passages)), lambda r: self._fact(r, held=False))
        drawn = self._passages(rng, passages)
        values = [fact["value"].lower() for fact in facts]
        subjects = [fact["subject"] for fact in facts if fact["subject"]]
        plain = rng.random() < 0.12  # statements as text, without messages
        groups: list[Any] = list(drawn)
        place = 0
        while place < len(facts):
            several = int(rng.integers(1, 13 if rng.random() < 0.15 else 6)) if rng.random() < 0.6 else 1
            groups.append(facts[place : place + several])
            place += several
        where: dict[int, int] = {}
        early: list[Exchange] = []
        corrections: list[first_person.Drawn] = []

        def say(text: str) -> int:
            kind: AnswerKind = "context" if "?" in text else "chat"  # a request deserves more than "Okay."
            items.append(f"{text}\n" if plain else Exchange(text, str(pick(rng, ACKS)), kind))
            return len(items) - 1

        def correct(group: first_person.Drawn) -> None:
            evidence = ((say(group.correction), group.new),)
            for _, question, full, short in group.asked_after:
                asked.append(Exchange(question, self._answer(rng, full, short), "question", evidence))

        for number in rng.permutation(len(groups)).tolist():
            group = groups[number]
            if isinstance(group, first_person.Drawn):
                index = say(group.text)
                for slot, question, full, short in group.asked:
                    evidence = ((index, group.values[slot]),)
                    exchange = Exchange(question, self._answer(rng, full, short), "question", evidence)
                    if slot != group.changed:
                        asked.append(exchange)
                    elif rng.random() < 0.15:  # before the correction
                        items.append(exchange._replace(user=self._in_context(rng, question)))
                never = self._open(rng, group, drawn, facts)
                asked += [Exchange(q, str(pick(rng, UNKNOWN)), "unknown") for q in never]
                corrections += [group] if group.correction else []
            else:
                stated = " ".join(fact["statement"] for fact in group)
                index = say(relations.with_prefix(str(pick(rng, relations.STATE_PREFIXES)), stated))
                where.update({id(fact): index for fact in group})
            if rng.random() < 0.12:
                items.append(Exchange(*pick(rng, SMALLTALK)))
            elif rng.random() < 0.12:
                items.append(self._general(rng))
            if asked and rng.random() < 0.1:
                early.append(asked.pop(int(rng.integers(len(asked)))))
                items.append(early[-1])
            if corrections and rng.random() < 0.25:
                correct(corrections.pop(int(rng.integers(len(corrections)))))
        for group in corrections:
            correct(group)
        changed: dict[int, int] = {}
        for fact in facts:
            if rng.random() < 0.2 and fact["other"].lower() not in values:
                changed[id(fact)] = say(fact["update"](fact["other"]))
        size = int(rng.integers(*sizes))
        start = int(rng.integers(len(books) - size))
        text = books[start : start + size]
        if rng.random() < 0.5:
            items.append(text)
        else:
            items += [f"<|im_start|>user\n{pick(rng, more_passages.READ)}\n", text]
            items += [f"<|im_end|>\n<|im_start|>assistant\n{pick(rng, more_passages.DONE)}<|im_end|>\n"]
        for fact in facts:
            own = id(fact)
            if own in changed:
                new, full = fact["other"], fact["answer_full"]
                stated = full and fact["value"] in full
                answer = relations.fix_articles(full.replace(fact["value"], new)) if stated else new
                asked.append(Exchange(fact["question"], answer, "question", ((changed[own], new),)))
            elif fact.get("reverse") and rng.random() < 0.25 and values.count(fact["value"].lower()) == 1:
                evidence = ((where[own], fact["subject"]),)
                asked.append(Exchange(fact["reverse"], fact["reverse_answer"], "question", evidence))
            else:
                answer = self._answer(rng, fact["answer_full"], _short(fact))
                asked.append(Exchange(fact["question"], answer, "question", ((where[own], fact["value"]),)))
        stated_pairs = {(fact["id"], fact["subject"]) for fact in facts}
        told = " ".join(group.text for group in drawn)
        for _ in range(max(1, len(facts) // 4)):
            question = self._never_stated(rng, stated_pairs, subjects, near=0.5, told=told)
            if question:
                asked.append(Exchange(question, str(pick(rng, UNKNOWN)), "unknown"))
        for _ in range(max(1, len(asked) // 12)):
            asked.append(self._general(rng))
        asked = [each._replace(user=self._in_context(rng, each.user)) for each in asked]
        again = [asked[int(rng.integers(len(asked)))] for _ in range(int(rng.integers(0, 4)))]
        items += [asked[index] for index in rng.permutation(len(asked)).tolist()] + again
        return items

    @staticmethod
    def _passages(rng: Rng, count: int) -> list[first_person.Drawn]:
        """Passages of which no two are asked the same."""
        found: dict[str, Any] = {}
        while len(found) < count:
            known = first_person.MESSAGES if rng.random() < 0.55 else first_person.PASSAGES
            message = pick(rng, known)
            found.setdefault(message.text, message)
        often = Counter(asked for message in found.values() for _, asked, _ in message.questions)
        drawn = []
        for message in found.values():
            own = tuple(question for question in message.questions if often[question[1]] == 1)
            drawn.append(first_person.draw(rng, message._replace(questions=own), correct=0.5))
        return drawn

    @staticmethod
    def _open(
        rng: Rng, group: first_person.Drawn, drawn: list[first_person.Drawn], facts: list[Any]
    ) -> list[str]:
        """Some of the questions that a passage does not answer, and nothing else that is said seems to answer."""
        rest = [other for other in drawn if other is not group]
        asked = [q for other in rest for _, q, _, _ in (*other.asked, *other.asked_after)]
        asked += [fact["question"] for fact in facts]
        told = " ".join([each.text for each in rest] + [fact["statement"] for fact in facts])
        words = first_person.content_words(told)

        def told_elsewhere(question: str) -> bool:
            about = first_person.content_words(question) - first_person.GENERAL
            return about <= words or any(first_person.alike(question, other) for other in asked)

        return [q for q in group.never if rng.random() < 0.65 and not told_elsewhere(q)]

    @staticmethod
    def _in_context(rng: Rng, question: str) -> str:
        """A question as it is, or rarely behind some words or another sentence."""
        draw = rng.random()
        if draw < 0.08:
            before = str(pick(rng, BEFORE_QUESTIONS))
            if before.endswith((",", "And")) and re.match(
                "(Wh|How|At|By|Until|Since|From|On|In|To|For)", question
            ):
                question = question[0].lower() + question[1:]
            return f"{before} {question}"
        return f"{pick(rng, SMALLTALK)[0]} {question}" if draw < 0.12 else question

    def _general(self, rng: Rng) -> Exchange:
        """A message and an answer that need no memory."""
        message, answer, complete = pick(rng, self.general)
        return Exchange(message, answer, "unknown", ends=complete)

    @staticmethod
    def _answer(rng: Rng, full: str | None, short: str) -> str:
        return full if full and rng.random() < 0.8 else short

    def _never_stated(
        self,
        rng: Rng,
        stated: set[Any],
        subjects: list[str],
        *,
        held: bool = False,
        near: float = 0.3,
        told: str = "",
    ) -> str | None:
        """A question about a fact that was not stated, and whose subject is not in the text `told`; `near` is how often
        it is about a person of whom other facts were.
        """
        fact = self._fact(rng, held=held)
        if fact["source"] == "everyday" and subjects and rng.random() < near:
            known = {r.id: r for r in (relations.HELD if held else RELATIONS)}[fact["id"]]
            same = [s for s in subjects if known.subject == "person" and s.istitle()]
            if same:
                fact = relations.draw(rng, known, subject=str(pick(rng, same))) | {"id": known.id}
        pair = (fact["id"], fact["subject"])
        new = pair not in stated and fact["subject"] and fact["subject"] not in told
        return fact["question"] if new else None

    # Tests.

    def test(self, rng: Rng, kind: str, count: int) -> Test:
        """`kind`: "trained", "held out", "passages", "updates", "reversed" or "unknown". All but the first use
        relations and passages that training has none of.
        """
        if kind == "passages":
            chosen = rng.permutation(len(relations.PASSAGES_HELD))[:2]
            drawn = [relations.draw_passage(rng, relations.PASSAGES_HELD[n]) for n in chosen]
            asked = [
                Asked(q["question"], (q["answer_short"],), "passage", p["text"])
                for p in drawn
                for q in p["qas"]
            ]
            return Test([p["text"] for p in drawn], asked)
        held = kind != "trained"
        facts = _distinct(rng, count, lambda r: self._fact(r, held=held))
        values = [fact["value"].lower() for fact in facts]
        said = [
            "Please remember this. " + " ".join(fact["statement"] for fact in facts[n : n + 4])
            for n in range(0, len(facts), 4)
        ]
        asked = []
        for fact in facts:
            statement, label = fact["statement"], fact["source"]
            if kind == "updates":
                if rng.random() < 0.5 and fact["other"].lower() not in values:
                    said.append(fact["update"](fact["other"]))
                    asked.append(
                        Asked(fact["question"], (fact["other"],), "update", f"{statement} / {said[-1]}")
                    )
            elif kind == "reversed":
                if fact.get("reverse") and values.count(fact["value"].lower()) == 1:
                    asked.append(Asked(fact["reverse"], (fact["reverse_answer"],), "reversed", statement))
            elif kind != "unknown":
                asked.append(Asked(fact["question"], (_short(fact),), label, statement))
        if kind == "unknown":
            stated = {(fact["id"], fact["subject"]) for fact in facts}
            subjects = [fact["subject"] for fact in facts if fact["subject"]]
            found = (self._never_stated(rng, stated, subjects, held=True) for _ in range(3 * count))
            asked = [Asked(question, (), "unknown") for question in found if question][:count]
        return Test(said, [asked[n] for n in rng.permutation(len(asked))])
