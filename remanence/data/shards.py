"""Token shards on disk: one file with the tokens of all documents, and one with the end of each document.
Memory-mapped.

`tokens.json` holds the digests of all files, so that altered tokens are detected. Its own digest identifies
the corpus.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remanence.io.files import DIGEST, KIND, add_digest, read_json, replacing, write_json
from remanence.tokenizers.tokens import Tokenizer, load_tokenizer

FORMAT, SCHEMA = "remanence-tokens", 2
"""The format name and the current version of the index. Folders of schema 1 have no digests and are read
without checks.
"""
INDEX = "tokens.json"
"""The name of the index file. It is written last."""
BLOCK = 1 << 20
"""The number of bytes that share one digest. It is checked when one of them is first read."""
DIGITS = 16
"""The number of hexadecimal digits of a digest: enough to detect accidental damage."""
NAME = "[0-9]{5,}(-[0-9]{5,})?"
"""The pattern of a shard's name: the number of its source and, for a stream, the shard's number."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
"""The files that a tokenizer saves. The last one is written only if documents have an end token."""


TokenType = np.dtype[np.uint16] | np.dtype[np.uint32]
"""The integer type of tokens on disk. It depends on the vocabulary size."""


ShardInfo = dict[str, Any]
"""The description of a shard in its JSON file and in the index: `name` (of its files, without suffix),
`tokens`, `documents`, `blocks` (digests of the blocks of tokens), `ends` (the digest of the document ends),
`rows` read from the source, `nulls` (rows without text), and `stopped`, the reason why it ended: "end" of the
source, "full", or "room" (a limit was reached).
"""


def digest(data: Any) -> str:
    """Return the shortened SHA-256 digest of bytes or of an array's bytes."""
    return sha256(data).hexdigest()[:DIGITS]


def dtype_for(vocabulary: int) -> TokenType:
    """Return the integer type for tokens of a vocabulary: 2 bytes if they suffice, else 4."""
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


class RemainingLimit(NamedTuple):
    """The number of tokens and of documents that may still be written. None means no limit."""

    tokens: int | None = None
    documents: int | None = None

    def allows(self, tokens: int, documents: int) -> bool:
        """Whether this many tokens and documents may still be written."""
        has_tokens = self.tokens is None or tokens <= self.tokens
        return has_tokens and (self.documents is None or documents <= self.documents)

    def after(self, shard: ShardInfo) -> RemainingLimit:
        """Return what is left after a shard was written. Numbers are negative if the shard was too large."""
        return RemainingLimit(
            None if self.tokens is None else self.tokens - shard["tokens"],
            None if self.documents is None else self.documents - shard["documents"],
        )

    @property
    def used_up(self) -> bool:
        """Whether not even one token and one document may be written."""
        return not self.allows(1, 1)


NO_LIMIT = RemainingLimit()


class _Blocks:
    """Computes the digests of a file's blocks while the file is written."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.open, self.size = sha256(), 0

    def add(self, data: bytes) -> None:
        """Add the next bytes of the file."""
        while data:
            part, data = data[: BLOCK - self.size], data[BLOCK - self.size :]
            self.open.update(part)
            self.size += len(part)
            if self.size == BLOCK:
                self.digests.append(self.open.hexdigest()[:DIGITS])
                self.open, self.size = sha256(), 0

    def all(self) -> list[str]:
        """Return the digests of all blocks, including the last, incomplete one."""
        return [*self.digests, self.open.hexdigest()[:DIGITS]] if self.size else self.digests


def _truncate_digests(path: Path, blocks: list[str], size: int) -> list[str]:
    """Return the block digests of a file's first `size` bytes, given the digests of the longer file. Only the
    block that is cut is read, and it is checked first, so that the new digest cannot hide damage.
    """
    whole_blocks, remainder = divmod(size, BLOCK)
    if not remainder:
        return blocks[:whole_blocks]
    with open(path, "rb") as file:
        file.seek(whole_blocks * BLOCK)
        block = file.read(BLOCK)
    if digest(block) != blocks[whole_blocks]:
        raise ValueError(_damage_message(path))
    return [*blocks[:whole_blocks], digest(block[:remainder])]


def _damage_message(path: Path, problem: str = "its content is not what was prepared") -> str:
    """Return the error message for a damaged file."""
    return f"{path}: damaged: {problem}; remove it and prepare the data again"


def write_shard(
    folder: Path,
    name: str,
    documents: Iterable[Iterable[Sequence[int]] | None],
    dtype: TokenType,
    *,
    end: int | None = None,
    full_size: int | None = None,
    remaining: RemainingLimit = NO_LIMIT,
) -> ShardInfo:
    """Write a shard atomically and return its description.

    Each document is an iterable of pieces of tokens, of which only one is in memory at a time. None is a row
    without text, which is counted in "nulls". The token `end` is added after each document, if not None;
    documents without tokens are left out. The shard ends with the last document ("end"), after the document
    with which it reaches `full_size` tokens ("full"), or before the first document that does not fit into `remaining`
    ("room").
    """
    tokens = written = rows = nulls = 0
    end_tokens = [] if end is None else [end]
    stopped, blocks, ends = "end", _Blocks(), sha256()
    with replacing(folder / f"{name}.bin") as bin_path, replacing(folder / f"{name}.ends") as ends_path:
        with open(bin_path, "wb") as bin_file, open(ends_path, "wb") as ends_file:

            def write(piece: Sequence[int]) -> None:
                data = np.asarray(piece, dtype).tobytes()
                bin_file.write(data)
                blocks.add(data)

            for document in documents:
                rows += 1
                if document is None:
                    nulls += 1
                    continue
                size = 0
                for piece in document:
                    size += len(piece)
                    if not remaining.allows(tokens + size + len(end_tokens), written + 1):
                        stopped = "room"
                        break
                    write(piece)
                if stopped == "room":
                    break
                if not size:
                    continue
                write(end_tokens)
                tokens, written = tokens + size + len(end_tokens), written + 1
                border = tokens.to_bytes(8, "little")
                ends_file.write(border)
                ends.update(border)
                if full_size is not None and tokens >= full_size:
                    stopped = "full"
                    break
        digests = blocks.all()
        if stopped == "room":  # part of the document that did not fit is already written
            digests = _truncate_digests(bin_path, digests, tokens * dtype.itemsize)
            os.truncate(bin_path, tokens * dtype.itemsize)
    return {
        "name": name,
        "tokens": tokens,
        "documents": written,
        "blocks": digests,
        "ends": ends.hexdigest()[:DIGITS],
        "rows": rows,
        "nulls": nulls,
        "stopped": stopped,
    }


def truncate_shard(folder: Path, shard: ShardInfo, dtype: TokenType, remaining: RemainingLimit) -> ShardInfo:
    """Shorten a shard to fit into `remaining`, as if it had been written with this limit, and return its new
    description.
    """
    bin_path, ends_path = (folder / f"{shard['name']}{suffix}" for suffix in (".bin", ".ends"))
    ends = np.fromfile(ends_path, "<i8")
    if digest(ends) != shard["ends"]:
        raise ValueError(_damage_message(ends_path))
    ends = ends[: remaining.documents]
    if remaining.tokens is not None:
        ends = ends[: np.searchsorted(ends, remaining.tokens, "right")]
    tokens = int(ends[-1]) if len(ends) else 0
    blocks = _truncate_digests(bin_path, shard["blocks"], tokens * dtype.itemsize)
    for path, size in ((bin_path, tokens * dtype.itemsize), (ends_path, len(ends) * 8)):
        with replacing(path) as temporary:  # work on a copy, as the old file may be open as a memory map
            shutil.copyfile(path, temporary)
            os.truncate(temporary, size)
    counts = {"tokens": tokens, "documents": len(ends), "stopped": "room"}
    return {**shard, **counts, "blocks": blocks, "ends": digest(ends)}


def describes_shard(shard: object, dtype: TokenType, *, digests: bool = True) -> bool:
    """Whether an object has the form of a shard's description. The shard's files are not checked."""
    if not isinstance(shard, dict):
        return False
    name, counts = shard.get("name"), [shard.get("tokens"), shard.get("documents")]
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        return False
    if not all(type(count) is int and 0 <= count < 2**60 for count in counts):
        return False
    if not digests:
        return True
    blocks = shard.get("blocks")
    return (
        isinstance(blocks, list)
        and len(blocks) == -(-shard["tokens"] * dtype.itemsize // BLOCK)
        and all(isinstance(each, str) for each in (*blocks, shard.get("ends")))
    )


def shard_exists(folder: Path, shard: ShardInfo, dtype: TokenType) -> bool:
    """Whether both files of a shard exist with the sizes in its description."""
    sizes = {".bin": shard["tokens"] * dtype.itemsize, ".ends": shard["documents"] * 8}
    paths = {folder / f"{shard['name']}{suffix}": size for suffix, size in sizes.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def write_index(folder: Path, shards: list[ShardInfo], vocabulary: int) -> None:
    """Write the index of a folder. It is written last and marks the folder as complete."""
    kept = ("name", "tokens", "documents", "blocks", "ends")
    saved = [folder / name for name in TOKENIZER if (folder / name).is_file()]
    index = {
        "format": FORMAT,
        "schema": SCHEMA,
        "vocabulary": vocabulary,
        "dtype": dtype_for(vocabulary).str,
        "tokenizer": {path.name: digest(path.read_bytes()) for path in saved},
        "shards": [{key: shard[key] for key in kept} for shard in shards],
    }
    write_json(folder / INDEX, add_digest(index))


def _is_valid_index(index: Mapping[str, Any]) -> bool:
    """Whether an index has all its fields with valid types. The shards' files are not checked."""
    vocabulary, shards, digests = index.get("vocabulary"), index.get("shards"), index["schema"] > 1
    if type(vocabulary) is not int or not 0 < vocabulary <= 2**32 or not isinstance(shards, list):
        return False
    dtype, saved = dtype_for(vocabulary), index.get("tokenizer", {})
    if index.get("dtype") != dtype.str or not isinstance(saved, dict) or not set(saved) <= set(TOKENIZER):
        return False
    return all(describes_shard(shard, dtype, digests=digests) for shard in shards)


class Shard:
    """A shard's memory-mapped tokens: ``shard[start:stop]``. Each block is checked when it is first read.

    Threads and forked processes may check a block twice, but never read an unchecked one.
    """

    def __init__(self, path: Path, dtype: TokenType, blocks: Sequence[str] | None, vocabulary: int) -> None:
        self.path, self.blocks, self.vocabulary = path, blocks, vocabulary
        self.tokens = np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)
        self.size = BLOCK // dtype.itemsize
        self.checked = np.zeros(-(-len(self.tokens) // self.size), bool)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, selection: slice) -> np.ndarray:
        start, stop, _ = selection.indices(len(self))
        first, after = start // self.size, -(-stop // self.size)
        if not self.checked[first:after].all():
            for block in range(first, after):
                self._check(block)
        return self.tokens[selection]

    def _check(self, block: int) -> None:
        """Check the digest and the token range of a block, unless it was checked before."""
        if self.checked[block]:
            return
        tokens = self.tokens[block * self.size : (block + 1) * self.size]
        if self.blocks is not None and digest(tokens) != self.blocks[block]:
            raise ValueError(_damage_message(self.path))
        if (largest := int(tokens.max())) >= self.vocabulary:
            raise ValueError(
                _damage_message(self.path, f"expected tokens below {self.vocabulary}, got {largest}")
            )
        self.checked[block] = True


class Tokens:
    """A prepared folder: ``len(tokens)`` is the number of documents, and ``tokens[i]`` reads one document
    only.

    `digest` identifies the corpus: it changes with the documents, the tokens or the tokenizer. It is None for
    folders of schema 1.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / INDEX
        if not path.is_file():
            raise ValueError(f"data: expected a folder made by `remanence data prepare`, got {folder}")
        index = read_json(path)
        format_, schema = index.get("format"), index.get("schema")
        if format_ != FORMAT or type(schema) is not int or not 1 <= schema <= SCHEMA:
            raise ValueError(
                f"{path}: expected {FORMAT} of schema 1 to {SCHEMA}, got {format_!r} of {schema!r}"
            )
        if not _is_valid_index(index):
            raise ValueError(f"{path}: damaged: it does not describe the shards; prepare the data again")
        self.digest: str | None = add_digest(index)[DIGEST].removeprefix(KIND) if schema > 1 else None
        self.vocabulary, self._tokenizer = index["vocabulary"], index.get("tokenizer", {})
        opened = [self._open(shard, np.dtype(index["dtype"])) for shard in index["shards"]]
        self.shards, ends = [shard for shard, _ in opened], [borders for _, borders in opened]
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

    def _open(self, shard: ShardInfo, dtype: TokenType) -> tuple[Shard, np.ndarray]:
        """Open a shard; return it and the ends of its documents, in tokens."""
        bin_path, ends_path = (self.folder / f"{shard['name']}{suffix}" for suffix in (".bin", ".ends"))
        for path in (bin_path, ends_path):
            if not path.is_file():
                raise ValueError(f"{path}: no such file; prepare the data again")
        if not shard_exists(self.folder, shard, dtype):
            raise ValueError(_damage_message(bin_path, "its size does not fit the index"))
        ends = np.fromfile(ends_path, "<i8")
        if self.digest is not None and digest(ends) != shard["ends"]:
            raise ValueError(_damage_message(ends_path))
        inside = ends[-1] == shard["tokens"] if len(ends) else not shard["tokens"]
        if not inside or (ends[1:] < ends[:-1]).any() or (ends < 0).any():
            raise ValueError(_damage_message(ends_path, "expected the ends of documents, in order"))
        blocks = None if self.digest is None else shard["blocks"]
        return Shard(bin_path, dtype, blocks, self.vocabulary), ends

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, document: int) -> np.ndarray:
        return self.piece(document, 0, int(self.lengths[document]))

    def piece(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens `start` to `stop` of a document, or fewer if it ends before. Other tokens are not
        read.
        """
        first, end = int(self.start[document]), int(self.end[document])
        return self.shards[self.shard[document]][min(first + start, end) : min(first + stop, end)]

    def verify(self, done: Callable[[int, int], None] | None = None) -> None:
        """Read and check all shards and the tokenizer. `done(read, total)` is called after each block with
        numbers of tokens.
        """
        read, total = 0, int(self.lengths.sum())
        for shard in self.shards:
            for start in range(0, len(shard), shard.size):
                read += len(shard[start : start + shard.size])
                if done:
                    done(read, total)
        _ = self.tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer saved in the folder. Raises ValueError if its files have changed."""
        for name, wanted in self._tokenizer.items():
            path = self.folder / name
            if not path.is_file() or digest(path.read_bytes()) != wanted:
                raise ValueError(f"{path}: damaged: it is not what was prepared; prepare the data again")
        return load_tokenizer(self.folder)
