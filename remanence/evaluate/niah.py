"""Needles in a haystack, as RULER makes them: a value under a key, somewhere in a text of exactly so many tokens."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from remanence.config import known
from remanence.data.texts import Hay, Texts, hidden, most
from remanence.evaluate.plots import heat
from remanence.evaluate.subject import Answer, Subject
from remanence.evaluate.task import Result, Row, Setting, Task, at_least, share

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

SAID = 128
"""Tokens an answer may have, as in RULER."""


class Kind(NamedTuple):
    """What the hay is made of, what a value is, and how many keys are told, are asked for, and have how many values."""

    essay: bool
    value: str
    keys: int = 1
    asked: int = 1
    values: int = 1


KINDS = {
    "pk": Kind(False, "number"),
    "n": Kind(True, "number"),
    "w": Kind(True, "uuid"),
    "multikey": Kind(True, "number", keys=4),
    "multiquery": Kind(True, "number", keys=4, asked=4),
    "multivalue": Kind(True, "number", values=4),
}
"""RULER's S-NIAH-1, 2 and 3 under the names of Titans' table 2, and three with several needles."""

_ADJECTIVES = (
    "amber ancient bold brisk calm clever curious dusty eager faint fierce frosty gentle golden hollow humble icy jolly keen "
    "lively lofty merry mighty narrow noble pale plain proud quick quiet rapid rusty sharp silent silver steep swift tame vivid"
)
_NOUNS = (
    "anchor anvil badger barrel beacon bridge candle canyon castle cedar comet copper dragon engine falcon feather forest garden "
    "glacier hammer harbor island kettle ladder lantern magnet marble meadow mirror needle orchard otter pebble puzzle raven "
    "saddle teapot temple thunder tunnel valley violin walnut whistle willow window zephyr"
)
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()


@dataclass(frozen=True, kw_only=True)
class NiahSettings:
    """
    Attributes:
        data: the text that needles are hidden in: a file, a folder or hf:NAME. The kind pk makes its own.
        kinds: pk, n, w (single needles), multikey, multiquery, multivalue.
        lengths: tokens of all that is read before the answer, exactly.
        depths: where the needle lies, from 0, the text's beginning, to 1, its end; of several, the first asked for.
        samples: of every kind, length and depth.
        choices: how many values the right one is chosen from by likelihood.
        batch: texts that are read side by side.
    """

    data: str | None = None
    kinds: tuple[str, ...] = ("pk", "n", "w")
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 5
    choices: int = 10
    batch: int = 1

    def __post_init__(self) -> None:
        at_least(1, lengths=self.lengths, samples=self.samples, batch=self.batch)
        at_least(0, depths=self.depths)
        at_least(5, choices=self.choices)
        if max(self.depths) > 1:
            raise ValueError(f"depths: expected numbers from 0 to 1, got {max(self.depths)}")
        if not self.kinds:
            raise ValueError("kinds: expected at least one, got none")
        for kind in self.kinds:
            known("kinds", kind, KINDS)


class Sample(NamedTuple):
    """A text up to the question, the words an answer begins with, the right values, and wrong ones to choose from instead."""

    text: np.ndarray
    prompt: str
    right: list[str]
    wrong: list[str]


class Niah(Task):
    """Whether the values are said; whether they are the likeliest text, token by token; whether they are chosen among others."""

    name = "niah"
    Settings = NiahSettings

    def __init__(self, subject: Subject, settings: NiahSettings) -> None:
        super().__init__(subject, settings)
        longest, tokenizer = max(settings.lengths), subject.tokenizer
        self.texts: Texts | None = None
        self.hays: dict[bool, Hay] = {}
        if any(KINDS[kind].essay for kind in settings.kinds):
            self.texts = Texts("niah.data", settings.data, "a text to hide needles in: a file, a folder or hf:NAME")
            self.hays[True] = Hay.of("niah.data", self.texts.sentences(), tokenizer, longest)
        if not all(KINDS[kind].essay for kind in settings.kinds):
            self.hays[False] = Hay.of("niah.data", repeat(NOISE), tokenizer, longest)
        for kind in settings.kinds:  # too short a length is known now, not after hours
            self.sample(self._unit(kind, min(settings.lengths), settings.depths[0], 0))

    @property
    def identity(self) -> Setting:
        return {**super().identity, "choices": self.settings.choices, **(self.texts.identity if self.texts else {})}

    @staticmethod
    def _unit(kind: str, length: int, depth: float, number: int) -> Setting:
        return {"kind": kind, "length": length, "depth": depth, "sample": number}

    def units(self) -> list[list[Setting]]:
        s = self.settings
        return [
            [self._unit(kind, length, depth, number) for depth in s.depths for number in range(s.samples)]
            for kind in s.kinds
            for length in s.lengths
        ]

    def cost(self, unit: Setting) -> int:
        return int(unit["length"])

    def sample(self, unit: Setting) -> Sample:
        """A unit's text: a function of its setting and the seed."""
        kind = KINDS[unit["kind"]]
        hay = self.hays[kind.essay].part(unit["length"])
        told = hashlib.sha256(f"{self.subject.seed} {sorted(unit.items())}".encode()).digest()
        chance = np.random.Generator(np.random.Philox(key=int.from_bytes(told[:16])))
        keys = self._unused(hay.text, chance, "key", kind.keys, [])
        values = self._unused(hay.text, chance, kind.value, kind.keys * kind.values, [])
        own = {key: values[index * kind.values : (index + 1) * kind.values] for index, key in enumerate(keys)}
        right = [value for key in keys[: kind.asked] for value in own[key]]
        wrong = [value for value in values if value not in right]
        wrong += self._unused(hay.text, chance, kind.value, self.settings.choices - len(right) - len(wrong), values)
        many = len(right) > 1
        plural = f"{kind.value}s"
        noun, verb = (plural, "are") if many else (kind.value, "is")
        query = ", ".join(keys[: kind.asked][:-1]) + ", and " * (kind.asked > 1) + keys[kind.asked - 1]
        head = (
            f"{'Some' if many else 'A'} special magic {noun} {verb} hidden within the following text. "
            f"Make sure to memorize it. I will quiz you about the {noun} afterwards.\n"
        )
        question = f"\nWhat {'are all' if many else 'is'} the special magic {noun} for {query} mentioned in the provided text?"
        prompt = f" The special magic {noun} for {query} mentioned in the provided text {verb}"
        encode = self.subject.tokenizer.encode
        needles = [f"One of the special magic {plural} for {key} is: {value}." for key in keys for value in own[key]]
        start, end = encode(head), encode(question)
        room = unit["length"] - sum(map(len, (start, end, encode(prompt))))
        least = unit["length"] - room + sum(most(encode, needle) for needle in needles)
        if least > unit["length"]:
            raise ValueError(f"niah.lengths: expected at least {least} tokens for the kind {unit['kind']}, got {unit['length']}")
        depths = [unit["depth"], *(float(depth) for depth in chance.random(len(needles) - 1))]
        if kind.values > 1:  # said in the order in which they were read
            right = [value for _, value in sorted(zip(depths, right, strict=True))]
        middle = hidden(hay, needles, depths, room, chance)
        body = np.concatenate([np.array(start, np.int32), middle, np.array(end, np.int32)])
        return Sample(body, prompt, right, wrong)

    @staticmethod
    def _unused(text: str, chance: np.random.Generator, what: str, count: int, taken: Sequence[str]) -> list[str]:
        """So many keys or values that are nowhere in the text, nor among those taken."""
        found: list[str] = []
        while len(found) < count:
            if what == "key":
                drawn = f"{chance.choice(ADJECTIVES)}-{chance.choice(NOUNS)}"
            elif what == "number":
                drawn = str(chance.integers(10**6, 10**7))
            else:
                drawn = str(uuid.UUID(bytes=chance.bytes(16), version=4))
            if drawn not in text and drawn not in found and drawn not in taken:
                found.append(drawn)
        return found

    def measure(self, units: list[Setting]) -> list[Result]:
        samples = [self.sample(unit) for unit in units]
        options = [[f" {', '.join(each.right)}", *(f" {value}" for value in (*each.right, *each.wrong))] for each in samples]
        longest = max(len(self.subject.tokenizer.encode(own[0])) for own in options)
        most_said = max(SAID, longest)
        found = self.subject.answers([each.text for each in samples], [each.prompt for each in samples], options, most_said)
        return [scored(sample, answer) for sample, answer in zip(samples, found, strict=True)]

    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        metrics = {"said": "said", "likeliest": "likeliest", "chosen": f"chosen of {self.settings.choices}"}
        rows = []
        for names, detail in ((("kind", "length"), False), (("kind", "length", "depth"), True)):
            places = list(dict.fromkeys(tuple(unit[name] for name in names) for unit, _ in results))
            for place in places:
                setting = dict(zip(names, place, strict=True))
                own = [result for unit, result in results if setting.items() <= unit.items()]
                for key, metric in metrics.items():
                    right = share(sum(result[key] for result in own), len(own))
                    kind = KINDS[setting["kind"]]
                    chance = {"chance": kind.asked * kind.values / self.settings.choices} if key == "chosen" else {}
                    rows.append(self.row(metric, **right, setting={**setting, **chance}, detail=detail))
        return rows

    def plots(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        maps = {}
        for kind in self.settings.kinds:
            for mode, own in rows.items():
                cells = [row for row in own if row.metric == "said" and row.detail and row.setting["kind"] == kind]
                name = kind if len(rows) == 1 else f"{kind}, memory {mode}"
                maps[name] = {(row.setting["length"], row.setting["depth"]): row.value for row in cells}
        path = stem.with_name(f"{stem.name}.niah.png")
        wide = len(rows) if len(rows) > 1 else 3  # of several modes, a line for each kind
        title = "Needles found, % of those asked for"
        return [heat(path, maps, title=title, x="tokens", y="depth of the needle", wide=wide)]


def scored(sample: Sample, answer: Answer) -> Result:
    """Shares of the right values: in what was said; all in order as the likeliest text; among the likeliest of the choices."""
    whole, *single = answer.options
    best = Answer(answer.said, single).ranked[: len(sample.right)]
    return {
        "said": sum(value.lower() in answer.said.lower() for value in sample.right) / len(sample.right),
        "likeliest": float(whole.greedy),
        "chosen": sum(number < len(sample.right) for number in best) / len(sample.right),
        "answer": answer.said,
        "right": sample.right,
    }
