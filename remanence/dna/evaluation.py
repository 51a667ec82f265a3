"""Evaluation of DNA classifiers: accuracy, Matthews correlation coefficient and F1."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from remanence.dna.alphabet import FIRST_LABEL, DnaTokenizer, reverse_complement
from remanence.dna.labelled import LAYOUTS, SPLITS, read_labelled
from remanence.dna.task import append_label_query, classification_scores, confusion
from remanence.evaluate.subject import Subject
from remanence.evaluate.task import Result, Row, Setting, Task, check_minimum, share
from remanence.inference.reader import traces
from remanence.runtime.choices import check_choice
from remanence.runtime.errors import DivergedError

UNIT = 512
"""Number of sequences per unit of work. The result of each unit is saved in the journal."""


@dataclass(frozen=True, kw_only=True)
class DnaSettings:
    """Settings of the evaluation of DNA classifiers.

    Attributes:
        data: a table with the columns sequence and label, or a folder in the layout of GUE or
            GenomicBenchmarks.
        split: train, dev or test, if data is a folder.
        reverse_complement: average the predictions for each sequence and its reverse complement.
        samples: number of sequences, evenly spaced over the split. Default: all.
        rows: batch size, in sequences.
    """

    data: str | None = None
    split: str = "test"
    reverse_complement: bool = False
    samples: int | None = None
    rows: int = 64

    def __post_init__(self) -> None:
        check_choice("split", self.split, SPLITS)
        check_minimum(1, rows=self.rows, samples=self.samples)


class Dna(Task):
    """Classification of sequences, with the labels of the model's training data as classes."""

    name = "dna"
    Settings = DnaSettings

    def __init__(self, subject: Subject, settings: DnaSettings) -> None:
        super().__init__(subject, settings)
        tokenizer = subject.tokens
        if not isinstance(tokenizer, DnaTokenizer) or not tokenizer.labels:
            got = "another model" if not isinstance(tokenizer, DnaTokenizer) else "a DNA model without labels"
            hint = "train one with `remanence train dna/classify`"
            raise ValueError(f"model: expected a DNA classifier, got {got}; {hint}")
        if settings.data is None:
            raise ValueError(f"dna.data: expected {LAYOUTS}, got none; set it with --dna.data=PATH")
        self.labels = tokenizer.labels
        found = read_labelled("dna.data", settings.data, settings.split)
        for place, label in zip(found.places, found.labels, strict=True):
            if label not in self.labels:
                known = ", ".join(self.labels)
                raise ValueError(f"{place}: expected one of the model's labels ({known}), got {label!r}")
        count = len(found.labels)
        kept = [
            index * count // (settings.samples or count)
            for index in range(min(settings.samples or count, count))
        ]
        self.sequences = [found.sequences[index] for index in kept]
        self.classes = [self.labels.index(found.labels[index]) for index in kept]
        digest = hashlib.sha256(b"".join(each.tobytes() + b"\n" for each in self.sequences))
        digest.update(bytes(self.classes))
        self.digest = digest.hexdigest()[:16]

    @property
    def identity(self) -> Setting:
        s = self.settings
        name = Path(s.data).name
        return {
            "data": name, "split": s.split, "digest": self.digest, "reverse_complement": s.reverse_complement
        }  # fmt: skip

    def units(self) -> list[list[Setting]]:
        return [[{"from": start}] for start in range(0, len(self.sequences), UNIT)]

    def cost(self, unit: Setting) -> int:
        own = self.sequences[unit["from"] : unit["from"] + UNIT]
        return (1 + self.settings.reverse_complement) * sum(len(each) + 1 for each in own)

    def measure(self, units: list[Setting]) -> list[Result]:
        return [self._measure(unit["from"]) for unit in units]

    def _measure(self, start: int) -> Result:
        """Classify the unit of sequences that starts at this index, and return its confusion matrix."""
        sequences, chosen = self.sequences[start : start + UNIT], []
        for first in range(0, len(sequences), self.settings.rows):
            own = sequences[first : first + self.settings.rows]
            scored = label_scores(self.subject, own, len(self.labels))
            if self.settings.reverse_complement:
                other = [reverse_complement(each) for each in own]
                scored = scored + label_scores(self.subject, other, len(self.labels))
            chosen += scored.argmax(1).tolist()
        found = confusion(self.classes[start : start + UNIT], chosen, len(self.labels))
        return {"confusion": found.tolist()}

    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        found = np.sum([result["confusion"] for _, result in results], 0)
        metrics, count = classification_scores(found), int(found.sum())
        return [
            self.row("accuracy", **share(int(np.trace(found)), count)),
            self.row("MCC", metrics["mcc"], count=count),
            self.row("F1", metrics["f1"], count=count),
            *(
                self.row("taken for", int(found[true, taken]), {"label": label, "taken": other}, detail=True)
                for true, label in enumerate(self.labels)
                for taken, other in enumerate(self.labels)
            ),
        ]


@torch.no_grad()
def label_scores(subject: Subject, sequences: Sequence[np.ndarray], labels: int) -> torch.Tensor:
    """Return the log-probabilities of the labels ``[b labels]`` for sequences of any lengths.

    They are normalised over the labels. `labels` is the number of labels.
    """
    tokens, ends = append_label_query(sequences)
    rows, places = torch.from_numpy(tokens.astype(np.int64)).to(subject.device), torch.from_numpy(ends)
    found: torch.Tensor | None = None
    for part, trace in traces(subject.model, rows, memory_mode=subject.memory_mode):
        inside = (places >= part.start) & (places < part.stop)
        hidden = trace.hidden[inside.to(subject.device), (places[inside] - part.start).to(subject.device)]
        found = trace.hidden.new_zeros(len(rows), trace.hidden.shape[-1]) if found is None else found
        found[inside.to(subject.device)] = hidden
        subject.on_tokens(rows[:, part].numel())
        if bool(trace.state.diverged.any()):
            raise DivergedError(
                "memory: expected finite numbers, got a memory that diverged while reading a sequence"
            )
    assert found is not None
    logits = subject.model.logits(found)[:, FIRST_LABEL : FIRST_LABEL + labels]
    return logits.float().log_softmax(-1).cpu()
