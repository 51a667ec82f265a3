"""Messages in the first person with several facts in a sentence, what they leave open, and corrections of them.

`facts/first_person_*.txt` is written as the passages of `more_passages.py`, with more lines for a message:

    P My lodger {name} pays {price} a week and waters {thing} on {day}s.
    thing = the ferns|the basil                      items of a slot that no pool has
    name: Who pays {price} a week? => {name} does.   questions may name other slots
    ? How old is {name}?|Where does {name} work?     questions that the message does not answer
    ! price: We agreed on {new} a week.              a later message that changes a slot

`facts/near_misses.txt` has questions that other passages do not answer: "P ", how the passage begins, and "?" lines.
A text that begins with a small letter keeps its letters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments.attach import more_passages, relations

Rng = np.random.Generator


class Message(NamedTuple):
    """A passage (`relations.Passage`) with `never`, the questions that it does not answer, and `corrections`: the slot
    and the texts that change it to {new}.
    """

    text: str
    slots: dict[str, Any]
    questions: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]
    never: tuple[str, ...] = ()
    corrections: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Drawn(NamedTuple):
    """A message with its values: questions as (slot, question, full answer, short answer), questions without an answer,
    and perhaps a correction with the questions about the value that it changes.
    """

    text: str
    values: dict[str, str]
    asked: list[tuple[str, str, str, str]]
    never: list[str]
    correction: str = ""
    changed: str = ""
    new: str = ""
    asked_after: tuple[tuple[str, str, str, str], ...] = ()


def _message(block: str) -> Message:
    text, *lines = block.removeprefix("P ").split("\n")
    own: dict[str, Callable[[Rng], str]] = {}
    never: list[str] = []
    corrections, questions = [], []
    for line in lines:
        if line.startswith("? "):
            never += line[2:].split("|")
        elif line.startswith("! "):
            slot, texts = line[2:].split(": ", 1)
            corrections.append((slot, tuple(texts.split("|"))))
        elif found := re.match(r"(\w+) = (.*)", line):
            own[found[1]] = more_passages._pool(found[2].split("|"))
        else:
            slot, body = line.split(": ", 1)
            asked, answers = body.split(" => ")
            questions.append((slot, tuple(asked.split("|")), tuple(answers.split("|"))))
    pool = lambda slot: more_passages._own(relations._slot_pool(slot))
    slots = {slot: own.get(slot) or pool(slot) for slot in re.findall(r"{(\w+)}", text)}
    return Message(text.replace("\\n", "\n"), slots, tuple(questions), tuple(never), tuple(corrections))


def _blocks(name: str) -> list[str]:
    return ("\n" + "\n".join(more_passages._lines(name))).split("\nP ")[1:]


def _near_misses() -> dict[str, tuple[str, ...]]:
    found = {}
    for block in _blocks("near_misses.txt"):
        begin, *lines = block.split("\n")
        found[begin] = tuple(question for line in lines for question in line.removeprefix("? ").split("|"))
    return found


def _with_near_misses(passage: relations.Passage) -> Message:
    begin = passage.text.replace("\n", "\\n")[:BEGIN]
    return Message(passage.text, passage.slots, passage.questions, NEAR_MISSES.get(begin, ()))


BEGIN = 60
"""So many characters of a passage tell it from the others."""
MESSAGES = tuple(
    _message(block)
    for file in sorted(more_passages.FACTS.glob("first_person_*.txt"))
    for block in _blocks(file.name)
)
NEAR_MISSES = _near_misses()
PASSAGES = tuple(map(_with_near_misses, (*relations.PASSAGES_TRAIN, *more_passages.PASSAGES_TRAIN)))
"""The passages of the other files, for training."""


def fill(template: str, **values: str) -> str:
    text = template.format(**values)
    text = relations.fill("{text}", text=text) if not template[0].islower() else relations.fix_articles(text)
    return re.sub(r"\b([Aa]) (?=(8|11|18|8\d)-)", r"\1n ", text)


def _value(rng: Rng, pool: str | Callable[[Rng], str], text: str, taken: set[str]) -> str:
    """A value that is not in the text, that no other contains, and that contains no other. If there is none, one that
    differs from the others.
    """
    for tries in range(400):
        value = str(pool(rng) if callable(pool) else relations.pool_draw(rng, pool))
        inside = any(other in value or value in other for other in taken)
        if value not in taken and (tries >= 200 or (not inside and not more_passages._has(text, value))):
            return value
    raise ValueError(f"no value left of {pool}")


def _mentions(template: str, slot: str) -> bool:
    return "{" + slot + "}" in template


def draw(rng: Rng, message: Message, *, correct: float = 0.0, again: float = 0.25) -> Drawn:
    """The message with values. With the probability `correct`, a slot is corrected, if the message has a correction;
    with the probability `again`, a slot is asked for in a second wording. A corrected value mostly is.
    """
    values: dict[str, str] = {}
    for slot, pool in message.slots.items():
        values[slot] = _value(rng, pool, message.text, set(values.values()))
    changed, correction, new = "", "", ""
    if message.corrections and rng.random() < correct:
        changed, texts = relations._pick(rng, message.corrections)
        new = _value(rng, message.slots[changed], message.text, set(values.values()))
        correction = fill(relations._pick(rng, texts), **values, new=new)

    def questions(asked_of: str | None, known: dict[str, str]) -> list[tuple[str, str, str, str]]:
        """Questions about a slot, or about all of which no wording names what is corrected later."""
        answers = {slot: relations.as_answer(value) for slot, value in known.items()}
        found = []
        for slot, asked, full in message.questions:
            if asked_of is not None and slot != asked_of:
                continue
            wordings = [q for q in asked if not changed or not _mentions(q, changed)]
            full = tuple(a for a in full if slot == changed or not changed or not _mentions(a, changed))
            for n in rng.permutation(len(wordings))[
                : 1 + (rng.random() < (again if asked_of is None else 0.8))
            ]:
                answer = fill(relations._pick(rng, full), **answers) if full else answers[slot]
                found.append((slot, fill(wordings[int(n)], **known), answer, answers[slot]))
        return found

    asked = questions(None, values)
    after = questions(changed, values | {changed: new}) if changed else []
    never = [fill(q, **values) for q in message.never if not changed or not _mentions(q, changed)]
    text = fill(message.text, **values)
    return Drawn(text, values, asked, never, correction, changed, new, tuple(after))


GENERAL = frozenset((
    "name", "names", "called", "old", "age", "cost", "costs", "long", "live", "lives", "now",
    "earn", "time", "day", "date", "number", "my", "own", "job", "work", "does", "phone",
    "surname", "first", "year", "month", "many", "street",
))  # fmt: skip
"""Words that do not say whom or what a question is about."""


def content_words(text: str) -> set[str]:
    """The words that say what a question is about."""
    words = {re.sub(r"'s?$|^'", "", word) for word in relations._words(text)}
    return (
        words
        - relations._STOP
        - {"what", "which", "who", "where", "when", "how", "much", "many", "whose", ""}
    )


def alike(one: str, other: str) -> bool:
    """Whether two questions are so alike that the answer of one may answer the other."""
    a, b = content_words(one), content_words(other)
    return 2 * len(a & b) > len(a | b)
