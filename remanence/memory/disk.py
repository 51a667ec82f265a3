"""A store as a file: safetensors, opened without being read, so that a large one is there at once and is paged in as it is used.

The header holds the caller's own words (a model's fingerprint, a layer, ...), what each tensor is, and checksums: one over the
header and the small tensors, always checked, and one over the keys and values, checked when they are read whole. A store
is made from what was read and can reveal it: treat a file as you would treat the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remanence.files import read_tensors, write_tensors
from remanence.memory.store import StoreState

FORMAT, SCHEMA = "remanence-store", 1
LARGE, SMALL = ("k", "v"), ("position", "importance", "written")


def save_store(path: str | Path, state: StoreState, header: Mapping[str, Any]) -> None:
    """Write a store; the file is whole or not there. `header` is what `load_store` must be given again, as JSON."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state._asdict().items()}
    words = {
        "format": FORMAT,
        "schema": str(SCHEMA),
        "header": json.dumps(dict(header), sort_keys=True),
        "tensors": json.dumps({name: _describe(tensor) for name, tensor in tensors.items()}),
        "content": _checksum("", (tensors[name] for name in LARGE)),
    }
    words["checksum"] = _checksum(json.dumps(words, sort_keys=True), (tensors[name] for name in SMALL))
    write_tensors(Path(path), tensors, words)


def load_store(path: str | Path, header: Mapping[str, Any], *, mmap_above: int = 2**28) -> StoreState:
    """The store in a file, on the CPU, if it is whole and was saved under the same header.

    Keys and values of more than `mmap_above` bytes stay in the file until they are used, and damage inside them is not noticed;
    their memory is this process's own: the file is never written to.
    """
    path = Path(path)
    tensors, words = read_tensors(path)
    words = dict(words)
    if words.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a store, got a safetensors file of another kind")
    if words.get("schema") != str(SCHEMA):
        raise ValueError(f"{path}: expected schema {SCHEMA}, got {words.get('schema')}; a newer remanence can read it")
    if set(tensors) != {*LARGE, *SMALL}:
        raise ValueError(f"{path}: expected the tensors {', '.join((*LARGE, *SMALL))}, got {', '.join(sorted(tensors))}")
    checksum = words.pop("checksum", None)
    if checksum != _checksum(json.dumps(words, sort_keys=True), (tensors[name] for name in SMALL)):
        raise ValueError(f"{path}: altered or damaged: its checksum does not fit its content")
    try:
        described, theirs = json.loads(words["tensors"]), dict(json.loads(words["header"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its header is not complete ({type(error).__name__})") from None
    if described != {name: _describe(tensor) for name, tensor in tensors.items()}:
        raise ValueError(f"{path}: altered or damaged: its header does not describe its content")
    _same_header(path, theirs, json.loads(json.dumps(dict(header))))
    _consistent(path, tensors)
    if sum(tensors[name].nbytes for name in LARGE) <= mmap_above:
        # Copied before it is checked: what was checked cannot change with the file any more.
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        if words.get("content") != _checksum("", (tensors[name] for name in LARGE)):
            raise ValueError(f"{path}: altered or damaged: the checksum of its keys and values does not fit")
    return StoreState(**tensors)


def _same_header(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            raise ValueError(f"{path}: another model's store: {name} is {theirs.get(name)!r} in the file, not {ours.get(name)!r}")


def _consistent(path: Path, tensors: dict[str, Tensor]) -> None:
    """Shapes and kinds that make a store, for a file that was never saved by `save_store`."""
    k, v, position, importance, written = (tensors[name] for name in (*LARGE, *SMALL))
    shaped = k.dim() == 4 and v.shape == k.shape and position.shape == importance.shape == k.shape[:2]
    kinds = k.is_floating_point() and v.dtype == k.dtype and importance.dtype == torch.float32
    whole = position.dtype == written.dtype == torch.int64
    if not (shaped and kinds and whole and written.shape == k.shape[:1] and k.shape[1] > 0):
        raise ValueError(f"{path}: its tensors do not make a store")


def _describe(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


def _checksum(words: str, tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256(words.encode())
    for tensor in tensors:
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
