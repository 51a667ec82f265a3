"""Fields of a training config that only DNA has. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DataFields:
    """
    Attributes:
        reverse_complement: genome, dna: whether half of the rows, by chance, are read on the other strand.
    """

    reverse_complement: bool = False
