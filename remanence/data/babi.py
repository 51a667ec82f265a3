"""bAbI's stories, and how BABILong hides one: its facts, in order, somewhere in a book of exactly so many tokens."""

from __future__ import annotations

import lzma
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from remanence.data.streams import PREFIX, parts
from remanence.data.texts import Encode, Hay, hidden, most

ALL = tuple(f"qa{number}" for number in range(1, 21))
FIND = "https://research.fb.com/downloads/babi (tasks_1-20_v1-2)"
PROMPT = "\nAnswer:"


class Story(NamedTuple):
    facts: list[str]
    question: str
    answer: str

    @property
    def whole(self) -> str:
        return f"{' '.join(self.facts)}{self.asked}{PROMPT} {self.answer}\n\n"

    @property
    def asked(self) -> str:
        return f"\nQuestion: {self.question}"

    def size(self, encode: Encode) -> int:
        """The tokens of its facts and its question, at most."""
        return len(encode(self.asked)) + sum(most(encode, fact) for fact in self.facts)


def read(what: str, source: str | None, task: str, split: str) -> list[Story]:
    """The stories of a task: of bAbI's folder or archive, or of a dataset ``hf:NAME`` as BABILong has them (facts alone, 0k)."""
    if source is not None and source.startswith(PREFIX):
        found = []
        for part in parts(f"{source}:0k:{task}"):
            for row in part.read(("input", "question", "target")):
                facts, question, answer = ((row[column] or "").strip() for column in ("input", "question", "target"))
                found.append(Story(re.split(r"(?<=[.!?])\s+", facts), question, answer))
        if not found:
            raise ValueError(f"{what}: expected stories in {source}:0k:{task}, got none")
        return found
    if source is None or not Path(source).exists():
        raise ValueError(
            f"{what}: expected bAbI's folder or archive, or hf:NAME, got {source or 'none'}; it can be found at {FIND}"
        )
    text = find(what, Path(source), task, split)
    if text is None:
        raise ValueError(f"{what}: expected {task}_..._{split}.txt in {source}, got none; the whole is at {FIND}")
    return list(stories(text))


def find(what: str, path: Path, task: str, split: str) -> str | None:
    """A task's file in a folder or an archive, from the folder `en` where there are several."""
    wanted = re.compile(rf"{task}_(?:.*_)?{split}\.txt")

    def first(names: list[str]) -> str | None:
        found = [name for name in names if wanted.fullmatch(Path(name).name)]
        return min(found, key=lambda name: (Path(name).parent.name != "en", len(name), name), default=None)

    if path.is_dir():
        name = first([str(each) for each in path.rglob(f"{task}_*.txt")])
        return name and Path(name).read_text(encoding="utf-8")
    try:
        with tarfile.open(path) as archive:
            name = first([member.name for member in archive.getmembers() if member.isfile()])
            inside = archive.extractfile(name) if name else None
            return inside.read().decode() if inside else None
    except (tarfile.TarError, EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{what}: expected a folder or a tar archive, got {path} ({reason})") from None


def stories(text: str) -> Iterator[Story]:
    """Every question of a bAbI file with the facts told before it in its story."""
    facts: list[str] = []
    for line in text.splitlines():
        number, _, rest = line.partition(" ")
        if number == "1":
            facts = []
        if "\t" in rest:
            question, answer, *_ = rest.split("\t")
            yield Story(list(facts), question.strip(), answer.strip())
        elif rest.strip():
            facts.append(rest.strip())


def placed(story: Story, hay: Hay, room: int, chance: np.random.Generator) -> np.ndarray:
    """So many tokens of hay with a story's facts in it, in their order, at drawn places."""
    depths = sorted(chance.random(len(story.facts)).tolist())
    return hidden(hay, story.facts, depths, room, chance)
