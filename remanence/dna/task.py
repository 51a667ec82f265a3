"""Training sources for DNA: next-base prediction on a genome, and classification of labelled sequences."""

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
from remanence.dna.alphabet import (
    BASES,
    FIRST_LABEL,
    LABEL_QUERY,
    DnaTokenizer,
    base_tokens,
    reverse_complement,
)
from remanence.dna.config import DnaData, GenomeData
from remanence.dna.fasta import read_records
from remanence.dna.labelled import Labelled, read_labelled
from remanence.tasks.draw import IGNORED, plain_batch, rank_rows, step_rng
from remanence.train.config import TrainConfig
from remanence.train.sources import check_vocabulary

PADDING = BASES.index("N")
"""Padding token after the end of a sequence. Positions with targets come before it, so a causal model does
not read it there.
"""


def digest(parts: Iterable[np.ndarray | str]) -> str:
    """Return a digest of sequences and labels, by which a resumed run detects changed data."""
    found = sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part.data  # avoids copying a chromosome
        found.update(len(raw).to_bytes(8, "little"))
        found.update(raw)
    return found.hexdigest()[:32]


class GenomeSource:
    """Training rows from random positions of a genome, for next-base prediction.

    If memory is carried, a row reads up to `max_pieces` consecutive pieces (a span) before it moves to a new
    random position. If `reverse_complement` is set, each span is read on the opposite strand with probability
    1/2.
    """

    def __init__(
        self,
        records: Sequence[np.ndarray],
        length: int,
        batch: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        max_pieces: int = 1,
        reverse_complement: bool = False,
    ) -> None:
        self.records, self.length, self.batch, self.seed = list(records), length, batch, seed
        self.rank, self.rows, self.both = rank, batch * world_size, reverse_complement
        self.tokenizer, self.digest = DnaTokenizer(), digest(records)
        sizes = np.array([len(record) for record in records])
        if sizes.max(initial=0) < 2:
            raise ValueError("data.path: expected a sequence of at least two bases, got none")
        # A span is at most as long as the N50 of the sequences: half of all bases are in sequences of at least
        # this length. Shorter sequences are padded.
        ordered = np.sort(sizes)[::-1]
        n50 = int(ordered[np.searchsorted(np.cumsum(ordered), ordered.sum() / 2)])
        self.pieces = max(1, min(max_pieces, (n50 - 1) // length))
        self.carried = max_pieces > 1
        self.num_starts = np.maximum(1, sizes - self.pieces * length)
        self._drawn = lru_cache(4)(self._draw)

    def _draw(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw the record, the start position and the strand of every row, for the span with this number."""
        rng = step_rng(self.seed, number)
        ends = np.cumsum(self.num_starts)
        at = rng.integers(int(ends[-1]), size=self.rows)
        record = np.searchsorted(ends, at, "right")
        reverse = rng.integers(2, size=self.rows).astype(bool) & self.both
        return record, at - (ends[record] - self.num_starts[record]), reverse

    def _piece(self, record: int, start: int, reverse: bool, piece: int) -> np.ndarray:
        """Return the bases of a piece of a span: `length` + 1, or fewer at the end of the record."""
        bases, size = self.records[record], self.pieces * self.length + 1
        span = bases[start : start + size]
        first = piece * self.length
        if not reverse:
            return span[first : first + self.length + 1]
        stop = max(0, len(span) - first)
        return reverse_complement(span[max(0, stop - self.length - 1) : stop])

    def step(self, number: int) -> Batch:
        """Return the batch of a training step."""
        tokens = np.full((self.batch, self.length), PADDING, np.int64)
        targets = np.full_like(tokens, IGNORED)
        begins = np.zeros(self.batch, bool)
        for row in range(self.batch):
            every = self.rank * self.batch + row
            # Rows start their spans at staggered steps, so that a batch holds pieces from every part of a span.
            span, piece = divmod(number + every * self.pieces // self.rows, self.pieces)
            record, start, reverse = (int(each[every]) for each in self._drawn(span))
            bases = self._piece(record, start, bool(reverse), piece)
            tokens[row, : len(bases)] = bases[: self.length]
            targets[row, : max(0, len(bases) - 1)] = bases[1:]
            begins[row] = piece == 0 or number == 0
        batch = plain_batch(tokens, targets)
        return batch._replace(begins=torch.from_numpy(begins)) if self.carried else batch


def append_label_query(
    sequences: Sequence[np.ndarray], length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Pad sequences and add the label query token after each.

    Returns the rows ``[b t]`` and the positions of the label query ``[b]``. `length` is the row length; by
    default the longest sequence and its label query.
    """
    ends = np.array([len(sequence) for sequence in sequences])
    rows = np.full((len(sequences), length or int(ends.max()) + 1), PADDING, np.uint8)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    rows[np.arange(len(rows)), ends] = LABEL_QUERY
    return rows, ends


class LabelledSource:
    """Training rows for classification: sequences shuffled every epoch, each followed by the label query
    token.

    Rows are padded to the longest sequence, which may have at most `length` tokens with its label query. The
    target of the label query is the label. If `weight` is above 0, each base is also a target, with this
    weight. If `reverse_complement` is set, each row is replaced by its reverse complement with probability
    1/2.
    """

    def __init__(
        self,
        data: Labelled,
        length: int,
        batch: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        weight: float = 0.0,
        reverse_complement: bool = False,
    ) -> None:
        self.batch, self.seed, self.rank, self.world_size = batch, seed, rank, world_size
        self.weight, self.both = weight, reverse_complement
        if len(data.names) < 2:
            raise ValueError(f"data.path: expected at least two labels, got only {data.names[0]!r}")
        self.tokenizer, self.digest = DnaTokenizer(data.names), digest([*data.sequences, *data.labels])
        longest = max(range(len(data.labels)), key=lambda index: len(data.sequences[index]))
        if (needed := len(data.sequences[longest]) + 1) > length:
            where = data.places[longest]
            raise ValueError(f"data.length: expected at least {needed}, for {where}, got {length}")
        self.sequences, self.length = data.sequences, needed
        self.tokens, self.ends = append_label_query(data.sequences, needed)
        index = {name: FIRST_LABEL + number for number, name in enumerate(data.names)}
        self.labels = np.array([index[label] for label in data.labels])
        self._order = lru_cache(2)(lambda epoch: step_rng(seed, epoch).permutation(len(self.labels)))

    def _step_indices(self, number: int) -> np.ndarray:
        """Return the indices of the sequences of a step, for all processes."""
        count, rows = len(self.labels), self.batch * self.world_size
        places = np.arange(number * rows, (number + 1) * rows)
        epochs = places // count
        chosen = [
            self._order(int(epoch))[places[epochs == epoch] % count]
            for epoch in range(epochs[0], epochs[-1] + 1)
        ]
        return np.concatenate(chosen)

    def step(self, number: int) -> Batch:
        """Return the batch of a training step."""
        own = rank_rows(self.batch, self.rank)
        chosen = self._step_indices(number)[own]
        tokens, ends = self.tokens[chosen].astype(np.int64), self.ends[chosen]
        if self.both:
            # This random generator differs from the one that shuffles epochs.
            reverse = step_rng(self.seed + 2**62, number).integers(2, size=self.batch * self.world_size)[own]
            for row in np.flatnonzero(reverse):
                tokens[row, : ends[row]] = reverse_complement(tokens[row, : ends[row]])
        targets = np.full_like(tokens, IGNORED)
        weights = None
        if self.weight:
            inside = (
                np.arange(self.length) < ends[:, None] - 1
            )  # the last base is followed by the label query
            targets[:, :-1] = np.where(inside[:, :-1], tokens[:, 1:], IGNORED)
            weights = torch.full(tokens.shape, self.weight)
            weights[torch.arange(len(ends)), torch.from_numpy(ends)] = 1.0
        targets[np.arange(len(ends)), ends] = self.labels[chosen]
        return plain_batch(tokens, targets)._replace(weights=weights)


def confusion(labels: Sequence[int], chosen: Sequence[int], classes: int) -> np.ndarray:
    """Return the confusion matrix ``[classes classes]``: true classes in rows, predicted classes in columns."""
    found = np.zeros((classes, classes), np.int64)
    np.add.at(found, (np.asarray(labels), np.asarray(chosen)), 1)
    return found


def classification_scores(found: np.ndarray) -> dict[str, float]:
    """Return the accuracy, Matthews correlation coefficient and macro F1 of a confusion matrix.

    The coefficient is Gorodkin's generalisation to several classes. It is 0 if all true or all predicted
    classes are the same. Classes that neither occur nor are predicted do not count in F1.
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


def make_genome_source(config: TrainConfig, batch: int, rank: int, world_size: int) -> GenomeSource:
    """Build the training source for data.kind=genome. The genome is held in memory, one byte per base."""
    data = config.data
    assert isinstance(data, GenomeData)
    if data.path is None or not Path(data.path).exists():
        raise ValueError(f"data.path: expected a FASTA file or a folder of them, got {data.path or 'none'}")
    found = [
        np.concatenate([base_tokens(piece) for piece in record.pieces])
        for file in files([Path(data.path)])
        for record in read_records(file)
    ]
    source = GenomeSource(
        found, data.length, batch, config.seed, rank, world_size,
        max_pieces=data.max_carried_steps or 1 if config.carry else 1, reverse_complement=data.reverse_complement,
    )  # fmt: skip
    check_vocabulary(config, "tokenizer", source.tokenizer.vocabulary)
    return source


def make_label_source(config: TrainConfig, batch: int, rank: int, world_size: int) -> LabelledSource:
    """Build the training source for data.kind=dna."""
    data = config.data
    assert isinstance(data, DnaData)
    source = LabelledSource(
        read_labelled("data.path", data.path, "train"), data.length, batch, config.seed, rank, world_size,
        weight=data.weight, reverse_complement=data.reverse_complement,
    )  # fmt: skip
    check_vocabulary(config, "tokenizer", source.tokenizer.vocabulary)
    return source
