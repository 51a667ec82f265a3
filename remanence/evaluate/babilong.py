"""BABILong: accuracy on bAbI questions whose facts are distributed over a long text, by length."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from remanence.data.streams import PREFIX
from remanence.data.texts import Texts
from remanence.evaluate import published
from remanence.evaluate.plots import curves
from remanence.evaluate.subject import Subject
from remanence.evaluate.task import Result, Row, Setting, Task, check_minimum, share
from remanence.io.files import read_json
from remanence.runtime.choices import check_choice
from remanence.runtime.overrides import format_length
from remanence.tasks.babilong import ALL, PROMPT, Questions, Story, read_stories, score
from remanence.tasks.haystack import Haystack


@dataclass(frozen=True, kw_only=True)
class BabilongSettings:
    """Settings of the BABILong evaluation.

    Attributes:
        data: folder or archive of bAbI (tasks_1-20_v1-2; the English version with 1000 stories per task), or
            hf:NAME of a dataset with the columns of BABILong (input, question, target; config 0k, one split
            per task).
        books: the background text around the facts: a file, a folder or hf:NAME. Not needed for length 0.
        tasks: qa1 to qa20, or all.
        lengths: exact numbers of tokens before the answer. 0: the facts without background text.
        samples: number of questions per task and length.
        indices: a JSON file with the indices of the test stories per task, ``{"qa1": [1, 4, ...]}``, such as
            test_100_idxs.json of BABILong. Default: all stories, in a random order that depends on the seed.
        shots: number of training stories with answers in front of the text (few-shot examples).
        published: which results of the paper are plotted: few-shot or fine-tuned. Default: fine-tuned if the
            model was trained on BABILong (recipes/babilong.py), else few-shot.
        batch: batch size, in texts.
    """

    data: str | None = None
    books: str | None = None
    tasks: tuple[str, ...] = ALL[:5]
    lengths: tuple[int, ...] = (0, 1024, 2048, 4096)
    samples: int = 20
    indices: str | None = None
    shots: int = 0
    published: str | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        check_minimum(0, lengths=self.lengths, shots=self.shots)
        check_minimum(1, samples=self.samples, batch=self.batch)
        if self.published is not None:
            check_choice("published", self.published, published.FIGURE6)
        if self.tasks == ("all",):
            object.__setattr__(self, "tasks", ALL)
        if not self.tasks:
            raise ValueError("tasks: expected at least one, got none")
        for task in self.tasks:
            check_choice("tasks", task, ALL)
        if self.shots and self.data is not None and self.data.startswith(PREFIX):
            raise ValueError(
                f"shots: expected 0 with a dataset of the hub, which has no training stories, got {self.shots}"
            )


class Babilong(Task):
    """BABILong accuracy: whether the generated text contains the right answer and no other (metric "right"),
    and whether the right answer is the most likely option (metric "chosen").
    """

    name = "babilong"
    Settings = BabilongSettings

    def __init__(self, subject: Subject, settings: BabilongSettings) -> None:
        super().__init__(subject, settings)
        tuned = subject.trained.get("data") == "babilong"
        self.published = settings.published or ("fine-tuned" if tuned else "few-shot")
        self.digest = hashlib.sha256()
        stories = {name: self._select_stories(name) for name in settings.tasks}
        shots = {
            name: self._read_split(name, "train")[: settings.shots]
            for name in settings.tasks
            if settings.shots
        }
        self.books, hay = None, None
        if max(settings.lengths):
            hint = "a text to hide facts in: a file, a folder or hf:NAME"
            self.books = Texts("babilong.books", settings.books, hint)
            longest = max(settings.lengths)
            hay = Haystack.from_sentences(
                "babilong.books", self.books.sentences(), subject.tokenizer, longest
            )
        self.questions = Questions(stories, shots, hay, subject.tokenizer, subject.seed)
        for group in self.units():  # raises an error now if a length is too short for the stories
            self.sample(group[-1])

    def _select_stories(self, task: str) -> list[Story]:
        """Return the test stories of a task: all of them, or those that the file `indices` lists."""
        stories, path = self._read_split(task, "test"), self.settings.indices
        if path is None:
            return stories
        if not Path(path).is_file():
            raise ValueError(f"babilong.indices: expected a JSON file, got {path}, which does not exist")
        chosen = read_json(Path(path)).get(task)
        known = range(len(stories))
        if not isinstance(chosen, list) or not all(type(index) is int and index in known for index in chosen):
            wanted = f"numbers of stories below {len(stories)} for {task}"
            raise ValueError(f"babilong.indices: expected {wanted}, got others, or none, in {path}")
        self.digest.update(repr(chosen).encode())
        return [stories[index] for index in chosen]

    def _read_split(self, task: str, split: str) -> list[Story]:
        """Read the stories of a task and split, and add them to the digest of the data."""
        found = read_stories("babilong.data", self.settings.data, task, split)
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
        """Return the tokens of the text with its question, the prompt that starts the answer, and the story."""
        text, story = self.questions.sample(unit)
        return text, PROMPT, story

    def options(self, task: str, right: str) -> list[str]:
        """Return all possible answers of a task, with the correct one first."""
        return self.questions.options(task, right)

    def measure(self, units: list[Setting]) -> list[Result]:
        samples = [self.sample(unit) for unit in units]
        options = [
            self.options(unit["qa"], story.answer) for unit, (_, _, story) in zip(units, samples, strict=True)
        ]
        longest = max(len(self.subject.tokenizer.encode(f" {answer}")) for own in options for answer in own)
        texts, prompts = [text for text, _, _ in samples], [prompt for _, prompt, _ in samples]
        found = self.subject.answers(
            texts, prompts, [[f" {answer}" for answer in own] for own in options], longest + 8
        )
        return [
            score(unit["qa"], story, answer, own)
            for unit, (_, _, story), own, answer in zip(units, samples, options, found, strict=True)
        ]

    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        rows: list[Row] = []
        tuned = {"fine_tuned": True} if self.published == "fine-tuned" else {}
        for metric, key in (("right", "right"), ("chosen", "chosen")):
            for length in self.settings.lengths:
                here = [result for unit, result in results if unit["length"] == length]
                for task in self.settings.tasks:
                    own = [
                        result for unit, result in results if (unit["qa"], unit["length"]) == (task, length)
                    ]
                    setting = {"qa": task, "length": length, "options": own[0]["options"], **tuned}
                    rows.append(
                        self.row(
                            metric,
                            **share(sum(result[key] for result in own), len(own)),
                            setting=setting,
                        )
                    )
                mean = share(sum(result[key] for result in here), len(here))
                rows.append(self.row(metric, **mean, setting={"qa": "mean", "length": length, **tuned}))
        return rows

    def plots(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        points = published.figure6(self.published)
        lengths = sorted({*self.settings.lengths, *published.FIGURE6_LENGTHS} - {0})
        none = lengths[0] / 2  # the x position of length 0 on a logarithmic axis
        lines = {
            f"ours, memory {mode}": sorted(
                (row.setting["length"] or none, 100 * row.value)
                for row in own
                if row.metric == "right" and row.setting["qa"] == "mean"
            )
            for mode, own in rows.items()
        }
        ticks = {none: "0"} | {float(length): format_length(length) for length in lengths}
        title = f"BABILong, mean of {', '.join(self.settings.tasks)}; the paper's points: {self.published}"
        path = stem.with_name(f"{stem.name}.babilong.png")
        return [
            curves(
                path,
                lines,
                title=title,
                x="tokens",
                y="accuracy, %",
                published=points,
                percent=True,
                ticks=ticks,
            )
        ]
