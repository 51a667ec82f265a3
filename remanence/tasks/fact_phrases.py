"""Facts in many words: subjects, relations, values, and the wordings of statements and questions.

A fact has a subject ("the silent harbor", "Alice Warner"), a relation (its number, its owner, how far it is) and a
value (a number of 1 to 16 digits, a word, a name). Statements and questions about a relation are drawn independently,
so that a question often has other words than the statement. Relations, wordings and words that are held out never occur
in training; they are for tests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from remanence.tasks.fact_words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    COUNTS,
    DAYS,
    FIRST_NAMES,
    FOODS,
    JOBS,
    LAST_NAMES,
    MONTHS,
    NOUNS,
    Words,
    invented,
)
from remanence.tasks.needle import KINDS as RULER_KINDS
from remanence.tasks.needle import frame, needle

UNKNOWN = "unknown"
"""The answer to a question about something that was never stated."""
MAX_DIGITS = 16
"""The number of digits of the longest numbers."""
SHORT_DIGITS = 5
"""Half of the numbers have at most so many digits: the first digits of a number depend on the look-up most."""


class Vocabulary:
    """Draws words: subjects and values. With `held_out`, from the words that never occur in training.

    `common` are further words, for example those of a corpus. A share of the words is invented, so that a model
    learns to repeat any word and not only those of the lists.
    """

    LISTED = 0.6
    """The share of nouns and adjectives that are from the lists, if there are other words."""
    INVENTED = 0.2
    """The share of names of persons and places that are invented."""

    def __init__(self, common: Sequence[str] = (), held_out: bool = False) -> None:
        self.common, self.held_out = tuple(common), held_out
        self._lists: dict[int, tuple[str, ...]] = {}

    def word(self, rng: np.random.Generator, words: Words) -> str:
        """Draw a word of a list."""
        listed = (words.held_out if self.held_out else words.trained) or words.trained
        return listed[int(rng.integers(len(listed)))]

    def any_word(self, rng: np.random.Generator, words: Words) -> str:
        """Draw a word of a list, another common word, or an invented one."""
        share = 0.0 if self.held_out else float(rng.random())
        if share < self.LISTED:
            return self.word(rng, words)
        if self.common and share < 0.9:
            return self.common[int(rng.integers(len(self.common)))]
        return invented(rng, (1, 3))

    def _is_invented(self, rng: np.random.Generator) -> bool:
        return not self.held_out and float(rng.random()) < self.INVENTED

    def person(self, rng: np.random.Generator) -> str:
        """Draw the name of a person."""
        names = [
            invented(rng).capitalize() if self._is_invented(rng) else self.word(rng, words)
            for words in (FIRST_NAMES, LAST_NAMES)
        ]
        form = 1.0 if self.held_out else float(rng.random())
        title = ("Mr", "Mrs", "Dr", "Captain")[int(form * 40) % 4]
        return names[0] if form < 0.1 else f"{title} {names[1]}" if form < 0.2 else " ".join(names)

    def place(self, rng: np.random.Generator) -> str:
        """Draw the name of a city."""
        return invented(rng).capitalize() if self._is_invented(rng) else self.word(rng, CITIES)

    def thing(self, rng: np.random.Generator) -> str:
        """Draw a thing, with its article: an adjective and a noun, a noun alone, or two adjectives and a noun."""
        form, noun = float(rng.random()), self.any_word(rng, NOUNS)
        if form < 0.15:
            return f"the {noun}"
        if form < 0.2:
            return f"the {self.any_word(rng, ADJECTIVES)} {self.any_word(rng, ADJECTIVES)} {noun}"
        if form < 0.25:
            return f"the {self.word(rng, CITIES)} {noun}"
        return f"the {self.any_word(rng, ADJECTIVES)} {noun}"

    def subject(self, rng: np.random.Generator, kind: str) -> str:
        """Draw a subject of a kind: "thing", "person", or "any", which may also be a city."""
        if kind == "any":
            form = float(rng.random())
            kind = "thing" if form < 0.65 else "person" if form < 0.9 else "place"
        return {"thing": self.thing, "person": self.person, "place": self.place}[kind](rng)

    def value(self, rng: np.random.Generator, kind: str, max_digits: int = MAX_DIGITS) -> str:
        """Draw a value of a kind."""
        if kind == "number":
            return number(rng, max_digits=max_digits)
        if kind == "two words":
            return f"{self.any_word(rng, ADJECTIVES)} {self.any_word(rng, NOUNS)}"
        if kind == "word":
            return self.any_word(rng, NOUNS)
        if kind in ("person", "place"):
            return self.subject(rng, kind)
        return self.word(rng, VALUES[kind])


VALUES: dict[str, Words] = {
    "colour": COLOURS, "animal": ANIMALS, "job": JOBS, "food": FOODS, "day": DAYS, "month": MONTHS, "count": COUNTS,
}  # fmt: skip
"""The values of the kinds that are words of one list."""


def number(rng: np.random.Generator, digits: int | None = None, max_digits: int = MAX_DIGITS) -> str:
    """Draw a number with this many digits, or with 1 to `max_digits`."""
    if digits is None:
        digits = int(rng.integers(1, (SHORT_DIGITS if rng.random() < 0.5 else max_digits) + 1))
    drawn = rng.integers(0, 10, digits)
    drawn[0] = max(1, drawn[0]) if digits > 1 else drawn[0]
    return "".join(map(str, drawn.tolist()))


class Relation(NamedTuple):
    """What a fact says about its subject: the kinds of its subjects and values, and its wordings.

    {s} stands for the subject, {v} for the value, and {a} for the relation's name, for example "number". The first
    statement and the first question are the plainest.
    """

    name: str
    subjects: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]


STATEMENTS = (
    "The {a} of {s} is {v}.", "The {a} of {s} is {v}.", "{s}'s {a} is {v}.", "{v} is the {a} of {s}.",
    "{s} has the {a} {v}.", "Remember that the {a} of {s} is {v}.", "Remember: {s}'s {a} is {v}.",
    "Please note that the {a} of {s} is {v}.", "The {a} of {s}: {v}.", "{s}, {a}: {v}.", "{s}: {a} {v}.",
    "For {s} the {a} is {v}.", "As for {s}, the {a} is {v}.", "I was told that the {a} of {s} is {v}.",
    "\"The {a} of {s} is {v},\" she said.", "\"What is the {a} of {s}?\" \"{v}.\"",
    "\"{s}'s {a}?\" \"{v},\" he answered.",
    "User: The {a} of {s} is {v}.\nAssistant: I will remember it.\n", "He wrote down {v} as the {a} of {s}.",
    "{v}: that is the {a} of {s}.", "The {a} that belongs to {s} is {v}.", "They gave {s} the {a} {v}.",
    "Note: {a} of {s} = {v}.", "It is well known that {s} has {v} as its {a}.", "In the book, the {a} of {s} was {v}.",
    "Do not forget: the {a} of {s} is {v}.", "{s} got {v} as {a}.", "The {a} is {v} for {s}.",
)  # fmt: skip
"""Wordings of a statement about a relation that has a name."""
HELD_OUT_STATEMENTS = (
    "According to the letter, the {a} of {s} is {v}.",
    "Everybody knew {v} to be the {a} of {s}.",
    "My notes say that {s}'s {a} is {v}.",
    "They chose the {a} {v} for {s}.",
)
"""Statements that are held out."""

QUESTIONS = (
    "What is the {a} of {s}?", "What is the {a} of {s}?", "The {a} of {s} is", "What is {s}'s {a}?", "{s}'s {a} is",
    "Tell me the {a} of {s}:", "Which {a} has {s}?", "Which {a} does {s} have?", "Do you know the {a} of {s}?",
    "Q: What is the {a} of {s}?\nA:", "User: What is the {a} of {s}?\nAssistant:", "{s}, {a}:", "{a} of {s}:",
    "{s}'s {a}?",
    "And what was the {a} of {s}?", "\"What {a} has {s}?\" \"It is", "Please tell me {s}'s {a}.",
    "What {a} does {s} have?", "I forgot the {a} of {s}. It is",
)  # fmt: skip
"""Wordings of a question about a relation that has a name. The answer, with a period, follows."""
HELD_OUT_QUESTIONS = (
    "Could you give me the {a} of {s}?",
    "Do you remember what {s}'s {a} was?",
    "User: I need the {a} of {s}, please.\nAssistant:",
    "What did they say the {a} of {s} was?",
)
"""Questions that are held out."""


def _named(names: str, values: str, subjects: str = "any") -> list[Relation]:
    """Make a relation of each name of a comma-separated list. `values` is a list of kinds, too."""
    kinds = tuple(kind.strip() for kind in values.split(","))
    return [Relation(name.strip(), subjects, kinds, STATEMENTS, QUESTIONS) for name in names.split(",")]


def _spoken(name: str, subjects: str, values: str, statements: str, questions: str) -> Relation:
    """Make a relation from wordings separated by bars."""
    said, asked = (
        tuple(text.strip() for text in wordings.split("|")) for wordings in (statements, questions)
    )
    return Relation(name, subjects, tuple(kind.strip() for kind in values.split(",")), said, asked)


NAMED = (
    *_named("number, number, number, code, phone number, account number, serial number", "number"),
    *_named("secret number, room number, fax number, customer number, lucky number, pin", "number"),
    *_named("identifier, magic number, access code", "number"),
    *_named("value, key, label, result, entry, mark, score", "number, number, word, two words"),
    *_named("year, age, height, length, size, depth, limit, rank, page, level", "number", "any"),
    *_named("password, secret word, code word, passphrase, motto", "word, two words, number"),
    *_named("name, title, nickname, symbol, sign", "word, two words, person"),
    *_named("colour, favourite colour, color", "colour"),
    *_named("owner, friend, neighbour, guardian, doctor, teacher, brother, sister, heir, founder, rival", "person"),
    *_named("city, home town, birthplace, capital, origin", "place"),
    *_named("favourite animal, pet, emblem", "animal"),
    *_named("profession, trade", "job", "person"),
    *_named("favourite food, breakfast, dinner", "food"),
    *_named("day, deadline, day off", "day, month"),
)  # fmt: skip
"""Relations with a name."""
NUMBERS = tuple(relation for relation in NAMED if relation.values == ("number",))
"""Those of them whose value is a number."""

SPOKEN = (
    _spoken("price", "thing", "number",
        "{s} costs {v} crowns.|The price of {s} is {v} crowns.|They paid {v} crowns for {s}.|{v} crowns is the price "
        "of {s}.|You can buy {s} for {v} crowns.|{s} was bought for {v} crowns.",
        "How many crowns does {s} cost?|What is the price of {s} in crowns?|How much does {s} cost?|How much is {s}?|"
        "What did they pay for {s}?"),
    _spoken("price", "thing", "number",
        "{s} costs {v} dollars.|The price of {s} is {v} pounds.|{s} sells for {v} coins.",
        "How much does {s} cost?|What is the price of {s}?|How much is {s}?"),
    _spoken("distance", "any", "number",
        "It is {v} miles to {s}.|{s} is {v} miles away.|The distance to {s} is {v} miles.|From here it is {v} miles to "
        "{s}.|It is {v} miles from here to {s}.|{v} miles lie between us and {s}.",
        "How many miles is it to {s}?|How far is {s}?|What is the distance to {s}?|How many miles away is {s}?|How far "
        "is it to {s}?"),
    *(_spoken(item, "thing", "number",
          f"{{s}} has {{v}} {item}.|There are {{v}} {item} in {{s}}.|Remember that {{s}} has {{v}} {item}.|"
          f"{{v}} {item} belong to {{s}}.|They counted {{v}} {item} in {{s}}.|The number of {item} in {{s}} is {{v}}.",
          f"How many {item} does {{s}} have?|How many {item} are there in {{s}}?|How many {item} has {{s}}?|"
          f"What is the number of {item} in {{s}}?")
      for item in ("doors", "windows", "rooms", "steps", "seats", "pages", "horses", "servants", "lamps", "books",
               "men", "trees", "letters", "keys", "stones", "guests")),
    _spoken("years", "any", "number",
        "{s} is {v} years old.|The age of {s} is {v} years.|{s} has lived for {v} years.",
        "How old is {s}?|What is the age of {s}?|How many years old is {s}?"),
    _spoken("weight", "any", "number",
        "{s} weighs {v} pounds.|The weight of {s} is {v} pounds.|{v} pounds is the weight of {s}.",
        "How much does {s} weigh?|How many pounds does {s} weigh?|What is the weight of {s}?"),
    _spoken("debt", "person", "number",
        "{s} owes {v} pounds.|{s} has a debt of {v} pounds.|{v} pounds are owed by {s}.",
        "How much does {s} owe?|How many pounds does {s} owe?|What is the debt of {s}?"),
    _spoken("call", "person", "number",
        "You can call {s} at {v}.|Call {s} at {v}.|{s} can be reached at {v}.|{s} has the telephone {v}.",
        "How can I call {s}?|At which number can {s} be reached?|What is the telephone of {s}?"),
    _spoken("birth", "person", "number",
        "{s} was born in {v}.|The year of {s}'s birth is {v}.",
        "In which year was {s} born?|When was {s} born?|What is {s}'s year of birth?"),
    _spoken("place", "any", "place",
        "{s} is in {v}.|{s} can be found in {v}.|{v} is where {s} is.|In {v} you will find {s}.",
        "Where is {s}?|In which city is {s}?|Where can I find {s}?|Which city is {s} in?"),
    _spoken("home", "person", "place",
        "{s} lives in {v}.|{s} has a house in {v}.|{v} is the home of {s}.|{s} moved to {v}.",
        "Where does {s} live?|In which city does {s} live?|What is the home of {s}?|Where is the house of {s}?"),
    _spoken("job", "person", "job",
        "{s} works as a {v}.|{s} is a {v} by trade.|{s} earns a living as a {v}.|By profession {s} is a {v}.",
        "What does {s} work as?|What is the job of {s}?|What is {s} by profession?|What does {s} do for a living?"),
    _spoken("animal", "person", "animal",
        "{s} owns a {v}.|{s} has a {v}.|A {v} belongs to {s}.",
        "Which animal does {s} own?|Which animal has {s}?|What animal belongs to {s}?"),
    _spoken("food", "person", "food",
        "{s} likes {v}.|{s} eats {v} every day.|{s} is fond of {v}.|{v} is what {s} likes best.",
        "What does {s} like?|What does {s} eat?|What is {s} fond of?"),
    _spoken("coloured", "thing", "colour",
        "{s} is {v}.|{s} is painted {v}.|They painted {s} {v}.|{v} is the colour of {s}.|The colour of {s} is {v}.",
        "What colour is {s}?|What colour did they paint {s}?|What is the colour of {s}?|Which colour has {s}?"),
    _spoken("owned", "thing", "person",
        "{s} belongs to {v}.|{v} owns {s}.|{v} is the owner of {s}.|{s} is the property of {v}.",
        "Who owns {s}?|To whom does {s} belong?|Who is the owner of {s}?|Whose is {s}?"),
    _spoken("made", "thing", "person",
        "{s} was made by {v}.|{v} made {s}.|{v} built {s}.|{s} is the work of {v}.",
        "Who made {s}?|Who built {s}?|By whom was {s} made?"),
    _spoken("married", "person", "person",
        "{s} is married to {v}.|{v} married {s}.|{s} wants to marry {v}.",
        "Who is {s} married to?|Whom did {s} marry?|To whom is {s} married?"),
    _spoken("contents", "thing", "word, two words, animal, food",
        "In {s} there is a {v}.|{s} contains a {v}.|A {v} was found in {s}.|{s} has a {v} in it.",
        "What is in {s}?|What does {s} contain?|What was found in {s}?"),
    _spoken("opening", "thing", "day, month",
        "{s} opens on {v}.|{s} will be open on {v}.|On {v} they open {s}.",
        "When does {s} open?|On which day does {s} open?|When will {s} be open?"),
    _spoken("visit", "person", "day, month",
        "{s} will come on {v}.|{s} arrives on {v}.|On {v} we expect {s}.",
        "When will {s} come?|When does {s} arrive?|When do we expect {s}?"),
    _spoken("many", "thing", "count",
        "{s} has {v} corners.|There are {v} corners in {s}.|{v} is the number of corners of {s}.",
        "How many corners does {s} have?|How many corners are there in {s}?"),
)  # fmt: skip
"""Relations with wordings of their own."""

HELD_OUT_RELATIONS = (
    _spoken("sold", "thing", "number", "{s} was sold for {v} francs.", "For how many francs was {s} sold?"),
    _spoken("taxes", "thing", "number", "{s} stands {v} feet high.", "How many feet high is {s}?"),
    _spoken("captain", "thing", "person", "{v} commands {s}.", "Who commands {s}?"),
    _spoken("study", "person", "place", "{s} studies in {v}.", "Where does {s} study?"),
    _spoken("wool", "thing", "word", "{s} smells of {v}.", "What does {s} smell of?"),
    *_named("ticket number, licence", "number"),
    *_named("hiding place", "word"),
)
"""Relations that are held out."""


class Fact(NamedTuple):
    """A fact in words: what states it, the question, and the value, which answers the question."""

    statement: str
    question: str
    value: str


def capitalized(text: str) -> str:
    """Return a text with a capital first letter, or with one after an opening quotation mark."""
    place = 1 if text.startswith('"') else 0
    return text[:place] + text[place : place + 1].upper() + text[place + 1 :]


def fill(template: str, subject: str, value: str, name: str) -> str:
    """Return a wording with its subject, value and name, with a space before it.

    It begins with a capital letter, unless it begins with the value, which an answer has to repeat.
    """
    before, after = template.split("{v}", 1) if "{v}" in template else (template, None)
    text = before.replace("{s}", subject).replace("{a}", name)
    if after is not None:
        if value[0] in "aeio" and text.endswith((" a ", "A ")):
            text = text[:-1] + "n "
        text = text if before.strip('"') == "" else capitalized(text)
        return " " + text + value + after.replace("{s}", subject).replace("{a}", name)
    return " " + capitalized(text)


DIRECT, REPEATED, ASKED, ANY, RULER = range(5)
"""The forms of facts: the name directly before the value; the same words, farther apart; a question in almost the same
words; any wording of any relation; RULER's wording.
"""
SHARES = 0.1, 0.1, 0.15, 0.6, 0.05
"""The shares of the forms."""


def draw_form(rng: np.random.Generator, count: int = len(SHARES)) -> int:
    """Draw one of the first `count` forms."""
    drawn = float(rng.random()) * sum(SHARES[:count])
    return min(bisect_right(list(accumulate(SHARES[:count])), drawn), count - 1)


def draw_relation(rng: np.random.Generator, form: int = ANY, numbers: float = 0.0) -> Relation:
    """Draw a relation for training that has this form. In this share of the draws its value is a number."""
    if form == RULER:
        return NAMED[0]
    relations = NUMBERS if numbers and rng.random() < numbers else NAMED
    if form == ANY and rng.random() < 0.5:
        relations = SPOKEN
    return relations[int(rng.integers(len(relations)))]


def similar(one: Relation, other: Relation) -> bool:
    """Whether a question about one relation could mean the other. Names of numbers are told apart by their words."""
    if one.name == other.name:
        return True
    named = one.statements is STATEMENTS and other.statements is STATEMENTS
    if named and one.values == other.values == ("number",):
        return False
    return not set(one.values).isdisjoint(other.values)


def draw_fact(
    rng: np.random.Generator,
    vocabulary: Vocabulary,
    relation: Relation,
    subject: str,
    form: int = ANY,
    max_digits: int = MAX_DIGITS,
) -> Fact:
    """Draw the value and the wordings of a fact about a subject."""
    kind = relation.values[int(rng.integers(len(relation.values)))]
    value = vocabulary.value(rng, kind, max_digits)
    if form == RULER:
        key = subject.removeprefix("the ").replace(" ", "-")
        _, question, begun = frame(RULER_KINDS["n"], [key])
        return Fact(f" {needle('number', key, value)}", question + begun, value)
    if form == ANY:
        statement, question = (
            wordings[int(rng.integers(len(wordings)))]
            for wordings in (relation.statements, relation.questions)
        )
    else:
        statement, question = FORMS[form]
    return fill_fact(statement, question, subject, value, relation.name)


def fill_fact(statement: str, question: str, subject: str, value: str, name: str) -> Fact:
    """Make a fact of its wordings, its subject and value, and the name of its relation."""
    return Fact(fill(statement, subject, value, name), fill(question, subject, value, name), value)


FORMS = {
    DIRECT: ("{s}: {v}.", "{s}:"),
    REPEATED: ("The {a} of {s} is {v}.", "The {a} of {s} is"),
    ASKED: ("The {a} of {s} is {v}.", "What is the {a} of {s}?"),
}
"""The statements and questions of forms with one wording."""
