"""Needle in a haystack, as in RULER: retrieve the value of a key from a text of an exact number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

from remanence.data.texts import Texts
from remanence.evaluate.plots import heatmap
from remanence.evaluate.subject import Subject
from remanence.evaluate.task import Result, Row, Setting, Task, check_minimum, share
from remanence.runtime.choices import check_choice
from remanence.tasks.draw import unit_rng
from remanence.tasks.haystack import Haystack
from remanence.tasks.needle import KINDS, NOISE, Sample, draw_sample, options, score

MAX_ANSWER_TOKENS = 128
"""Maximum number of generated tokens, as in RULER. Longer right answers raise this limit."""


@dataclass(frozen=True, kw_only=True)
class NiahSettings:
    """Settings of the needle-in-a-haystack evaluation.

    Attributes:
        data: the background text: a file, a folder or hf:NAME. Not needed for the kind pk, which repeats a
            fixed text.
        kinds: kinds of needles: pk (passkey: a number in a repeated filler text), n (a number in an essay), w (word:
            a UUID in an essay), and with several needles in an essay multikey, multiquery and multivalue.
        lengths: exact numbers of tokens before the answer.
        depths: relative positions of the needle, from 0 (start of the text) to 1 (end). If there are several
            needles, this is the position of the first one that is queried.
        samples: number of texts per kind, length and depth.
        choices: number of values, right and wrong, that are ranked by likelihood.
        batch: batch size, in texts.
    """

    data: str | None = None
    kinds: tuple[str, ...] = ("pk", "n", "w")
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 5
    choices: int = 10
    batch: int = 1

    def __post_init__(self) -> None:
        check_minimum(1, lengths=self.lengths, samples=self.samples, batch=self.batch)
        check_minimum(0, depths=self.depths)
        check_minimum(5, choices=self.choices)
        if max(self.depths) > 1:
            raise ValueError(f"depths: expected numbers from 0 to 1, got {max(self.depths)}")
        if not self.kinds:
            raise ValueError("kinds: expected at least one, got none")
        for kind in self.kinds:
            check_choice("kinds", kind, KINDS)


class Niah(Task):
    """Retrieval of needles, measured in three ways: "said" (the generated text contains the value),
    "likeliest" (every token of the value is the most likely one) and "chosen" (the value ranks above wrong
    values).
    """

    name = "niah"
    Settings = NiahSettings

    def __init__(self, subject: Subject, settings: NiahSettings) -> None:
        super().__init__(subject, settings)
        longest, tokenizer = max(settings.lengths), subject.tokenizer
        self.texts: Texts | None = None
        self.hays: dict[bool, Haystack] = {}
        if any(KINDS[kind].essay for kind in settings.kinds):
            self.texts = Texts(
                "niah.data", settings.data, "a text to hide needles in: a file, a folder or hf:NAME"
            )
            self.hays[True] = Haystack.from_sentences("niah.data", self.texts.sentences(), tokenizer, longest)
        if not all(KINDS[kind].essay for kind in settings.kinds):
            self.hays[False] = Haystack.from_sentences("niah.data", repeat(NOISE), tokenizer, longest)
        for kind in settings.kinds:  # raises an error now if a length is too short
            self.sample(self._unit(kind, min(settings.lengths), settings.depths[0], 0))

    @property
    def identity(self) -> Setting:
        return {
            **super().identity,
            "choices": self.settings.choices,
            "ends": "scored",  # earlier versions did not check how an answer ends
            **(self.texts.identity if self.texts else {}),
        }

    @staticmethod
    def _unit(kind: str, length: int, depth: float, number: int) -> Setting:
        """Return the setting of one text."""
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
        """Generate the text of a unit. It depends only on the unit's setting and the seed."""
        hay = self.hays[KINDS[unit["kind"]].essay].subset(unit["length"])
        rng = unit_rng(self.subject.seed, unit)
        where = unit["kind"], unit["length"], unit["depth"]
        return draw_sample(*where, hay=hay, choices=self.settings.choices, rng=rng)

    def measure(self, units: list[Setting]) -> list[Result]:
        samples = [self.sample(unit) for unit in units]
        choices = [options(sample) for sample in samples]
        longest = max(len(self.subject.tokenizer.encode(own[0])) for own in choices)
        found = self.subject.answers(
            [each.text for each in samples],
            [each.prompt for each in samples],
            choices,
            max(MAX_ANSWER_TOKENS, longest),
        )
        return [score(sample, answer) for sample, answer in zip(samples, found, strict=True)]

    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        metrics = {"said": "said", "likeliest": "likeliest", "chosen": f"chosen of {self.settings.choices}"}
        rows = []
        for names, detail in ((("kind", "length"), False), (("kind", "length", "depth"), True)):
            for values in dict.fromkeys(tuple(unit[name] for name in names) for unit, _ in results):
                setting = dict(zip(names, values, strict=True))
                own = [result for unit, result in results if setting.items() <= unit.items()]
                for key, metric in metrics.items():
                    right = share(sum(result[key] for result in own), len(own))
                    kind = KINDS[setting["kind"]]
                    chance = {"chance": kind.answers / self.settings.choices} if key == "chosen" else {}
                    rows.append(self.row(metric, **right, setting={**setting, **chance}, detail=detail))
        return rows

    def plots(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        maps = {}
        for kind in self.settings.kinds:
            for mode, own in rows.items():
                cells = [
                    row for row in own if row.metric == "said" and row.detail and row.setting["kind"] == kind
                ]
                name = kind if len(rows) == 1 else f"{kind}, memory {mode}"
                maps[name] = {(row.setting["length"], row.setting["depth"]): row.value for row in cells}
        path = stem.with_name(f"{stem.name}.niah.png")
        columns_per_row = len(rows) if len(rows) > 1 else 3  # with several modes, one row of maps per kind
        title = "Needles retrieved, % of those queried"
        return [
            heatmap(
                path, maps, title=title, x="tokens", y="depth of the needle", columns_per_row=columns_per_row
            )
        ]
