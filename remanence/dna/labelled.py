"""Readers of labelled sequences: tables (GUE's layout) and folders of classes (GenomicBenchmarks' layout)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from remanence.data.sources import OPENERS, read_pieces
from remanence.dna.alphabet import base_tokens
from remanence.runtime.choices import short_repr

TABLES = (".csv", ".tsv")
"""File name suffixes of tables."""
SEQUENCE, LABEL = ("sequence", "seq"), ("label", "class")
"""Accepted names of the sequence column and of the label column (case-insensitive)."""
SPLITS = {"train": ("train",), "dev": ("dev", "valid", "val", "validation"), "test": ("test",)}
"""The splits of a dataset, with the accepted names of their files or folders."""
LAYOUTS = (
    "a .csv table, or a folder with train.csv and test.csv or with train/CLASS/*.txt and test/CLASS/*.txt"
)
"""The supported layouts, for error messages."""


class Labelled(NamedTuple):
    """A labelled dataset."""

    sequences: list[np.ndarray]
    """Token arrays ``[bases]``."""
    labels: list[str]
    """Label of each sequence."""
    places: list[str]
    """File, and line if any, of each sequence, for error messages."""

    @property
    def names(self) -> list[str]:
        """Sorted names of the classes, in numerical order if all are integers."""
        found = set(self.labels)
        return sorted(found, key=int) if all(name.isdecimal() for name in found) else sorted(found)


def read_labelled(argument: str, source: str | None, split: str) -> Labelled:
    """Read a split of a dataset. A single table has no splits and is read as a whole.

    `argument` is the name of the setting to show in error messages.
    """
    if source is None:
        raise ValueError(f"{argument}: expected {LAYOUTS}, got none; set it with --{argument}=PATH")
    path = Path(source)
    if not path.exists():
        raise ValueError(f"{argument}: expected {LAYOUTS}, got {source}, which does not exist")
    if path.is_file():
        return _collect(path, _read_table(path))
    file, folder = _find_split(path, split)
    if file is not None:
        return _collect(file, _read_table(file))
    if folder is not None:
        return _collect(folder, _read_folder(folder))
    raise ValueError(f"{argument}: expected a split {split!r} ({LAYOUTS}), got none in {source}")


def _find_split(path: Path, split: str) -> tuple[Path | None, Path | None]:
    """Return the path of a split's table, or of its folder; the other one is None. Both are None if not
    found.
    """
    for name in SPLITS.get(split, (split,)):
        for table in TABLES:
            for packed in ("", *OPENERS):
                if (path / f"{name}{table}{packed}").is_file():
                    return path / f"{name}{table}{packed}", None
        if (path / name).is_dir():
            return None, path / name
    return None, None


def _collect(path: Path, found: Iterator[tuple[str, bytes, str]]) -> Labelled:
    """Encode and check the sequences, given as (place, sequence, label). `path` is for error messages."""
    made = Labelled([], [], [])
    for place, text, label in found:
        try:
            tokens = base_tokens(text)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        if not len(tokens):
            raise ValueError(f"{place}: expected a sequence, got none")
        if not label:
            raise ValueError(f"{place}: expected a label, got none")
        made.sequences.append(tokens)
        made.labels.append(label)
        made.places.append(place)
    if not made.labels:
        raise ValueError(f"{path}: expected sequences with labels, got none")
    return made


def _read_table(path: Path) -> Iterator[tuple[str, bytes, str]]:
    """Iterate over the rows of a table as (place, sequence, label)."""
    with OPENERS.get(path.suffix, lambda p: open(p, "rb"))(path) as file:
        raw = b"".join(read_pieces(path, lambda: file.read(1 << 20)))
    if not raw.strip():
        raise ValueError(f"{path}: expected a table, got an empty file")
    text = raw.decode("utf-8-sig", "replace")
    delimiter = "\t" if "\t" in text.partition("\n")[0] else ","
    csv.field_size_limit(max(len(text), csv.field_size_limit()))  # sequences may exceed the default, 128 KiB
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        head = [name.strip().lower() for name in next(rows)]
        sequence, label = _find_column(path, head, SEQUENCE), _find_column(path, head, LABEL)
        for row in rows:
            place = f"{path}: line {rows.line_num}"
            if not any(row):
                continue
            if len(row) <= max(sequence, label):
                raise ValueError(f"{place}: expected {len(head)} columns, got {len(row)}")
            yield place, row[sequence].encode(), row[label].strip()
    except csv.Error as error:
        raise ValueError(f"{path}: line {rows.line_num}: not a table ({error})") from None


def _find_column(path: Path, head: list[str], names: tuple[str, ...]) -> int:
    """Return the index of the first of `names` that is in the header row."""
    for name in names:
        if name in head:
            return head.index(name)
    got = ", ".join(short_repr(name) for name in head[:8])
    raise ValueError(f"{path}: line 1: expected a column {' or '.join(map(repr, names))}, got {got}")


def _read_folder(folder: Path) -> Iterator[tuple[str, bytes, str]]:
    """Iterate over the files in the folder of each class as (place, sequence, label)."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    if not classes:
        raise ValueError(f"{folder}: expected a folder for each class, got none")
    for each in classes:
        files = sorted(path for path in each.iterdir() if path.is_file() and ".txt" in path.suffixes[-2:])
        if not files:
            raise ValueError(f"{each}: expected .txt files, one sequence each, got none")
        for path in files:
            with OPENERS.get(path.suffix, lambda p: open(p, "rb"))(path) as file:
                yield str(path), b"".join(read_pieces(path, lambda file=file: file.read(1 << 20))), each.name  # type: ignore[misc]
