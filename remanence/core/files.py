"""Files that are whole or not there: written under a temporary name, flushed, and renamed. Nothing is ever
unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends, and is removed if the block fails."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a file to write, got a folder or a device")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: expected its folder to exist; make {path.parent} first")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def display_name(source: Path) -> str:
    """The name of a file or folder; for a run's model also the run's name, as all of them are named ``model``."""
    path = source.resolve()
    return f"{path.parent.name}/{path.name}" if path.name == "model" and path.parent.name else path.name


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


class Stored(NamedTuple):
    """A safetensors file: its tensors, and its header's own words."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        try:
            save_file(whole, temporary, dict(metadata))
        except SafetensorError as error:
            raise OSError(f"{path}: could not be written ({error})") from None


ALIGNMENT = 64
"""Bytes that torch's own memory on a CPU begins at a multiple of."""


def aligned(tensor: Tensor) -> Tensor:
    """The same numbers in memory that begins where torch's own does: the tensor itself, or a copy.

    Tensors that are mapped from a file lie at any multiple of 8, and there some processors' matrix products round
    differently: a model that was saved and loaded would not be the same to the last bit.
    """
    if tensor.device.type != "cpu" or tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone()


def read_tensors(path: Path, mapped: int | None = None) -> Stored:
    """A file's tensors, `aligned`; those above `mapped` bytes stay in the file until they are used, wherever they lie
    in it.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(
            f"{path}: expected a file, got a folder" if path.is_dir() else f"{path}: no such file"
        )
    try:
        with safe_open(path, "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged, or not a safetensors file ({error})") from None
    small = {
        name: aligned(tensor) for name, tensor in found.items() if mapped is None or tensor.nbytes <= mapped
    }
    return Stored(found | small, metadata)
