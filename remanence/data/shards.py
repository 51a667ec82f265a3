"""Tokens on disk, in pairs of files: the tokens of all documents, and where each document ends. Memory-mapped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remanence.core.files import read_json, replacing, write_json
from remanence.core.tokens import Tokenizer, load_tokenizer

FORMAT, SCHEMA = "remanence-tokens", 1


def dtype_for(vocabulary: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


class Room(NamedTuple):
    """How much may still be written; None is without limit."""

    tokens: int | None = None
    documents: int | None = None

    def holds(self, tokens: int, documents: int) -> bool:
        fits = self.tokens is None or tokens <= self.tokens
        return fits and (self.documents is None or documents <= self.documents)

    def after(self, shard: dict[str, Any]) -> Room:
        """What is left after a shard; negative where it was too large."""
        return Room(
            None if self.tokens is None else self.tokens - shard["tokens"],
            None if self.documents is None else self.documents - shard["documents"],
        )

    @property
    def used_up(self) -> bool:
        return not self.holds(1, 1)


NO_LIMIT = Room()


def write_shard(
    folder: Path,
    name: str,
    documents: Iterable[Iterable[Sequence[int]] | None],
    dtype: np.dtype[Any],
    *,
    end: int | None = None,
    full: int | None = None,
    room: Room = NO_LIMIT,
) -> dict[str, Any]:
    """Write a shard that is complete or absent, and return its description.

    Documents, each a text's tokens in pieces, are written a piece at a time, so that no more than a piece is in memory.
    None is a row without a text: it is counted. `end` follows each document; one without tokens is left out. The shard
    stops ("stopped") at the end of the documents, after the one with which it has `full` tokens, or before the first
    that has no `room`.
    """
    tokens = written = rows = nulls = 0
    closing = [] if end is None else [end]
    stopped = "end"
    with (
        replacing(folder / f"{name}.bin") as bin_path,
        replacing(folder / f"{name}.ends") as ends_path,
        open(bin_path, "wb") as bin_file,
        open(ends_path, "wb") as ends_file,
    ):
        for document in documents:
            rows += 1
            if document is None:
                nulls += 1
                continue
            size = 0
            for piece in document:
                size += len(piece)
                if not room.holds(tokens + size + len(closing), written + 1):
                    stopped = "room"
                    break
                bin_file.write(np.asarray(piece, dtype).tobytes())
            if stopped == "room":
                bin_file.seek(tokens * dtype.itemsize)
                bin_file.truncate()
                break
            if not size:
                continue
            bin_file.write(np.asarray(closing, dtype).tobytes())
            tokens, written = tokens + size + len(closing), written + 1
            ends_file.write(tokens.to_bytes(8, "little"))
            if full is not None and tokens >= full:
                stopped = "full"
                break
    return {
        "name": name,
        "tokens": tokens,
        "documents": written,
        "rows": rows,
        "nulls": nulls,
        "stopped": stopped,
    }


def cut_shard(folder: Path, shard: dict[str, Any], dtype: np.dtype[Any], room: Room) -> dict[str, Any]:
    """The same shard as if it had been written with this room, which is too small for it."""
    name = shard["name"]
    ends = np.fromfile(folder / f"{name}.ends", "<i8")[: room.documents]
    if room.tokens is not None:
        ends = ends[: np.searchsorted(ends, room.tokens, "right")]
    tokens = int(ends[-1]) if len(ends) else 0
    for suffix, size in ((".bin", tokens * dtype.itemsize), (".ends", len(ends) * 8)):
        with replacing(
            folder / f"{name}{suffix}"
        ) as temporary:  # a copy, as the old file may be open as a memory map
            shutil.copyfile(folder / f"{name}{suffix}", temporary)
            os.truncate(temporary, size)
    return {**shard, "tokens": tokens, "documents": len(ends), "stopped": "room"}


def shard_exists(folder: Path, shard: dict[str, Any], dtype: np.dtype[Any]) -> bool:
    """Whether both files have the size in the shard's description."""
    sizes = {".bin": shard["tokens"] * dtype.itemsize, ".ends": shard["documents"] * 8}
    paths = {folder / f"{shard['name']}{suffix}": size for suffix, size in sizes.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def write_index(folder: Path, shards: list[dict[str, Any]], vocabulary: int) -> None:
    header = {
        "format": FORMAT,
        "schema": SCHEMA,
        "vocabulary": vocabulary,
        "dtype": dtype_for(vocabulary).str,
    }
    write_json(folder / "tokens.json", {**header, "shards": shards})


def _well_formed(index: dict[str, Any]) -> bool:
    """Whether an index has all its fields; the shards show whether they are true."""
    vocabulary, shards = index.get("vocabulary"), index.get("shards")
    if (
        type(vocabulary) is not int
        or index.get("dtype") != dtype_for(vocabulary).str
        or not isinstance(shards, list)
    ):
        return False
    kinds = {"name": str, "tokens": int, "documents": int}
    return all(
        isinstance(shard, dict) and all(type(shard.get(key)) is kind for key, kind in kinds.items())
        for shard in shards
    )


class Tokens:
    """A prepared folder: ``len(tokens)`` documents, ``tokens[i]`` one of them, without reading the others."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / "tokens.json").is_file():
            raise ValueError(f"data: expected a folder made by `remanence data prepare`, got {folder}")
        path = self.folder / "tokens.json"
        index = read_json(path)
        if index.get("format") != FORMAT or index.get("schema") != SCHEMA:
            raise ValueError(f"{path}: expected {FORMAT} of schema {SCHEMA}, got {index.get('format')!r}")
        if not _well_formed(index):
            raise ValueError(f"{path}: damaged: it does not describe the shards; prepare the data again")
        self.vocabulary, dtype = index["vocabulary"], np.dtype(index["dtype"])
        self.shards: list[np.ndarray] = []
        ends = []
        for shard in index["shards"]:
            name = shard["name"]
            tokens, borders = self._map(f"{name}.bin", dtype), self._map(f"{name}.ends", "<i8")
            fits = tokens.size == shard["tokens"] and borders.size == shard["documents"]
            if fits and borders.size:
                fits = borders[-1] == tokens.size and not (np.diff(borders, prepend=0) < 0).any()
            if not fits:
                path = self.folder / f"{name}.bin"
                raise ValueError(f"{path}: damaged: its size does not fit the index; prepare it again")
            self.shards.append(tokens)
            ends.append(np.asarray(borders))
        self.shard = np.repeat(np.arange(len(ends)), [len(borders) for borders in ends])
        self.end = np.concatenate([*ends, np.empty(0, np.int64)])
        self.start = np.concatenate(
            [
                *[np.concatenate([[0], borders[:-1]]) for borders in ends if len(borders)],
                np.empty(0, np.int64),
            ]
        )
        self.start, self.lengths = self.start.astype(np.int64), (self.end - self.start).astype(np.int64)
        if not self.lengths.sum():
            raise ValueError(f"data: expected at least one token in {folder}, got an empty corpus")

    def _map(self, name: str, dtype: Any) -> np.ndarray:
        path = self.folder / name
        if not path.is_file():
            raise ValueError(f"{path}: no such file; prepare the data again")
        return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, document: int) -> np.ndarray:
        return self.shards[self.shard[document]][self.start[document] : self.end[document]]

    @property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)
