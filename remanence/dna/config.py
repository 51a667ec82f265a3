"""Configuration of DNA training data. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remanence.train.checks import check_between
from remanence.train.data_config import CorpusData


@dataclass(frozen=True, kw_only=True)
class GenomeData(CorpusData):
    """A genome for next-base prediction.

    Attributes:
        path: a FASTA file or a folder of them.
        reverse_complement: replace each row by its reverse complement with probability 1/2.
    """

    kind: str = "genome"
    reverse_complement: bool = False
    carries: ClassVar[bool] = True
    max_carried_steps: ClassVar[int | None] = 128


@dataclass(frozen=True, kw_only=True)
class DnaData(CorpusData):
    """Labelled sequences for classification. The label is predicted after the last base, and rows are padded
    to the longest sequence.

    Attributes:
        path: a CSV table, or a folder in the layout of GUE or GenomicBenchmarks.
        length: maximum number of tokens in a row.
        weight: weight of each base in the loss, relative to a label. 0: loss on labels only.
        reverse_complement: replace each row by its reverse complement with probability 1/2.
    """

    kind: str = "dna"
    weight: float = 0.1
    reverse_complement: bool = False
    evaluation: ClassVar[str | None] = "dna --dna.data=FOLDER"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between(0, 1, weight=self.weight)
