"""Datasets on the Hugging Face hub, read as a stream: nothing is downloaded in advance, and none of their
code is run.

The `datasets` library keeps one read unit in memory; for parquet this is a row group, a thousand rows in
FineWeb.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple, Protocol

from remanence.data.sources import Document

PREFIX = "hf:"
"""The prefix of sources that are datasets."""
FULL = 1 << 25
"""The number of tokens after which a stream's shard is full. At most this much work per process is lost when
it is killed.
"""
PATIENCE = 10.0
"""The timeout in seconds for the hub's first answer."""


class Name(NamedTuple):
    """The parts of ``hf:NAME[@REVISION][:CONFIG[:SPLIT]]``. The name may be a local folder in the hub's
    layout.
    """

    dataset: str
    revision: str | None
    config: str | None
    split: str

    @property
    def folder(self) -> Path | None:
        """The local folder, or None if the dataset is on the hub."""
        return Path(self.dataset) if Path(self.dataset).is_dir() else None


def read_name(source: str) -> Name:
    """Parse the name of a dataset. The split is "train" by default."""
    dataset, *rest = source.removeprefix(PREFIX).split(":")
    name, _, revision = dataset.partition("@")
    if not name or len(rest) > 2:
        raise ValueError(f"{source}: expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    config, split = (*rest, "", "")[:2]
    return Name(name, revision or None, config or None, split or "train")


class _Rows(Protocol):
    """The interface of a streamed dataset (`datasets.IterableDataset`)."""

    def skip(self, n: int) -> _Rows: ...

    def __iter__(self) -> Iterator[dict[str, str | None]]: ...


@dataclass(frozen=True)
class Part:
    """One file of a dataset, read as a stream. It is file `number` of `of` files. Its shards do not depend on
    other files.
    """

    source: str
    revision: str
    number: int
    of: int
    rows: _Rows
    full: int

    @property
    def local(self) -> bool:
        """Whether the dataset is a local folder."""
        return read_name(self.source).folder is not None

    def names(self, number: int) -> Iterator[str]:
        """Yield the names of the shards that this file makes as source `number`. The sequence is infinite,
        because the number of shards is known only when the file has been read.
        """
        return (f"{number:05d}-{shard:05d}" for shard in count())

    def made_from(self) -> dict[str, object]:
        """Return what the shards depend on."""
        return {
            "source": self.source,
            "revision": self.revision,
            "part": [self.number, self.of],
            "full": self.full,
        }

    def read(self, columns: Sequence[str], skip: int = 0) -> Iterator[dict[str, str | None]]:
        """Yield rows with some text columns, from row `skip` on. Earlier rows are read and discarded."""
        rows = iter(self.rows.skip(skip) if skip else self.rows)
        for number in count(skip + 1):
            try:
                row = next(rows, None)
            except Exception as error:  # from the network, the file format, or any library below
                raise ValueError(
                    f"{self.source}: reading stopped at row {number} of file {self.number + 1} of {self.of} "
                    f"({_line(error)}); the same command goes on from here"
                ) from None
            if row is None:
                return
            for field in columns:
                self._check(row, field)
            yield {field: row[field] for field in columns}

    def _check(self, row: Mapping[str, object], field: str) -> None:
        """Raise ValueError if a row does not have the column `field`, or if the column is not text."""
        hint = "--field names another"
        if field not in row:
            raise ValueError(f"{self.source}: expected a column {field!r}, got {', '.join(row)}; {hint}")
        if not isinstance(row[field], str | None):
            got = type(row[field]).__name__
            raise ValueError(f"{self.source}: column {field!r}: expected texts, got {got}; {hint}")

    def documents(self, field: str, skip: int = 0) -> Iterator[Document | None]:
        """Yield the texts of a column from row `skip` on, or None for a null."""
        for row in self.read((field,), skip):
            text = row[field]
            yield None if text is None else [text.encode("utf-8", "surrogatepass")]


def parts(source: str, revision: str | None = None, full: int = FULL) -> list[Part]:
    """Return the files of a dataset, at the given revision, else at the revision in its name, else at the
    newest.
    """
    name = read_name(source)
    try:
        import datasets  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise ValueError(
            f"{source}: reading datasets needs the extra 'data'; pip install 'remanence[data]'"
        ) from None
    if Path(name.dataset).is_file():
        hint = f"a file, which is given without {PREFIX!r}"
        raise ValueError(f"{source}: expected a dataset's name or a folder, got {hint}")
    if name.folder is None and name.dataset.startswith((".", "/", "~")):
        raise ValueError(f"{source}: no such folder")
    pinned = revision or name.revision
    fixed = _fingerprint(name.folder) if name.folder else _resolve_revision(source, name.dataset, pinned)
    try:
        rows = datasets.load_dataset(
            str(name.folder) if name.folder else name.dataset,
            name.config,
            split=name.split,
            streaming=True,
            revision=None if name.folder else fixed,
        )
        total = rows.num_shards
        return [
            Part(source, fixed, number, total, rows.shard(total, number), full) for number in range(total)
        ]
    except Exception as error:  # a wrong config or split, an unknown format, or a hub that fails half-way
        wanted = "hf:NAME:CONFIG:SPLIT of a dataset that can be read"
        raise ValueError(f"{source}: expected {wanted} ({_line(error)})") from None


def _resolve_revision(source: str, dataset: str, revision: str | None) -> str:
    """Return the full hash of a revision. This is one short request, because `datasets` would retry for a
    long time if the hub cannot be reached.
    """
    from huggingface_hub import HfApi, errors

    try:
        return str(HfApi().dataset_info(dataset, revision=revision, timeout=PATIENCE).sha)
    except errors.GatedRepoError:
        hint = "give it on the dataset's page, then `hf auth login`"
        raise ValueError(f"{source}: its owner asks for consent; {hint}") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"{source}: no such dataset or folder, or a private one: then `hf auth login` first"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{source}: no such revision: {revision}") from None
    except errors.HFValidationError as error:
        raise ValueError(f"{source}: no such folder, and not a dataset's name ({_line(error)})") from None
    except Exception as error:  # from the network; the hub's library decides which error
        raise ValueError(
            f"{source}: the hub cannot be reached ({_line(error)}); where it can, run "
            f"`hf download {dataset} --repo-type dataset --local-dir FOLDER`, and give FOLDER instead"
        ) from None


def _fingerprint(folder: Path) -> str:
    """Return a digest of all file names, sizes and modification times, in place of a revision."""
    inside = sorted(path for path in folder.rglob("*") if path.is_file())
    stats = [(path.relative_to(folder).as_posix(), path.stat()) for path in inside]
    lines = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _line(error: Exception) -> str:
    """Return an error's message on one line, or its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
