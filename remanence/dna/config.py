"""The configuration of DNA as training data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remanence.train.checks import check_between
from remanence.train.data_config import CorpusData


@dataclass(frozen=True, kw_only=True)
class GenomeData(CorpusData):
    """A genome, to be predicted base by base.

    Attributes:
        path: a FASTA file or a folder of them.
        reverse_complement: whether half of the rows, by chance, are read on the other strand.
    """

    kind: str = "genome"
    reverse_complement: bool = False
    carries: ClassVar[bool] = True
    max_carried_steps: ClassVar[int | None] = 128


@dataclass(frozen=True, kw_only=True)
class DnaData(CorpusData):
    """Sequences with labels, which are asked for at their ends. Rows are no longer than the longest sequence needs.

    Attributes:
        path: a table, or a folder in GUE's or GenomicBenchmarks' layout.
        length: the most tokens of a row.
        weight: how much a base counts in the loss, beside a label; 0: only labels do.
        reverse_complement: whether half of the rows, by chance, are read on the other strand.
    """

    kind: str = "dna"
    weight: float = 0.1
    reverse_complement: bool = False
    evaluation: ClassVar[str | None] = "dna --dna.data=FOLDER"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between(0, 1, weight=self.weight)
