"""A memory as a file: what a model has read, without the text. safetensors, checked in full before anything is used.

The header holds the schema, the model's configuration and fingerprint, the tokens read, and a checksum over all of it and every
tensor. A memory is made from what was read and can reveal it: treat a file as you would treat the text. It is also untrusted
input: nothing in it is executed or unpickled, and what does not fit the model is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remanence.attention import AttentionState
from remanence.files import Stored, read_tensors, write_tensors
from remanence.model import Model, State

FORMAT, SCHEMA = "remanence-memory", 1

MIGRATIONS: dict[int, Callable[[Stored], Stored]] = {}
"""From a schema to the next one: each is given a file's tensors and header (as text) as that schema wrote them."""


class Fingerprint(NamedTuple):
    """Of a model: its configuration, and its weights as bfloat16, so that float64, float32 and bfloat16 copies agree."""

    config: str
    weights: str


def fingerprint(model: Model) -> Fingerprint:
    weights = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        weights.update(f"{name} {list(parameter.shape)}".encode())
        weights.update(_bytes(parameter.detach().to("cpu", torch.bfloat16)))
    return Fingerprint(hashlib.sha256(_canonical(model.config.to_dict()).encode()).hexdigest()[:32], weights.hexdigest()[:32])


def save(path: str | Path, model: Model, state: State) -> None:
    """Write what was read. A memory that has become infinite or NaN is refused: it could not be used again."""
    if not isinstance(state, State):
        raise ValueError(f"state: expected the State a model returned, got {type(state).__name__}")
    if bool(state.diverged.any()):
        raise ValueError("state: expected finite numbers, got a memory that has diverged; it was not saved")
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named(state)}
    header = {
        "format": FORMAT,
        "schema": str(SCHEMA),
        "config": _canonical(model.config.to_dict()),
        "fingerprint": json.dumps(fingerprint(model)),
        "tokens": json.dumps(state.position.tolist()),
        "state": json.dumps({name: _describe(tensor) for name, tensor in tensors.items()}),
    }
    write_tensors(Path(path), tensors, {**header, "checksum": _checksum(tensors, header)})


def load(path: str | Path, model: Model, *, force: bool = False) -> State:
    """The state in a file, on the model's device, if every part of it fits this model.

    `force` accepts a memory made with other weights of the same configuration. Numbers are converted to the dtypes that the
    model keeps its state in.
    """
    path = Path(path)
    header, tensors = peek(path)
    differing = _differences(header["config"], model.config.to_dict())
    if differing:
        raise ValueError(f"{path}: made by a model of another configuration: {'; '.join(differing)}")
    if header["fingerprint"][1] != fingerprint(model).weights and not force:
        raise ValueError(f"{path}: made by the same configuration with other weights; --force (force=True) loads it anyway")
    template = model.start(len(header["tokens"]))
    wanted = dict(named(template))
    for name in wanted:
        if name not in tensors:
            raise ValueError(f"{path}: expected a tensor {name!r}, which is missing")
    growing = _growing(template)
    for name, tensor in tensors.items():
        if name not in wanted:
            raise ValueError(f"{path}: a tensor {name!r}, for which this model has no place")
        _check(f"{path}: {name}", tensor, wanted[name], max(header["tokens"]) if name in growing else None)
    found = iter([tensors[name].to(like.device, like.dtype) for name, like in wanted.items()])
    state = template.map(lambda _: next(found))
    if state.position.tolist() != header["tokens"]:
        raise ValueError(f"{path}: position: expected the header's {header['tokens']} tokens, got {state.position.tolist()}")
    return state


def peek(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A file's header and tensors: checked as a file, brought to the present schema, not yet fitted to a model."""
    path = Path(path)
    stored = read_tensors(path)
    if stored.metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a memory file, got a safetensors file of another kind")
    header = dict(stored.metadata)
    if header.pop("checksum", None) != _checksum(stored.tensors, header):
        raise ValueError(f"{path}: altered or damaged: its checksum does not fit its content")
    schema = int(header["schema"]) if header.get("schema", "").isdecimal() else None
    if schema is None or schema > SCHEMA:
        raise ValueError(f"{path}: expected schema {SCHEMA} or older, got {header.get('schema')}; a newer remanence can read it")
    for old in range(schema, SCHEMA):
        if old not in MIGRATIONS:
            raise ValueError(f"{path}: schema {old} cannot be brought to schema {SCHEMA}")
        stored = MIGRATIONS[old](stored)
    try:
        data = {name: json.loads(stored.metadata[name]) for name in ("config", "fingerprint", "tokens", "state")}
    except (KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: its header is not complete ({error})") from None
    described = {name: _describe(tensor) for name, tensor in stored.tensors.items()}
    if data["state"] != described or not _whole(data["tokens"]) or len(data["fingerprint"]) != 2:
        raise ValueError(f"{path}: its header does not describe its content")
    return {**data, "schema": schema}, stored.tensors


def named(node: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a state with its place: ``blocks.0.memory.layers.1``."""
    if isinstance(node, Tensor):
        yield path, node
    elif node is not None:
        names = node._fields if hasattr(node, "_fields") else range(len(node))
        for name, child in zip(names, node, strict=True):
            yield from named(child, f"{path}.{name}" if path else str(name))


def _growing(node: Any, path: str = "") -> set[str]:
    """Where full attention keeps what it has seen, whose length is the text's."""
    if isinstance(node, AttentionState) and node.k.shape[1] == 0:
        return {f"{path}.k", f"{path}.v"}
    if not isinstance(node, tuple):
        return set()
    names = node._fields if hasattr(node, "_fields") else range(len(node))
    found = [_growing(child, f"{path}.{name}" if path else str(name)) for name, child in zip(names, node, strict=True)]
    return set().union(*found)


def _check(what: str, tensor: Tensor, like: Tensor, length: int | None) -> None:
    """Shape, kind and values of one tensor; with a length, axis 1 is as long as that at least."""
    expected, came = list(like.shape), list(tensor.shape)
    if length is not None and len(came) > 1:
        expected[1] = max(length, came[1])
    if came != expected:
        raise ValueError(f"{what}: expected shape {expected}, got {came}")
    if tensor.is_floating_point() != like.is_floating_point() or (not like.is_floating_point() and tensor.dtype != like.dtype):
        raise ValueError(f"{what}: expected {like.dtype}, got {tensor.dtype}")
    if tensor.is_floating_point():
        # A closed gate's logarithm is -inf, and nothing else may be infinite.
        bad = tensor.isnan() | (tensor == torch.inf) if ".gates." in what else ~tensor.isfinite()
        if bool(bad.any()):
            raise ValueError(f"{what}: expected finite numbers, got {int(bad.sum())} infinite or NaN of {tensor.numel()}")
    elif bool((tensor < 0).any()):
        raise ValueError(f"{what}: expected counts of tokens, got {int(tensor.min())}")


def _differences(theirs: Any, ours: Any, path: str = "") -> list[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        names = sorted({*theirs, *ours})
        return [x for name in names for x in _differences(theirs.get(name), ours.get(name), f"{path}.{name}" if path else name)]
    return [] if theirs == ours else [f"{path} is {theirs!r} in the file, {ours!r} in the model"]


def _whole(tokens: Any) -> bool:
    return isinstance(tokens, list) and len(tokens) > 0 and all(type(count) is int and count >= 0 for count in tokens)


def _describe(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


def _canonical(data: Any) -> str:
    return json.dumps(data, sort_keys=True)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _checksum(tensors: dict[str, Tensor], header: dict[str, str]) -> str:
    digest = hashlib.sha256(_canonical(header).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(_bytes(tensors[name]))
    return digest.hexdigest()
