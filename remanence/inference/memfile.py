"""A memory as a file: what a model has read, without the text. safetensors, checked in full before anything is used.

The header holds the schema, the model's configuration and fingerprint, the tokens read, and a checksum over all of it
and every tensor; but tensors above `LARGE` bytes, as a kNN store's are, have checksums of their own and are not read
when a file is opened: they stay in the file until they are used. A memory is made from what was read and can reveal it:
treat a file as you would treat the text. It is also untrusted input: nothing in it is executed or unpickled, and what
does not fit the model is refused. Names, shapes and sizes are compared with the model's before any tensor is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from remanence.config import ModelConfig
from remanence.io.files import canonical
from remanence.io.migrations import first_fields, first_name, stored_field
from remanence.io.tensors import (
    FLOATS,
    Entry,
    Opened,
    Stored,
    describe,
    entry_of,
    opened,
    read_header,
    read_tensors,
    sha256,
    write_tensors,
)
from remanence.model import CausalModel, State, state_layout, upgraded
from remanence.runtime.device import machine_memory
from remanence.runtime.errors import DivergedError, OtherConfigError
from remanence.runtime.overrides import differences
from remanence.runtime.state import parts

FORMAT, SCHEMA = "remanence-memory", 1
LAYER = "blocks."
KINDS = {"config": dict, "fingerprint": list, "tokens": list, "state": dict, "notes": dict}
"""What a header holds as JSON."""

LARGE = 2**28
"""Bytes of a tensor that is mapped instead of read."""

GREATEST, LONGEST = 1e15, 2**48
"""The largest number of a state, whose products float32 can hold, and the most tokens that can have been read."""

MIGRATIONS: dict[int, Callable[[Stored], Stored]] = {}
"""From a schema to the next one: each is given a file's tensors and header (as text) as that schema wrote them."""


class Fingerprint(NamedTuple):
    """Of a model: its configuration, and its weights as bfloat16, so that float64, float32 and bfloat16 copies
    agree.
    """

    config: str
    weights: str


class HasWeights(Protocol):
    """A model whose configuration and parameters are saved to files."""

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def current_config(self) -> Any: ...


def fingerprint(model: HasWeights) -> Fingerprint:
    weights = hashlib.sha256()
    for name, parameter in sorted(
        (first_name(name), parameter) for name, parameter in model.saved_parameters()
    ):
        weights.update(f"{name} {list(parameter.shape)}".encode())
        weights.update(_bytes(parameter.detach().to("cpu", torch.bfloat16)))
    config = first_fields("model", _config(model))
    return Fingerprint(hashlib.sha256(canonical(config)).hexdigest()[:32], weights.hexdigest()[:32])


def save(path: str | Path, model: CausalModel, state: State, notes: dict[str, Any] | None = None) -> None:
    """Write what was read. A memory that has become infinite or NaN is refused: it could not be used again.

    `notes` are a few facts of the caller's own, as JSON; `remanence read` keeps there where its reading began.
    """
    if not isinstance(state, State):
        raise ValueError(f"state: expected the State a model returned, got {type(state).__name__}")
    if bool(state.diverged.any()):
        raise DivergedError(
            "state: expected finite numbers, got a memory that has diverged; it was not saved"
        )
    # Copied, as parts of a state may share memory, which safetensors refuses; stores never do, and may be too large for
    # it.
    tensors = {
        name: tensor.detach().to("cpu", copy=tensor.nbytes <= LARGE).contiguous()
        for name, tensor in named(state)
    }
    fitted("state", model, tensors)
    header = {
        "format": FORMAT,
        "schema": str(SCHEMA),
        "config": _text(_config(model)),
        "fingerprint": json.dumps(fingerprint(model)),
        "tokens": json.dumps(state.position.tolist()),
        "state": json.dumps({name: describe(tensor) for name, tensor in tensors.items()}),
        "notes": json.dumps(notes or {}),
        "large": _text({name: sha256(tensor) for name, tensor in tensors.items() if tensor.nbytes > LARGE}),
    }
    write_tensors(Path(path), tensors, {**header, "checksum": _checksum(tensors, header)}, digest=False)


def load(path: str | Path, model: CausalModel, *, force: bool = False, verify: bool = False) -> State:
    """The state in a file, on the model's device, if every part of it fits this model.

    `force` accepts a memory made with other weights of the same configuration. Numbers are converted to the dtypes that
    the model keeps its state in. `verify` reads large tensors, too: damage inside them is not noticed otherwise.
    """
    with opened(Path(path)) as file:
        return _load(file, model, force, verify)


def _load(file: Opened, model: CausalModel, force: bool, verify: bool) -> State:
    path, header = file.path, _header(file)
    own = _config(model)
    config = model.upgrade_config(upgraded(header.data["config"]), str(path))
    found = list(differences(config, own))
    differing = [f"{name} is {theirs!r} in the file, {ours!r} in the model" for name, theirs, ours in found]
    if differing and [name for name, *_ in found] != ["base"]:
        raise ValueError(f"{path}: made by a model of another configuration: {'; '.join(differing)}")
    if differing and not force:
        raise ValueError(
            f"{path}: made by a model of another configuration: {differing[0]}, so it read with another pretrained "
            "model; --force (force=True) loads it anyway"
        )
    if header.data["fingerprint"][1] != fingerprint(model).weights and not force:
        raise ValueError(
            f"{path}: made by the same configuration with other weights; --force (force=True) loads it anyway"
        )
    _compare(str(path), _Shapes(*model.state_layout()), header.entries)
    tensors = _content(file, header, verify)
    unread = {name for name in header.large if tensors[name].nbytes > LARGE and not verify}
    state = fitted(str(path), model, tensors, unread)
    if state.position.tolist() != header.data["tokens"]:
        raise ValueError(
            f"{path}: position: expected the header's {header.data['tokens']} tokens, got {state.position.tolist()}"
        )
    return state


def peek(path: str | Path, *, verify: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A file's header and tensors: checked as a file, brought to the present schema, not yet fitted to a model."""
    with opened(Path(path)) as file:
        header = _header(file)
        _check_plausible(file.path, header)
        return {**header.data, "large": header.large}, _content(file, header, verify)


class _Header(NamedTuple):
    """What a file says of itself, and what it must hold to be true: nothing of it is read yet."""

    data: dict[str, Any]
    entries: Mapping[str, Entry]
    large: dict[str, str]


def _header(file: Opened) -> _Header:
    """A file's header, if it is one of a memory file and describes its tensors."""
    path, (entries, words) = file.path, read_header(file)
    if words.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a memory file, got a safetensors file of another kind")
    schema = int(words["schema"]) if words.get("schema", "").isdecimal() else None
    if schema is None or schema > SCHEMA:
        raise ValueError(
            f"{path}: expected schema {SCHEMA} or older, got {words.get('schema')}; a newer remanence can read it"
        )
    large = _large(words, entries)
    if large is None:
        raise ValueError(f"{path}: altered or damaged: its checksums do not fit its content")
    unread = sum(entry.nbytes for name, entry in entries.items() if name not in large)
    if unread > machine_memory():
        raise ValueError(f"{path}: expected a memory that fits into this machine's, got {unread:,} bytes")
    if schema < SCHEMA:  # only a whole file can be brought to the present schema
        stored = _migrated(path, schema, _verified(file, large, verify=False))
        words, entries = stored.metadata, {name: entry_of(x) for name, x in stored.tensors.items()}
    try:
        data = {name: json.loads(words[name]) for name in KINDS}
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its header is not complete ({type(error).__name__})") from None
    described = {name: [entry.dtype, *entry.shape] for name, entry in entries.items()}
    well = all(isinstance(data[name], kind) for name, kind in KINDS.items()) and data["state"] == described
    if (
        not well
        or [type(part) for part in data["fingerprint"]] != [str, str]
        or any(type(n) is not int for n in data["tokens"])
    ):
        raise ValueError(f"{path}: its header does not describe its content")
    return _Header({**data, "schema": schema}, entries, large)


def _check_plausible(path: Path, header: _Header) -> None:
    """Whether a file's tensors can be those of its own configuration, where that is one of a model that we know."""
    try:
        config = ModelConfig.from_dict(header.data["config"])
        if config.num_layers > len(header.entries):
            raise OtherConfigError(
                f"{path}: its header does not describe its content: {config.num_layers:,} layers"
            )
        shapes = _Shapes(*state_layout(config))
    except OtherConfigError:
        raise
    except (ValueError, TypeError, RuntimeError, OverflowError):  # of a newer version, or someone's own mixer
        return
    _compare(str(path), shapes, header.entries)


def _content(file: Opened, header: _Header, verify: bool) -> dict[str, Tensor]:
    """A file's tensors, checked, in the present schema."""
    return _migrated(file.path, header.data["schema"], _verified(file, header.large, verify)).tensors


def _verified(file: Opened, large: dict[str, str], verify: bool) -> Stored:
    """What a file holds, if its checksums fit."""
    path, stored = file.path, read_tensors(file, mapped=LARGE, digest=False)
    header = dict(stored.metadata)
    if header.pop("checksum", None) != _checksum(stored.tensors, header, set(large)):
        raise ValueError(f"{path}: altered or damaged: its checksum does not fit its content")
    for name, digest in large.items():
        if (verify or stored.tensors[name].nbytes <= LARGE) and sha256(stored.tensors[name]) != digest:
            raise ValueError(f"{path}: altered or damaged: the checksum of {name} does not fit its content")
    return stored


def _migrated(path: Path, schema: int, stored: Stored) -> Stored:
    for old in range(schema, SCHEMA):
        if old not in MIGRATIONS:
            raise ValueError(f"{path}: schema {old} cannot be brought to schema {SCHEMA}")
        stored = MIGRATIONS[old](stored)
    return stored


def _large(header: dict[str, str], entries: Mapping[str, Entry]) -> dict[str, str] | None:
    """The tensors with checksums of their own, and these; None if the header is no good."""
    try:
        large = json.loads(header.get("large", "{}"))
    except (ValueError, RecursionError):
        return None
    named_well = isinstance(large, dict) and all(isinstance(digest, str) for digest in large.values())
    return large if named_well and all(name in entries for name in large) else None


def _config(model: HasWeights) -> dict[str, Any]:
    return model.current_config().to_dict()


def fitted(
    what: str, model: CausalModel, tensors: dict[str, Tensor], unread: set[str] | None = None
) -> State:
    """Tensors as this model's state, on its device and in its dtypes, if each is there, of the right kind, and makes
    sense; of those that stay `unread`, the numbers are not looked at.
    """
    _compare(
        what, _Shapes(*model.state_layout()), {name: entry_of(tensor) for name, tensor in tensors.items()}
    )
    template = model.state_template()
    growing = _growing(template)
    unbounded = {
        f"{path}.{stored_field(field)}" for path, part in parts(template) for field in part.minus_infinity
    }
    state = assembled(template, tensors, model.device)
    for name, tensor in named(state):  # as the model has them: a float64 can be too large for it
        if name not in (unread or ()):
            _check_finite(f"{what}: {name}", tensor, name in unbounded)
    longest = int(state.position.max())
    if longest > LONGEST:
        raise ValueError(f"{what}: position: expected at most {LONGEST:,} tokens read, got {longest:,}")
    for name in growing:
        if 0 < tensors[name].shape[1] < longest:
            got = tensors[name].shape[1]
            raise ValueError(
                f"{what}: {name}: expected an entry for each of the {longest} tokens read, got {got}"
            )
    for _, part in parts(state):
        if not bool(torch.as_tensor(part.agrees(state.position)).all()):
            kind = type(part).__name__
            raise ValueError(
                f"{what}: its parts do not agree on the tokens read, or it has diverged ({kind})"
            )
    return state


class _Shapes(NamedTuple):
    """What a state is compared with: one of few layers, and for every layer the one that it is like."""

    template: State
    places: list[int]


def _compare(what: str, shapes: _Shapes, entries: Mapping[str, Entry]) -> None:
    """Whether tensors can be a state of such a model, by their names, dtypes and shapes."""
    template, places = shapes
    likes, grown = dict(named(template)), _growing(template)
    wanted = {name: name for name in likes if not name.startswith(LAYER)}
    for name in wanted:
        if name not in entries:
            raise ValueError(f"{what}: expected a tensor {name!r}, which is missing")
    rows = list(entries["position"].shape)
    if len(rows) != 1 or rows == [0]:
        raise ValueError(f"{what}: position: expected a count for each document, got shape {rows}")
    layers: dict[str, list[str]] = {}
    for name in likes:
        if name.startswith(LAYER):
            layers.setdefault(name.removeprefix(LAYER).partition(".")[0], []).append(name)
    for layer, place in enumerate(places):
        for same in layers.get(str(place), []):
            name = f"{LAYER}{layer}.{same.removeprefix(LAYER).partition('.')[2]}"
            if name not in entries:
                raise ValueError(f"{what}: expected a tensor {name!r}, which is missing")
            wanted[name] = same
    for name, entry in entries.items():
        if name not in wanted:
            raise ValueError(f"{what}: a tensor {name!r}, for which this model has no place")
        like = likes[wanted[name]]
        length = entry.shape[1:2] if wanted[name] in grown else like.shape[1:2]
        shape, kind = [*rows, *length, *like.shape[2:]], entry_of(like).dtype
        if list(entry.shape) != shape:
            raise ValueError(f"{what}: {name}: expected shape {shape}, got {list(entry.shape)}")
        if entry.dtype not in (FLOATS if like.is_floating_point() else (kind,)):
            raise ValueError(f"{what}: {name}: expected {kind}, got {entry.dtype}")


def _growing(template: State) -> set[str]:
    """The names of tensors that grow with the text."""
    return {f"{path}.{field}" for path, part in parts(template) for field in part.growing()}


def assembled(template: State, tensors: dict[str, Tensor], device: torch.device) -> State:
    """Tensors by name as a state built like `template`, in its dtypes, on a device; nothing is checked."""
    found = iter([tensors[name].to(device, like.dtype) for name, like in named(template)])
    return template.map(lambda _: next(found))


def named(node: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a state with its place: ``blocks.0.memory.layers.1``."""
    if isinstance(node, Tensor):
        yield path, node
    elif node is not None:
        names = map(stored_field, node._fields) if hasattr(node, "_fields") else range(len(node))
        for name, child in zip(names, node, strict=True):
            yield from named(child, f"{path}.{name}" if path else str(name))


def _check_finite(what: str, tensor: Tensor, unbounded: bool) -> None:
    if not tensor.is_floating_point():
        return
    bad = tensor.isnan() | (tensor == torch.inf) if unbounded else ~tensor.isfinite()
    if bool(bad.any()):
        raise ValueError(
            f"{what}: expected finite numbers, got {int(bad.sum())} infinite or NaN of {tensor.numel()}"
        )
    huge = (tensor.abs() > GREATEST) & tensor.isfinite()
    if bool(huge.any()):
        raise ValueError(
            f"{what}: expected numbers up to {GREATEST:g}, got {int(huge.sum())} above of {tensor.numel()}"
        )


def _text(data: Any) -> str:
    return canonical(data).decode()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _checksum(tensors: dict[str, Tensor], header: dict[str, str], unread: set[str] | None = None) -> str:
    """Of the header, and of every tensor but those that have their own checksums in it."""
    unread = {name for name, tensor in tensors.items() if tensor.nbytes > LARGE} if unread is None else unread
    digest = hashlib.sha256(canonical(header))
    for name in sorted(set(tensors) - unread):
        digest.update(name.encode())
        digest.update(_bytes(tensors[name]))
    return digest.hexdigest()
