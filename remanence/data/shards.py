"""Tokens on disk, one pair of files per text file: the tokens behind one another, and where each document ends. Memory-mapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from remanence.files import read_json, replacing, write_json
from remanence.tokens import Tokenizer, load_tokenizer

FORMAT, SCHEMA = "remanence-tokens", 1


def dtype_for(vocabulary: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


def write_shard(folder: Path, name: str, documents: list[np.ndarray], dtype: np.dtype[Any]) -> dict[str, Any]:
    """A shard that is whole or not there; returns what the index says of it."""
    tokens = np.concatenate([*documents, np.empty(0, dtype)]).astype(dtype)
    ends = np.cumsum([len(document) for document in documents], dtype="<i8")
    for suffix, array in ((".bin", tokens), (".ends", ends)):
        with replacing(folder / f"{name}{suffix}") as temporary:
            array.tofile(temporary)
    return {"name": name, "tokens": int(tokens.size), "documents": len(documents)}


def write_index(folder: Path, shards: list[dict[str, Any]], vocabulary: int) -> None:
    header = {"format": FORMAT, "schema": SCHEMA, "vocabulary": vocabulary, "dtype": dtype_for(vocabulary).str}
    write_json(folder / "tokens.json", {**header, "shards": shards})


class Tokens:
    """A prepared folder: ``len(tokens)`` documents, ``tokens[i]`` one of them, without reading the others."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / "tokens.json").is_file():
            raise ValueError(f"data: expected a folder made by `remanence data prepare`, got {folder}")
        index = read_json(self.folder / "tokens.json")
        if index.get("format") != FORMAT or index.get("schema") != SCHEMA:
            raise ValueError(f"{self.folder / 'tokens.json'}: expected {FORMAT} of schema {SCHEMA}, got {index.get('format')!r}")
        self.vocabulary, dtype = int(index["vocabulary"]), np.dtype(index["dtype"])
        self.shards: list[np.ndarray] = []
        ends = []
        for shard in index["shards"]:
            tokens, borders = (self._map(shard["name"] + suffix, kind) for suffix, kind in ((".bin", dtype), (".ends", "<i8")))
            whole = tokens.size == shard["tokens"] and borders.size == shard["documents"]
            if not whole or (borders.size and (borders[-1] != tokens.size or (np.diff(borders, prepend=0) < 0).any())):
                raise ValueError(f"{self.folder / shard['name']}.bin: damaged: its size does not fit the index; prepare it again")
            self.shards.append(tokens)
            ends.append(np.asarray(borders))
        self.shard = np.repeat(np.arange(len(ends)), [len(borders) for borders in ends])
        self.end = np.concatenate([*ends, np.empty(0, np.int64)])
        self.start = np.concatenate(
            [*[np.concatenate([[0], borders[:-1]]) for borders in ends if len(borders)], np.empty(0, np.int64)]
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
