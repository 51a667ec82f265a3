"""BABILong: the facts of a bAbI story, in order, somewhere in a book of exactly so many tokens, and its question at the end."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from remanence.config import known
from remanence.data.babi import ALL, PROMPT, Story, placed, read
from remanence.data.streams import PREFIX
from remanence.data.texts import Hay, Texts
from remanence.evaluate.plots import curves
from remanence.evaluate.subject import Subject
from remanence.evaluate.task import Result, Row, Setting, Task, at_least, share, told
from remanence.report import published

ORDERED = ("qa19",)
"""Tasks whose answers are several words in an order."""


@dataclass(frozen=True, kw_only=True)
class BabilongSettings:
    """
    Attributes:
        data: bAbI's folder or archive (tasks_1-20_v1-2; English, a thousand stories a task, where it has several), or hf:NAME
            of a dataset with BABILong's columns (input, question, target; config 0k, a split for each task).
        books: the text around the facts: a file, a folder or hf:NAME. Not needed for length 0.
        tasks: qa1 to qa20, or all.
        lengths: tokens of all that is read before the answer, exactly; 0 for the facts alone.
        samples: of every task and length.
        shots: stories of the training split, with their answers, that come first.
        published: which of the paper's points stand beside ours, few-shot or fine-tuned. Default: fine-tuned if the model was
            trained by recipes/babilong.py.
        batch: texts that are read side by side.
    """

    data: str | None = None
    books: str | None = None
    tasks: tuple[str, ...] = ALL[:5]
    lengths: tuple[int, ...] = (0, 1024, 2048, 4096)
    samples: int = 20
    shots: int = 0
    published: str | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        at_least(0, lengths=self.lengths, shots=self.shots)
        at_least(1, samples=self.samples, batch=self.batch)
        if self.published is not None:
            known("published", self.published, published.FIGURE6)
        if self.tasks == ("all",):
            object.__setattr__(self, "tasks", ALL)
        if not self.tasks:
            raise ValueError("tasks: expected at least one, got none")
        for task in self.tasks:
            known("tasks", task, ALL)
        if self.shots and self.data is not None and self.data.startswith(PREFIX):
            raise ValueError(f"shots: expected 0 with a dataset of the hub, which has no stories to learn from, got {self.shots}")


class Babilong(Task):
    """Whether the answer, and no other answer of the task, is said; and whether it is the likeliest of the task's answers."""

    name = "babilong"
    Settings = BabilongSettings

    def __init__(self, subject: Subject, settings: BabilongSettings) -> None:
        super().__init__(subject, settings)
        tuned = subject.trained.get("data") == "babilong"
        self.published = settings.published or ("fine-tuned" if tuned else "few-shot")
        self.digest = hashlib.sha256()
        self.stories = {name: self._read(name, "test") for name in settings.tasks}
        self.shots = {
            name: "".join(story.whole for story in self._read(name, "train")[: settings.shots])
            for name in settings.tasks
            if settings.shots
        }
        self.encoded: dict[str, list[int]] = {}
        self.fitting: dict[tuple[str, int], list[Story]] = {}
        self.books, self.hay = None, None
        if max(settings.lengths):
            self.books = Texts("babilong.books", settings.books, "a text to hide facts in: a file, a folder or hf:NAME")
            self.hay = Hay.of("babilong.books", self.books.sentences(), subject.tokenizer, max(settings.lengths))
        for group in self.units():  # a length without room for the stories is known now
            self.sample(group[-1])

    def _read(self, task: str, split: str) -> list[Story]:
        found = read("babilong.data", self.settings.data, task, split)
        self.digest.update(repr(found).encode())
        return found

    @property
    def identity(self) -> Setting:
        own = {"stories": self.digest.hexdigest()[:16], "shots": self.settings.shots}
        return {**super().identity, **own, **(self.books.identity if self.books else {})}

    def units(self) -> list[list[Setting]]:
        s = self.settings
        return [
            [{"qa": task, "length": length, "sample": number} for number in range(s.samples)]
            for task in s.tasks
            for length in s.lengths
        ]

    def cost(self, unit: Setting) -> int:
        return int(unit["length"]) or 256

    def sample(self, unit: Setting) -> tuple[np.ndarray, str, Story]:
        """A unit's text up to the question, how an answer begins, and the story: of those that have room, a drawn one."""
        key = hashlib.sha256(f"{self.subject.seed} {sorted(unit.items())}".encode()).digest()[:16]
        chance = np.random.Generator(np.random.Philox(key=int.from_bytes(key)))
        encode, prompt = self._encode, PROMPT
        start = encode(self.shots.get(unit["qa"], ""))
        fitting = self._fitting(unit["qa"], unit["length"] and unit["length"] - len(start) - len(encode(prompt)))
        if unit["sample"] >= len(fitting):
            whole = len(fitting) == len(self.stories[unit["qa"]])
            why = "which has no more stories" if whole else f"whose other stories have no room in {unit['length']} tokens"
            asked = f"at most {len(fitting)} samples of {unit['qa']}, {why}"
            raise ValueError(f"babilong.samples: expected {asked}, got {unit['sample'] + 1}")
        story = fitting[unit["sample"]]
        end = encode(story.asked)
        if not unit["length"] or self.hay is None:
            middle = np.array(encode(" ".join(story.facts)), np.int32)
        else:
            room = unit["length"] - sum(map(len, (start, end, encode(prompt))))
            middle = placed(story, self.hay.part(unit["length"]), room, chance)
        return np.concatenate([np.array(start, np.int32), middle, np.array(end, np.int32)]), prompt, story

    def _encode(self, text: str) -> list[int]:
        """bAbI says the same few sentences again and again."""
        if text not in self.encoded:
            self.encoded[text] = self.subject.tokenizer.encode(text)
        return self.encoded[text]

    def _fitting(self, task: str, room: int) -> list[Story]:
        """A task's stories that so many tokens hold (0: all), in an order that depends on the seed and the task alone, so that
        every length asks the same ones as far as they fit.
        """
        if (task, room) not in self.fitting:
            chance = np.random.Generator(np.random.Philox(key=[self.subject.seed, ALL.index(task)]))
            ordered = [self.stories[task][index] for index in chance.permutation(len(self.stories[task]))]
            sizes = [story.size(self._encode) if room else 0 for story in ordered]
            self.fitting[task, room] = [story for story, size in zip(ordered, sizes, strict=True) if size <= room]
        return self.fitting[task, room]

    def options(self, task: str, right: str) -> list[str]:
        """All answers of a task, the right one first."""
        return [right, *sorted({story.answer for story in self.stories[task]} - {right})]

    def measure(self, units: list[Setting]) -> list[Result]:
        samples = [self.sample(unit) for unit in units]
        options = [self.options(unit["qa"], story.answer) for unit, (_, _, story) in zip(units, samples, strict=True)]
        longest = max(len(self.subject.tokenizer.encode(f" {answer}")) for own in options for answer in own)
        texts, prompts = [text for text, _, _ in samples], [prompt for _, prompt, _ in samples]
        found = self.subject.answers(texts, prompts, [[f" {answer}" for answer in own] for own in options], longest + 8)
        return [
            {
                "right": judged(story, answer.said, own, ordered=unit["qa"] in ORDERED),
                "chosen": answer.ranked[0] == 0,
                "options": len(own),
                "answer": answer.said,
                "expected": story.answer,
            }
            for unit, (_, _, story), own, answer in zip(units, samples, options, found, strict=True)
        ]

    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        rows: list[Row] = []
        tuned = {"fine_tuned": True} if self.published == "fine-tuned" else {}
        for metric, key in (("right", "right"), ("chosen", "chosen")):
            for length in self.settings.lengths:
                here = [result for unit, result in results if unit["length"] == length]
                for task in self.settings.tasks:
                    own = [result for unit, result in results if (unit["qa"], unit["length"]) == (task, length)]
                    setting = {"qa": task, "length": length, "options": own[0]["options"], **tuned}
                    rows.append(self.row(metric, **share(sum(result[key] for result in own), len(own)), setting=setting))
                mean = share(sum(result[key] for result in here), len(here))
                rows.append(self.row(metric, **mean, setting={"qa": "mean", "length": length, **tuned}))
        return rows

    def plots(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        points = published.figure6(self.published)
        lengths = sorted({*self.settings.lengths, *published.FIGURE6_LENGTHS} - {0})
        none = lengths[0] / 2  # where no length at all stands on an axis of logarithms
        lines = {
            f"ours, memory {mode}": sorted(
                (row.setting["length"] or none, 100 * row.value)
                for row in own
                if row.metric == "right" and row.setting["qa"] == "mean"
            )
            for mode, own in rows.items()
        }
        ticks = {none: "0"} | {float(length): told(length) for length in lengths}
        title = f"BABILong, mean of {', '.join(self.settings.tasks)}; the paper's points: {self.published}"
        path = stem.with_name(f"{stem.name}.babilong.png")
        return [curves(path, lines, title=title, x="tokens", y="right answers, %", published=points, percent=True, ticks=ticks)]


def judged(story: Story, said: str, options: Sequence[str], *, ordered: bool) -> bool:
    """Whether what was said, up to its first end of a sentence or line, names the answer's words and no other answer's.

    As in BABILong, words that the question has itself do not count as an answer. A list's order matters only where `ordered`.
    """
    said = re.split(r"[.\n]|question:", said.strip().lower())[0]
    words = {word for option in options for word in option.lower().split(",")}
    words -= {word for word in words if _named(word, story.question.lower())} - set(story.answer.lower().split(","))
    expected = story.answer.lower().split(",")
    pattern = "|".join(sorted(map(re.escape, words), key=len, reverse=True))
    named = re.findall(rf"\b(?:{pattern})\b", said)
    return named == expected if ordered else set(named) == set(expected)


def _named(word: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text) is not None
