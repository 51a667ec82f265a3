"""DNA: a genome to be predicted base by base, and sequences whose class is asked for at their end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from math import sqrt
from pathlib import Path

import numpy as np
import torch

from remanence.data import Batch
from remanence.data.sources import files
from remanence.dna.alphabet import ASKS, BASES, FIRST, DnaTokenizer, base_tokens, reverse_complement
from remanence.dna.config import DnaData, GenomeData
from remanence.dna.fasta import records
from remanence.dna.labelled import Labelled, read_labelled
from remanence.tasks.draw import IGNORED, plain_batch, rank_rows, step_rng
from remanence.train.config import TrainConfig
from remanence.train.sources import check_vocabulary

PADDING = BASES.index("N")
"""What stands behind a sequence that ends before its row. A causal model never sees it where it is asked."""


def digest(parts: Iterable[np.ndarray | str]) -> str:
    """Of sequences, or of sequences and labels: a run that goes on notices other ones."""
    found = sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part.data  # no copy of a chromosome
        found.update(len(raw).to_bytes(8, "little"))
        found.update(raw)
    return found.hexdigest()[:32]


class Genome:
    """Training rows from random places of a genome. Each base is predicted from those before it.

    Where rows carry their memory, a row reads on for up to `stretch` pieces before it begins at another place. With
    `reverse_complement`, every other place, by chance, is read on the other strand.
    """

    def __init__(
        self,
        records: Sequence[np.ndarray],
        length: int,
        batch: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        *,
        stretch: int = 1,
        reverse_complement: bool = False,
    ) -> None:
        self.records, self.length, self.batch, self.seed = list(records), length, batch, seed
        self.rank, self.rows, self.both = rank, batch * world, reverse_complement
        self.tokenizer, self.digest = DnaTokenizer(), digest(records)
        sizes = np.array([len(record) for record in records])
        if sizes.max(initial=0) < 2:
            raise ValueError("data.path: expected a sequence of at least two bases, got none")
        # Not longer than the sequences that half of all bases lie in: shorter ones are padded.
        ordered = np.sort(sizes)[::-1]
        half = int(ordered[np.searchsorted(np.cumsum(ordered), ordered.sum() / 2)])
        self.pieces = max(1, min(stretch, (half - 1) // length))
        self.carried = stretch > 1
        self.room = np.maximum(1, sizes - self.pieces * length)
        self._drawn = lru_cache(4)(self._draw)

    def _draw(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Every row's record, place and strand for the stretch of this number."""
        rng = step_rng(self.seed, number)
        ends = np.cumsum(self.room)
        at = rng.integers(int(ends[-1]), size=self.rows)
        record = np.searchsorted(ends, at, "right")
        turned = rng.integers(2, size=self.rows).astype(bool) & self.both
        return record, at - (ends[record] - self.room[record]), turned

    def _piece(self, record: int, start: int, turned: bool, piece: int) -> np.ndarray:
        """One more token than a row's, or fewer at the record's end."""
        bases, size = self.records[record], self.pieces * self.length + 1
        stretch = bases[start : start + size]
        first = piece * self.length
        if not turned:
            return stretch[first : first + self.length + 1]
        stop = max(0, len(stretch) - first)
        return reverse_complement(stretch[max(0, stop - self.length - 1) : stop])

    def step(self, number: int) -> Batch:
        tokens = np.full((self.batch, self.length), PADDING, np.int64)
        targets = np.full_like(tokens, IGNORED)
        begins = np.zeros(self.batch, bool)
        for row in range(self.batch):
            every = self.rank * self.batch + row
            # Rows begin in turn, so that a step has some from every part of a stretch.
            stretch, piece = divmod(number + every * self.pieces // self.rows, self.pieces)
            record, start, turned = (int(each[every]) for each in self._drawn(stretch))
            bases = self._piece(record, start, bool(turned), piece)
            tokens[row, : len(bases)] = bases[: self.length]
            targets[row, : max(0, len(bases) - 1)] = bases[1:]
            begins[row] = piece == 0 or number == 0
        batch = plain_batch(tokens, targets)
        return batch._replace(begins=torch.from_numpy(begins)) if self.carried else batch


def asked(sequences: Sequence[np.ndarray], length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Rows of sequences, each followed by the question for its label ``[b t]``, and where that stands ``[b]``."""
    ends = np.array([len(sequence) for sequence in sequences])
    rows = np.full((len(sequences), length or int(ends.max()) + 1), PADDING, np.uint8)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    rows[np.arange(len(rows)), ends] = ASKS
    return rows, ends


class Classes:
    """Training rows: sequences in an order shuffled for every epoch, each followed by the question for its label.

    Rows are as long as the longest sequence needs, at most `length`. The label is the target; with a `weight` above 0
    each base is one, too, and counts so much beside it. With `reverse_complement`, half of the rows, by chance, are
    read on the other strand.
    """

    def __init__(
        self,
        data: Labelled,
        length: int,
        batch: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        *,
        weight: float = 0.0,
        reverse_complement: bool = False,
    ) -> None:
        self.batch, self.seed, self.rank, self.world = batch, seed, rank, world
        self.weight, self.both = weight, reverse_complement
        if len(data.names) < 2:
            raise ValueError(f"data.path: expected at least two labels, got only {data.names[0]!r}")
        self.tokenizer, self.digest = DnaTokenizer(data.names), digest([*data.sequences, *data.labels])
        longest = max(range(len(data.labels)), key=lambda index: len(data.sequences[index]))
        if (needed := len(data.sequences[longest]) + 1) > length:
            where = data.places[longest]
            raise ValueError(f"data.length: expected at least {needed}, for {where}, got {length}")
        self.sequences, self.length = data.sequences, needed
        self.tokens, self.ends = asked(data.sequences, needed)
        index = {name: FIRST + number for number, name in enumerate(data.names)}
        self.labels = np.array([index[label] for label in data.labels])
        self._order = lru_cache(2)(lambda epoch: step_rng(seed, epoch).permutation(len(self.labels)))

    def _chosen(self, number: int) -> np.ndarray:
        """The sequences of a step, for all processes together."""
        count, rows = len(self.labels), self.batch * self.world
        places = np.arange(number * rows, (number + 1) * rows)
        epochs = places // count
        chosen = [
            self._order(int(epoch))[places[epochs == epoch] % count]
            for epoch in range(epochs[0], epochs[-1] + 1)
        ]
        return np.concatenate(chosen)

    def step(self, number: int) -> Batch:
        own = rank_rows(self.batch, self.rank)
        chosen = self._chosen(number)[own]
        tokens, ends = self.tokens[chosen].astype(np.int64), self.ends[chosen]
        if self.both:
            # Not the generator that an epoch's order is drawn from.
            turned = step_rng(self.seed + 2**62, number).integers(2, size=self.batch * self.world)[own]
            for row in np.flatnonzero(turned):
                tokens[row, : ends[row]] = reverse_complement(tokens[row, : ends[row]])
        targets = np.full_like(tokens, IGNORED)
        weights = None
        if self.weight:
            inside = np.arange(self.length) < ends[:, None] - 1  # the last base is followed by the question
            targets[:, :-1] = np.where(inside[:, :-1], tokens[:, 1:], IGNORED)
            weights = torch.full(tokens.shape, self.weight)
            weights[torch.arange(len(ends)), torch.from_numpy(ends)] = 1.0
        targets[np.arange(len(ends)), ends] = self.labels[chosen]
        return plain_batch(tokens, targets)._replace(weights=weights)


def confusion(labels: Sequence[int], chosen: Sequence[int], classes: int) -> np.ndarray:
    """How often each class (rows) was taken for each (columns)."""
    found = np.zeros((classes, classes), np.int64)
    np.add.at(found, (np.asarray(labels), np.asarray(chosen)), 1)
    return found


def scores(found: np.ndarray) -> dict[str, float]:
    """Accuracy, Matthews' correlation coefficient, and the mean over classes of F1, of a confusion matrix.

    The coefficient is Gorodkin's for any number of classes; 0 where all are of one class, or taken for one. A class
    that neither occurs nor is chosen does not count in F1.
    """
    found = found.astype(np.float64)
    total, right = float(found.sum()), float(np.trace(found))
    true, chosen = found.sum(1), found.sum(0)
    spread = sqrt(max(0.0, total**2 - true @ true)) * sqrt(max(0.0, total**2 - chosen @ chosen))
    present = (true + chosen) > 0
    return {
        "accuracy": right / total,
        "mcc": (right * total - float(true @ chosen)) / spread if spread else 0.0,
        "f1": float(np.mean(2 * np.diag(found)[present] / (true + chosen)[present])),
    }


def genome_source(config: TrainConfig, batch: int, rank: int, world: int) -> Genome:
    """The source of the kind "genome". A byte for each base is held in memory."""
    data = config.data
    assert isinstance(data, GenomeData)
    if data.path is None or not Path(data.path).exists():
        raise ValueError(f"data.path: expected a FASTA file or a folder of them, got {data.path or 'none'}")
    found = [
        np.concatenate([base_tokens(piece) for piece in record.pieces])
        for file in files([Path(data.path)])
        for record in records(file)
    ]
    source = Genome(
        found, data.length, batch, config.seed, rank, world,
        stretch=data.max_carried_steps or 1 if config.carry else 1, reverse_complement=data.reverse_complement,
    )  # fmt: skip
    check_vocabulary(config, "tokenizer", source.tokenizer.vocabulary)
    return source


def class_source(config: TrainConfig, batch: int, rank: int, world: int) -> Classes:
    """The source of the kind "dna"."""
    data = config.data
    assert isinstance(data, DnaData)
    source = Classes(
        read_labelled("data.path", data.path, "train"), data.length, batch, config.seed, rank, world,
        weight=data.weight, reverse_complement=data.reverse_complement,
    )  # fmt: skip
    check_vocabulary(config, "tokenizer", source.tokenizer.vocabulary)
    return source
