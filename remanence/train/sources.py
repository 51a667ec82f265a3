"""Sources of batches. A source returns the batch of a step, which depends on the step number only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from remanence.data import Batch, Documents, Packed, Tokens
from remanence.data.texts import Texts
from remanence.io.files import add_digest, read_json, write_json
from remanence.io.shipped import resolve_model_path
from remanence.runtime.choices import check_choice
from remanence.tasks.babilong import ALL, Babilong, read_stories
from remanence.tasks.broad_facts import BroadFacts
from remanence.tasks.curriculum import Curriculum
from remanence.tasks.fact_dialogues import FactDialogues
from remanence.tasks.facts import Facts
from remanence.tasks.needle import Needle
from remanence.tasks.recall import Recall
from remanence.tokenizers.tokens import ByteTokenizer, Tokenizer, load_tokenizer
from remanence.train import text
from remanence.train.config import TrainConfig
from remanence.train.data_config import (
    DATA_KINDS,
    BabilongData,
    CorpusData,
    DataConfig,
    FactDialoguesData,
    FactsData,
    NeedleData,
    RecallData,
)
from remanence.verticals import Registry, sources


class Source(Protocol):
    """A source of batches. For language models, each batch is a `Batch`."""

    def step(self, number: int) -> Any:
        """Return the batch of a step, counted from 0. The same number always gives the same batch."""
        ...


class Prefetcher:
    """A source that prepares the next batch in a thread while the GPU works on the current one."""

    def __init__(self, source: Source) -> None:
        self.source, self.drawn = source, dict[int, Future[Batch]]()
        self.thread = ThreadPoolExecutor(1, "next batch")

    def step(self, number: int) -> Batch:
        """Return the batch of a step, and start to prepare the next one."""
        held = self.drawn.pop(number, None) or self.thread.submit(self.source.step, number)
        self.drawn = {number + 1: self.thread.submit(self.source.step, number + 1)}
        return held.result()

    def close(self) -> None:
        """Stop the thread."""
        self.thread.shutdown(cancel_futures=True)


def tokenizer_of(source: Source) -> Tokenizer | None:
    """Return the tokenizer of a source, or None for generated tasks that are not text."""
    if isinstance(source, Packed | Documents | Facts | FactDialogues):
        return source.data.tokenizer
    return getattr(source, "tokenizer", None)


def corpus(source: Source, steps: int = 64, piece: int = 2**24) -> Iterator[torch.Tensor]:
    """Yield all tokens of a source in pieces of at most `piece`, or of the first `steps` steps of a generated
    task.
    """
    if isinstance(source, Packed | Documents | Facts | FactDialogues):
        for shard in source.data.shards:
            for start in range(0, len(shard), piece):
                yield torch.from_numpy(shard[start : start + piece].astype(np.int64))
    else:
        for step in range(steps):
            yield source.step(step).tokens


def check_corpus(source: Source, run: Path) -> None:
    """Store the digest of the corpus in the run's folder, or raise an error if another digest is stored
    there.

    Nothing is stored for generated tasks and for data without a digest. If no digest is stored, any corpus is
    accepted.
    """
    note = run / "data.json"
    corpus = source.data if isinstance(source, Packed | Documents | Facts | FactDialogues) else source
    found = getattr(corpus, "digest", None)
    begun = read_json(note).get("corpus") if note.is_file() else found
    if begun != found:
        raise ValueError(
            f"data: expected the corpus that the run began with (digest {begun}), got another ({found}); prepare "
            f"that one again, or remove {note} to go on with this one"
        )
    if found is not None and not note.is_file():
        write_json(note, add_digest({"corpus": found}))


def _shards(config: TrainConfig) -> Tokens:
    """Open the prepared shards at ``data.path``, and check that the model's vocabulary is large enough."""
    assert isinstance(config.data, CorpusData)
    if config.data.path is None:
        raise ValueError("data.path: expected a folder made by `remanence data prepare`, got none")
    data = Tokens(config.data.path)
    check_vocabulary(config, "data", data.vocabulary)
    return data


def check_vocabulary(config: TrainConfig, owner: str, needed: int) -> None:
    """Raise an error if the model's vocabulary is smaller than `needed`.

    `owner` names the data in the error.
    """
    if (present := config.model.vocab_size) < needed:
        raise ValueError(f"model.vocab_size: expected at least the {owner}'s {needed}, got {present}")


def _packed(config: TrainConfig, batch: int, rank: int, world_size: int) -> Source:
    """Make the source of the kind `packed`. For the arguments of these functions, see `register_data`."""
    return Packed(_shards(config), config.data.length, batch, config.seed, rank, world_size)


def _documents(config: TrainConfig, batch: int, rank: int, world_size: int) -> Source:
    """Make the source of the kind `documents`."""
    return Documents(_shards(config), config.data.length, batch, config.seed, rank, world_size)


def _text(config: TrainConfig, batch: int, rank: int, world_size: int) -> Source:
    """Make the source of the kind `text`."""
    source = text.source(config, batch, rank, world_size)
    check_vocabulary(config, "text", source.data.vocabulary)
    return source


def _facts(config: TrainConfig, batch: int, rank: int, world_size: int) -> Source:
    """Make the source of the kind `facts`."""
    data = config.data
    assert isinstance(data, FactsData)
    ramp = data.distance_ramp * config.accumulate  # the source counts the parts of steps
    source = BroadFacts if data.facts == "broad" else Facts
    return source(
        _shards(config), data.length, batch, data.weight, ramp, config.seed, rank, world_size, data.answer_end
    )


def _fact_dialogues(config: TrainConfig, batch: int, rank: int, world_size: int) -> Source:
    """Make the source of the kind `fact_dialogues`."""
    data = config.data
    assert isinstance(data, FactDialoguesData)
    lengths = data.curriculum or (data.length,)
    ramp = data.distance_ramp * config.accumulate
    return FactDialogues(
        _shards(config), lengths, batch * data.length, config.steps * config.accumulate,
        facts=data.pairs, share=data.share, weight=data.weight, distance_ramp=ramp,
        seed=config.seed, rank=rank, world_size=world_size,
    )  # fmt: skip


def _recall(config: TrainConfig, batch: int, rank: int, world_size: int) -> Source:
    """Make the source of the kind `recall`."""
    data = config.data
    assert isinstance(data, RecallData)
    kinds = {"keys": data.keys, "noise": data.noise}
    source = Recall(data.length, batch, data.pairs, data.rounds, config.seed, rank, world_size, **kinds)
    check_vocabulary(config, "task", source.vocabulary)
    return source


def _needle(config: TrainConfig, batch: int, rank: int, world_size: int) -> Source:
    """Make the source of the kind `needle`."""
    assert isinstance(config.data, NeedleData)
    if config.model.vocab_size < 256:
        raise ValueError(f"model.vocab_size: expected at least 256, for bytes, got {config.model.vocab_size}")
    return Needle(config.data.length, batch, config.data.pairs, config.seed, rank, world_size)


def model_folder(init_from: str) -> Path:
    """Return the folder of the model to start from. Raise an error if it holds no model."""
    folder = resolve_model_path(init_from)
    if not (folder / "config.json").is_file():
        raise ValueError(f"init_from: expected a model's folder, with its config.json, got {init_from}")
    return folder


def _babilong(config: TrainConfig, batch: int, rank: int, world_size: int) -> Source:
    """Make the source of the kind `babilong`: a `Curriculum` if the config has one, else a `Babilong`."""
    data = config.data
    assert isinstance(data, BabilongData)
    for task in data.tasks:
        check_choice("data.tasks", task, ALL)
    if not data.tasks:
        raise ValueError("data.tasks: expected at least one, got none")
    start = config.init_from
    tokenizer = ByteTokenizer() if start is None else load_tokenizer(model_folder(start))
    check_vocabulary(config, "tokenizer", tokenizer.vocabulary)
    stories = {task: read_stories("data.path", data.path, task, "train") for task in data.tasks}
    books = Texts("data.books", data.books, "a text to hide stories in: a file, a folder or hf:NAME")
    if not data.curriculum:
        return Babilong(
            stories, books.sentences(), tokenizer, data.length, batch, config.seed, rank, world_size
        )
    about = data.curriculum, batch * data.length, config.steps * config.accumulate, config.seed, rank
    return Curriculum(stories, books.sentences(), tokenizer, *about)


Factory = Callable[[TrainConfig, int, int, int], Source]
"""A function ``(config, batch, rank, world_size)`` that makes a source; `batch` is the number of rows of one
process.
"""

SOURCES: Registry[Factory] = Registry(
    {
        "packed": _packed,
        "documents": _documents,
        "text": _text,
        "facts": _facts,
        "fact_dialogues": _fact_dialogues,
        "recall": _recall,
        "needle": _needle,
        "babilong": _babilong,
        **sources(),
    }
)
"""The function that makes the source of batches, for each kind of data. `register_data` adds a kind."""


def register_data(config: type[DataConfig], source: Factory) -> None:
    """Register a new kind of data: its dataclass, and the function that makes its source of batches.

    ``source(config, batch, rank, world_size)`` returns an object with a method ``step(number)``, which returns the
    `remanence.data.Batch` of a step: the `batch` rows of process `rank` out of `world_size` processes.
    """
    DATA_KINDS[config.kind] = config
    SOURCES[config.kind] = source


def make_source(config: TrainConfig, rank: int = 0, world_size: int = 1) -> Source:
    """Make the source of batches of one process of a run. Raise an error if the config does not allow it."""
    shares = config.accumulate * world_size
    if config.batch % shares:
        raise ValueError(
            f"batch: expected a multiple of accumulate x processes = {shares}, got {config.batch}"
        )
    check_choice("data.kind", config.data.kind, SOURCES)
    return SOURCES[config.data.kind](config, config.batch // shares, rank, world_size)
