"""Tensors in safetensors files. The header is validated before any tensor is read, and files of this package
have a digest.

The digest is stored in the file's metadata. It covers the tensors' names, dtypes, shapes and bytes and all
other metadata. Files written by other programs usually have no digest and are accepted without one.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from remanence.io.files import DIGEST, canonical, replacing
from remanence.runtime.errors import first_line

if TYPE_CHECKING:
    from torch import Tensor

WRITER = {"writer": "remanence"}
"""Metadata of every file with a digest. Without it, a file whose digest key was damaged would pass for
another program's file.
"""

HEADER, AXES = 2**23, 16
"""The maximum size of a header in bytes, and the maximum number of axes of a tensor."""

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
SIZES |= {"U64": 8, "U32": 4, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
"""Bytes per element, by the dtype's name in safetensors."""
NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}
NAMES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
NAMES |= {name: f"{'u' * (name[0] == 'U')}int{8 * SIZES[name]}" for name in SIZES if name[0] in "IU"}
"""Torch's name of each dtype, by its name in safetensors."""
FLOATS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes that weights and states may be stored in."""


class Entry(NamedTuple):
    """A tensor's description in a file's header. `dtype` is torch's name of the dtype."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Header(NamedTuple):
    """The header of a file: the description of each tensor, and the metadata."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


class Stored(NamedTuple):
    """The tensors of a file, by name, and its metadata."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


class Opened(NamedTuple):
    """An open file and its path. The content stays the same even if another file replaces it under this path."""

    path: Path
    file: BinaryIO


@contextmanager
def opened(source: Path | Opened) -> Iterator[Opened]:
    """Yield an open file from which to read both header and tensors, so that they belong to the same version
    of the file.
    """
    if isinstance(source, Opened):
        yield source
        return
    if not source.is_file():
        raise ValueError(
            f"{source}: expected a file, got a folder" if source.is_dir() else f"{source}: no such file"
        )
    with open(source, "rb") as file:
        yield Opened(source, file)


def read_header(source: Path | Opened) -> Header:
    """Read and validate a file's header, without reading any tensor. Every byte after the header must belong
    to exactly one tensor.
    """
    with opened(source) as found:
        return _parsed(found)[0]


def _parsed(source: Opened) -> tuple[Header, dict[str, int]]:
    """Return a file's validated header, and the offset in bytes of each tensor."""
    path, file = source
    file.seek(0)
    size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, HEADER):
        raise ValueError(f"{path}: damaged, or not a safetensors file (no header of {length:,} bytes)")
    text = file.read(length)
    try:
        found = json.loads(text)
        metadata = found.pop("__metadata__", {})
        for word in (*found, *metadata, *metadata.values()):
            word.encode()  # a lone surrogate cannot be encoded
        entries = sorted(found.items(), key=lambda item: item[1]["data_offsets"])
        end = 0
        for _, entry in entries:
            shape, (begin, after) = entry["shape"], entry["data_offsets"]
            whole = all(type(number) is int and 0 <= number < 2**48 for number in (*shape, begin, after))
            if not whole or len(shape) > AXES:  # otherwise computing the product could take very long
                raise ValueError("a shape that no tensor has")
            if begin != end or after - begin != prod(shape) * SIZES[entry["dtype"]]:
                raise ValueError("tensors that overlap, or leave gaps")
            end = after
        if end != size - 8 - length:
            raise ValueError(f"{end:,} bytes of tensors in a file with {size - 8 - length:,}")
        if not all(isinstance(part, str) for item in metadata.items() for part in item):
            raise ValueError("metadata that is no text")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: damaged, or not a safetensors file ({error})") from None
    named = {
        name: Entry(
            NAMES.get(entry["dtype"], entry["dtype"]),
            tuple(entry["shape"]),
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in entries
    }
    begins = {name: 8 + length + entry["data_offsets"][0] for name, entry in entries}
    return Header(named, metadata), begins


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, digest: bool = True
) -> None:
    """Write tensors to a file atomically. `digest` adds a digest; use False if the metadata has other
    checksums.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    words = dict(metadata)
    if digest:
        words |= WRITER
        words[DIGEST] = _digest(whole, words)
    with replacing(path) as temporary:
        try:
            save_file(whole, temporary, words)
        except SafetensorError as error:
            raise OSError(f"{path}: could not be written ({error})") from None


ALIGNMENT = 64
"""The alignment in bytes of the CPU memory that torch allocates."""


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor itself if its memory is aligned as torch's own memory is, else a copy that is.

    A tensor mapped from a file may start at any multiple of 8 bytes. Matrix products of unaligned tensors
    round differently on some processors, so a saved and loaded model would not give identical bits.
    """
    if tensor.device.type != "cpu" or tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone()


def read_tensors(
    source: Path | Opened,
    mapped: int | None = None,
    *,
    digest: bool = True,
    is_mapped: Callable[[str, int], bool] | None = None,
) -> Stored:
    """Read a file's tensors, `aligned`. Tensors of more than `mapped` bytes, or those for which `is_mapped` of their
    name and size is true, are memory-mapped instead, and are read when they are used. `digest` checks the digest, if
    the file has one.
    """
    with opened(source) as (path, file):
        (entries, metadata), begins = _parsed(Opened(path, file))
        try:
            found = _mapped(file, entries, begins)
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            size, told = os.fstat(file.fileno()).st_size, first_line(error)
            raise ValueError(f"{path}: {size:,} bytes cannot be opened here ({told})") from None
    if digest:
        _check_digest(path, found, metadata)
    if is_mapped is None:
        is_mapped = lambda _, nbytes: mapped is not None and nbytes > mapped
    small = {name: aligned(tensor) for name, tensor in found.items() if not is_mapped(name, tensor.nbytes)}
    return Stored(found | small, metadata)


def _mapped(file: BinaryIO, entries: Mapping[str, Entry], begins: Mapping[str, int]) -> dict[str, Tensor]:
    """Return memory-mapped tensors of an open file. Changes to the tensors are not written to the file."""
    import torch

    whole = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    found = {}
    for name, entry in entries.items():
        dtype, begin = getattr(torch, entry.dtype), begins[name]
        raw = whole[begin : begin + entry.nbytes]
        # torch cannot view bytes as a dtype unless the offset is a multiple of its size.
        found[name] = (raw.clone() if begin % dtype.itemsize else raw).view(dtype).view(entry.shape)
    return found


def _check_digest(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Check the digest of a file, and remove its entries from the metadata. A file of another program is not
    checked.
    """
    told = metadata.pop(DIGEST, None)
    if told is None and not WRITER.items() <= metadata.items():
        return
    if told != _digest(tensors, metadata):
        raise ValueError(
            f"{path}: altered or damaged: its digest does not fit its content (who rewrites it on purpose leaves "
            f"{DIGEST!r} out of its metadata, and {next(iter(WRITER))!r})"
        )
    for name in WRITER:
        metadata.pop(name, None)


def describe(tensor: Tensor) -> list[str | int]:
    """Return a tensor's dtype and shape as a list for JSON."""
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


def entry_of(tensor: Tensor) -> Entry:
    """Return the description that a file's header would have for this tensor."""
    return Entry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)


def sha256(tensor: Tensor) -> str:
    """Return the SHA-256 digest of a tensor's bytes, without copying a contiguous tensor."""
    import torch

    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the digest of a file's tensors and metadata. Several threads hash the tensors, because SHA-256
    is slower than a disk.
    """
    names = sorted(tensors)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda name: sha256(tensors[name]), names))
    parts = {name: [*describe(tensors[name]), part] for name, part in zip(names, digests, strict=True)}
    return hashlib.sha256(canonical([parts, dict(metadata)])).hexdigest()
