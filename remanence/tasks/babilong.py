"""BABILong: the facts of a bAbI story hidden, in order, in a book text of an exact length, followed by a
question.
"""

from __future__ import annotations

import lzma
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remanence.data import Batch
from remanence.data.streams import PREFIX, parts
from remanence.tasks.answers import Answer
from remanence.tasks.draw import answer_batch, rank_rows, step_rng, unit_rng
from remanence.tasks.haystack import Encode, Haystack, hide, max_tokens
from remanence.tokenizers.tokens import Tokenizer, pair_tokens

ALL = tuple(f"qa{number}" for number in range(1, 21))
"""The names of all bAbI tasks."""
ORDERED = ("qa19",)
"""Tasks whose answers are several words in a fixed order."""
FIND = "https://research.fb.com/downloads/babi (tasks_1-20_v1-2)"
"""Where to download bAbI, for error messages."""
PROMPT = "\nAnswer:"
"""The text between a question and its answer."""
HAYSTACK_ROWS = 256
"""The number of rows for which a training haystack holds text, if the books have enough."""


class Story(NamedTuple):
    """A question of a bAbI story, the facts before it, and its answer."""

    facts: list[str]
    question: str
    answer: str

    @property
    def solved_example(self) -> str:
        """The story with its question and answer, used as an example before the actual question."""
        return f"{' '.join(self.facts)}{self.query}{PROMPT} {self.answer}\n\n"

    @property
    def query(self) -> str:
        """The question as it appears in the text."""
        return f"\nQuestion: {self.question}"

    def size(self, encode: Encode) -> int:
        """Return the maximum number of tokens of the facts and the question."""
        return len(encode(self.query)) + sum(max_tokens(encode, fact) for fact in self.facts)

    def hide(self, hay: Haystack, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
        """Return exactly `num_tokens` tokens of book text with the facts inserted in their order at random depths."""
        depths = sorted(rng.random(len(self.facts)).tolist())
        return hide(hay, self.facts, depths, num_tokens, rng)


def read_stories(name: str, source: str | None, task: str, split: str) -> list[Story]:
    """Read the stories of a task from bAbI's folder or archive, or from a dataset ``hf:NAME`` with BABILong's
    columns (0k).

    `name` is the setting that `source` comes from, for error messages.
    """
    if source is not None and source.startswith(PREFIX):
        return _hub_stories(name, source, task)
    if source is None or not Path(source).exists():
        wanted = "expected bAbI's folder or archive, or hf:NAME"
        raise ValueError(f"{name}: {wanted}, got {source or 'none'}; it can be found at {FIND}")
    text = find_file(name, Path(source), task, split)
    if text is None:
        raise ValueError(
            f"{name}: expected {task}_..._{split}.txt in {source}, got none; the whole is at {FIND}"
        )
    return list(parse_stories(text))


def _hub_stories(name: str, source: str, task: str) -> list[Story]:
    """Read the stories of a task from a dataset on the hub."""
    found = []
    columns = ("input", "question", "target")
    for part in parts(f"{source}:0k:{task}"):
        for row in part.read(columns):
            facts, question, answer = ((row[column] or "").strip() for column in columns)
            found.append(Story(re.split(r"(?<=[.!?])\s+", facts), question, answer))
    if not found:
        raise ValueError(f"{name}: expected stories in {source}:0k:{task}, got none")
    return found


def find_file(name: str, path: Path, task: str, split: str) -> str | None:
    """Return the text of a task's file in a folder or archive, preferring the folder `en`, or None if there
    is none.
    """
    wanted = re.compile(rf"{task}_(?:.*_)?{split}\.txt")

    def first(names: list[str]) -> str | None:
        """Return the best of the names that match, or None."""
        found = [each for each in names if wanted.fullmatch(Path(each).name)]
        return min(found, key=lambda each: (Path(each).parent.name != "en", len(each), each), default=None)

    if path.is_dir():
        file = first([str(each) for each in path.rglob(f"{task}_*.txt")])
        return file and Path(file).read_text(encoding="utf-8")
    try:
        with tarfile.open(path) as archive:
            file = first([member.name for member in archive.getmembers() if member.isfile()])
            inside = archive.extractfile(file) if file else None
            return inside.read().decode() if inside else None
    except (tarfile.TarError, EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name}: expected a folder or a tar archive, got {path} ({reason})") from None


def parse_stories(text: str) -> Iterator[Story]:
    """Yield every question of a bAbI file with the facts that precede it in its story."""
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


class Babilong:
    """Training rows: a story hidden in book text as in evaluation, its question, the answer and a newline.

    Only the answer and the newline are targets. Every row has exactly `length` tokens.
    """

    def __init__(
        self,
        stories: Mapping[str, Sequence[Story]],
        sentences: Iterable[str],
        tokenizer: Tokenizer,
        length: int,
        batch: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.tokenizer, self.length, self.batch = tokenizer, length, batch
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.encode = cache(tokenizer.encode)  # cached, as bAbI has few different sentences
        self.stories = []
        for task, own in stories.items():
            sizes = [story.size(self.encode) + sum(map(len, self._end(story))) for story in own]
            if min(sizes) > length:
                least = f"at least {min(sizes)}, for the shortest story of {task}"
                raise ValueError(f"data.length: expected {least}, got {length}")
            self.stories.append([story for story, size in zip(own, sizes, strict=True) if size <= length])
        self.hay = Haystack.from_sentences("data.books", sentences, tokenizer, length, HAYSTACK_ROWS)

    def _end(self, story: Story) -> tuple[list[int], list[int]]:
        """Return the tokens of the prompt and of the answer with its newline."""
        return pair_tokens(self.tokenizer, PROMPT, f" {story.answer}\n")

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """Draw a row; return its tokens and the number of answer tokens at its end."""
        own = self.stories[rng.integers(len(self.stories))]
        story = own[rng.integers(len(own))]
        prompt, answer = self._end(story)
        end = [*self.encode(story.query), *prompt, *answer]
        return np.concatenate([story.hide(self.hay, self.length - len(end), rng), end]), len(answer)

    def step(self, number: int) -> Batch:
        """Return the batch of a step."""
        rng = step_rng(self.seed, number)
        drawn = [self.row(rng) for _ in range(self.batch * self.world_size)][rank_rows(self.batch, self.rank)]
        return answer_batch([tokens for tokens, _ in drawn], [length for _, length in drawn])


class Questions:
    """Evaluation samples: test stories hidden in a book, after some training stories with their answers
    (shots).
    """

    def __init__(
        self,
        stories: Mapping[str, Sequence[Story]],
        shots: Mapping[str, Sequence[Story]],
        hay: Haystack | None,
        tokenizer: Tokenizer,
        seed: int,
    ) -> None:
        self.stories, self.hay, self.seed = stories, hay, seed
        self.shots = {task: "".join(story.solved_example for story in own) for task, own in shots.items()}
        self.encode = cache(tokenizer.encode)  # cached, as bAbI has few different sentences
        self.fitting: dict[tuple[str, int], list[Story]] = {}

    def sample(self, unit: Mapping[str, Any]) -> tuple[np.ndarray, Story]:
        """Return the tokens of a sample up to its question, and its story. Together with the prompt, the
        tokens have exactly the length in `unit`; length 0 means the story without a book.
        """
        rng, task, length = unit_rng(self.seed, unit), unit["qa"], unit["length"]
        start, prompt = self.encode(self.shots.get(task, "")), self.encode(PROMPT)
        story = self._story(task, unit["sample"], length, length and length - len(start) - len(prompt))
        end = self.encode(story.query)
        if not length or self.hay is None:
            middle = np.array(self.encode(" ".join(story.facts)), np.int32)
        else:
            num_tokens = length - sum(map(len, (start, end, prompt)))
            middle = story.hide(self.hay.subset(length), num_tokens, rng)
        return np.concatenate([np.array(start, np.int32), middle, np.array(end, np.int32)]), story

    def _story(self, task: str, index: int, length: int, num_tokens: int) -> Story:
        """Return a task's story number `index` among those that fit into `num_tokens` tokens. Raises ValueError if
        there are fewer.
        """
        fitting = self._stories_that_fit(task, num_tokens)
        if index >= len(fitting):
            all_fit = len(fitting) == len(self.stories[task])
            too_long = f"whose other stories have no room in {length} tokens"
            reason = "which has no more stories" if all_fit else too_long
            expected = f"at most {len(fitting)} samples of {task}, {reason}"
            raise ValueError(f"babilong.samples: expected {expected}, got {index + 1}")
        return fitting[index]

    def _stories_that_fit(self, task: str, num_tokens: int) -> list[Story]:
        """Return a task's stories that fit into `num_tokens` tokens, or all if `num_tokens` is 0.

        The order depends only on the seed and the task, so every length asks the same questions as far as
        they fit.
        """
        if (task, num_tokens) not in self.fitting:
            rng = np.random.Generator(np.random.Philox(key=[self.seed, ALL.index(task)]))
            ordered = [self.stories[task][index] for index in rng.permutation(len(self.stories[task]))]
            sizes = [story.size(self.encode) if num_tokens else 0 for story in ordered]
            self.fitting[task, num_tokens] = [
                story for story, size in zip(ordered, sizes, strict=True) if size <= num_tokens
            ]
        return self.fitting[task, num_tokens]

    def options(self, task: str, right: str) -> list[str]:
        """Return all possible answers of a task, with the right one first."""
        return [right, *sorted({story.answer for story in self.stories[task]} - {right})]


def score(task: str, story: Story, answer: Answer, options: Sequence[str]) -> dict[str, bool | int | str]:
    """Score an answer: whether the generated text gives the answer ("right"), and whether the answer is the
    most likely of the options ("chosen").
    """
    return {
        "right": is_right(story, answer.text, options, ordered=task in ORDERED),
        "chosen": answer.ranked[0] == 0,
        "options": len(options),
        "answer": answer.text,
        "expected": story.answer,
    }


def is_right(story: Story, text: str, options: Sequence[str], *, ordered: bool) -> bool:
    """Whether the text, up to the end of its first sentence or line, names the words of the answer and of no
    other answer.

    As in BABILong, words that occur in the question do not count as an answer. The order of a list matters
    only if `ordered`.
    """
    text = re.split(r"[.\n]|question:", text.strip().lower())[0]
    words = {word for option in options for word in option.lower().split(",")}
    words -= {word for word in words if _contains_word(story.question.lower(), word)} - set(
        story.answer.lower().split(",")
    )
    expected = story.answer.lower().split(",")
    pattern = "|".join(sorted(map(re.escape, words), key=len, reverse=True))
    found_answers = re.findall(rf"\b(?:{pattern})\b", text)
    return found_answers == expected if ordered else set(found_answers) == set(expected)


def _contains_word(text: str, word: str) -> bool:
    """Whether a text contains a word."""
    return re.search(rf"\b{re.escape(word)}\b", text) is not None
