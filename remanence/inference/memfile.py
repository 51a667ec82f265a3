"""Memory files: the state of a model after a text, as a safetensors file that is checked before anything is used.

The header holds the schema, the configuration and fingerprint of the model, the number of tokens read, and a checksum
over the header and all tensors. Large tensors, such as those of kNN stores, have separate checksums and stay in the
file until they are used (`is_lazy`). A memory can reveal the text that it was made from: treat the file as you would
treat the text. It is also untrusted input: nothing in it is executed or unpickled, and a file that does not fit the
model is refused. Names, shapes and sizes are compared with those of the model before any tensor is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypedDict

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
from remanence.model import CausalModel, SavedConfig, State, state_layout, upgrade_config
from remanence.runtime.device import machine_memory
from remanence.runtime.errors import DivergedError, OtherConfigError
from remanence.runtime.overrides import differences
from remanence.runtime.state import parts

FORMAT, SCHEMA = "remanence-memory", 1
"""Values of the header fields `format` and `schema`."""
LAYER = "blocks."
"""Prefix of the names of all tensors that belong to a layer."""
KINDS = {"config": dict, "fingerprint": list, "tokens": list, "state": dict, "notes": dict}
"""The header fields that contain JSON, and the type of each."""

LARGE, LARGE_STORE = 2**28, 2**22
"""Sizes in bytes above which a tensor, or a tensor of a kNN store, is memory-mapped instead of read."""
STORE = ".store."
"""Part of the names of the tensors of kNN stores."""

MAX_VALUE, MAX_TOKENS_READ = 1e15, 2**48
"""The largest absolute value in a state (float32 can represent its square), and the largest number of tokens read."""

PLACES = ("knn.store_device",)
"""Fields of a configuration in which a file and the model may differ: where the parts of a state are."""

ADDED = {"knn": {"store_dtype": "auto", "store_device": "auto"}}
"""Fields that configurations of earlier versions do not have, with the values that these versions had. With them, a
fingerprint is that of the earlier version.
"""

MIGRATIONS: dict[int, Callable[[Stored], Stored]] = {}
"""Functions that convert the tensors and the header of a file to the next schema, by the schema that they
convert.
"""


def is_lazy(name: str, nbytes: int) -> bool:
    """Whether a tensor stays in its file until it is used. Names are those of a model's state: a tensor with another
    name is refused.
    """
    return nbytes > (LARGE_STORE if STORE in name else LARGE)


class Fingerprint(NamedTuple):
    """Hashes of a model's configuration and of its weights as bfloat16: float64, float32 and bfloat16 copies have the
    same fingerprint.
    """

    config: str
    weights: str


class Identity(NamedTuple):
    """What a memory file says about its model: the configuration as data for JSON, and the fingerprint."""

    config: dict[str, Any]
    fingerprint: Fingerprint


class HasWeights(Protocol):
    """Interface of a model whose configuration and parameters are saved to files."""

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def current_config(self) -> SavedConfig: ...


def fingerprint(model: HasWeights) -> Fingerprint:
    """Compute the fingerprint of a model, which identifies the model that a memory file belongs to."""
    return identify(model).fingerprint


def identify(model: HasWeights) -> Identity:
    """Compute what a memory file says about its model. It reads all weights, also those of a pretrained model."""
    weights = hashlib.sha256()
    for name, parameter in sorted(
        (first_name(name), parameter) for name, parameter in model.saved_parameters()
    ):
        weights.update(f"{name} {list(parameter.shape)}".encode())
        weights.update(_tensor_bytes(parameter.detach().to("cpu", torch.bfloat16)))
    own = _config_dict(model)
    config = hashlib.sha256(canonical(_without_added(first_fields("model", own)))).hexdigest()
    return Identity(own, Fingerprint(config[:32], weights.hexdigest()[:32]))


def _without_added(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without the fields `ADDED` that have the values of earlier versions."""
    found = dict(config)
    for part, added in ADDED.items():
        if isinstance(own := found.get(part), dict):
            found[part] = {name: value for name, value in own.items() if added.get(name, ...) != value}
    return found


def save(
    path: str | Path,
    model: CausalModel,
    state: State,
    notes: Mapping[str, object] | None = None,
    *,
    known: Identity | None = None,
) -> None:
    """Write a state to a memory file. A state that has diverged is refused.

    `notes` is any JSON data to store in the file. `remanence read` stores the number of tokens before its text, and a
    session stores when sentences were read. `known` is the result of `identify`, if the weights have not changed since.
    """
    if not isinstance(state, State):
        raise ValueError(f"state: expected the State a model returned, got {type(state).__name__}")
    if bool(state.diverged.any()):
        raise DivergedError(
            "state: expected finite numbers, got a memory that has diverged; it was not saved"
        )
    state, own = state.saved(), known or identify(model)
    # Parts of a state may share memory, which safetensors refuses, so they are copied. Large stores never do.
    tensors = {
        name: tensor.detach().to("cpu", copy=not is_lazy(name, tensor.nbytes)).contiguous()
        for name, tensor in named_tensors(state)
    }
    fit_state("state", model, tensors)
    header = {
        "format": FORMAT,
        "schema": str(SCHEMA),
        "config": _json(own.config),
        "fingerprint": json.dumps(own.fingerprint),
        "tokens": json.dumps(state.position.tolist()),
        "state": json.dumps({name: describe(tensor) for name, tensor in tensors.items()}),
        "notes": json.dumps(notes or {}),
        "large": _json(
            {name: sha256(tensor) for name, tensor in tensors.items() if is_lazy(name, tensor.nbytes)}
        ),
    }
    write_tensors(Path(path), tensors, {**header, "checksum": _checksum(tensors, header)}, digest=False)


def load(
    path: str | Path,
    model: CausalModel,
    *,
    force: bool = False,
    verify: bool = False,
    known: Identity | None = None,
) -> State:
    """Load the state in a memory file, on the device of the model and in the dtypes of its state.

    Raises an error if the file does not fit the model. `force` accepts a file made with other weights or another
    pretrained model. `verify` also checks the checksums of large tensors, whose damage is otherwise not detected.
    `known` is the result of `identify`, if the weights have not changed since.
    """
    return load_with_notes(path, model, force=force, verify=verify, known=known)[0]


def load_with_notes(
    path: str | Path,
    model: CausalModel,
    *,
    force: bool = False,
    verify: bool = False,
    known: Identity | None = None,
) -> tuple[State, dict[str, Any]]:
    """Like `load`, and return the notes in the file, too."""
    with opened(Path(path)) as file:
        return _load(file, model, force, verify, known)


def _load(
    file: Opened, model: CausalModel, force: bool, verify: bool, known: Identity | None
) -> tuple[State, dict[str, Any]]:
    """Check an open memory file against the model and return its state and its notes; see `load`."""
    path, header = file.path, _read_header(file)
    own = known or identify(model)
    config = model.upgrade_config(upgrade_config(header.data["config"]), str(path))
    found = [each for each in differences(config, own.config) if each[0] not in PLACES]
    differing = [f"{name} is {theirs!r} in the file, {ours!r} in the model" for name, theirs, ours in found]
    if differing and [name for name, *_ in found] != ["base"]:
        raise ValueError(f"{path}: made by a model of another configuration: {'; '.join(differing)}")
    if differing and not force:
        raise ValueError(
            f"{path}: made by a model of another configuration: {differing[0]}, so it read with another pretrained "
            "model; --force (force=True) loads it anyway"
        )
    if header.data["fingerprint"][1] != own.fingerprint.weights and not force:
        raise ValueError(
            f"{path}: made by the same configuration with other weights; --force (force=True) loads it anyway"
        )
    _check_shapes(str(path), _StateLayout(*model.state_layout()), header.entries)
    tensors = _read_tensors(file, header, verify)
    unread = {name for name in header.large if is_lazy(name, tensors[name].nbytes) and not verify}
    state = fit_state(str(path), model, tensors, unread)
    if state.position.tolist() != header.data["tokens"]:
        raise ValueError(
            f"{path}: position: expected the header's {header.data['tokens']} tokens, got {state.position.tolist()}"
        )
    return state, header.data["notes"]


def read_file(path: str | Path, *, verify: bool = False) -> tuple[FileHeader, dict[str, Tensor]]:
    """Return the header and the tensors of a memory file of any model, in the present schema, with checksums
    verified.
    """
    with opened(Path(path)) as file:
        header = _read_header(file)
        _check_plausible(file.path, header)
        return FileHeader(**header.data, large=header.large), _read_tensors(file, header, verify)


class HeaderData(TypedDict):
    """The JSON fields of a header.

    config
        The configuration of the model.
    fingerprint
        The hashes of `Fingerprint`.
    tokens
        The number of tokens read in each row.
    state
        The dtype and shape of each tensor.
    notes
        Data of the caller of `save`.
    schema
        The schema in which the file was written.
    """

    config: dict[str, Any]
    fingerprint: list[str]
    tokens: list[int]
    state: dict[str, list[str | int]]
    notes: dict[str, Any]
    schema: int


class FileHeader(HeaderData):
    """The JSON fields of a header, and the checksums of large tensors by name."""

    large: dict[str, str]


class _Header(NamedTuple):
    """The header of a memory file, the entry of each tensor, and the checksums of large tensors by name. No
    tensor is read.
    """

    data: HeaderData
    entries: Mapping[str, Entry]
    large: dict[str, str]


def _read_header(file: Opened) -> _Header:
    """Read the header of a memory file. Raises an error if it does not describe the tensors in the file."""
    path, (entries, words) = file.path, read_header(file)
    if words.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a memory file, got a safetensors file of another kind")
    schema = int(words["schema"]) if words.get("schema", "").isdecimal() else None
    if schema is None or schema > SCHEMA:
        raise ValueError(
            f"{path}: expected schema {SCHEMA} or older, got {words.get('schema')}; a newer remanence can read it"
        )
    large = _parse_large(words, entries)
    if large is None:
        raise ValueError(f"{path}: altered or damaged: its checksums do not fit its content")
    unread = sum(entry.nbytes for name, entry in entries.items() if name not in large)
    if unread > machine_memory():
        raise ValueError(f"{path}: expected a memory that fits into this machine's, got {unread:,} bytes")
    if schema < SCHEMA:  # to convert the schema, all tensors must be read
        stored = _migrate(path, schema, _read_verified(file, large, verify=False))
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
    header = HeaderData(
        config=data["config"],
        fingerprint=data["fingerprint"],
        tokens=data["tokens"],
        state=data["state"],
        notes=data["notes"],
        schema=schema,
    )
    return _Header(header, entries, large)


def _check_plausible(path: Path, header: _Header) -> None:
    """Raise an error if the tensors of a file do not fit the configuration in its header. Configurations that
    are not of a `Model` are not checked.
    """
    try:
        config = ModelConfig.from_dict(header.data["config"])
        if config.num_layers > len(header.entries):
            raise OtherConfigError(
                f"{path}: its header does not describe its content: {config.num_layers:,} layers"
            )
        shapes = _StateLayout(*state_layout(config))
    except OtherConfigError:
        raise
    except (ValueError, TypeError, RuntimeError, OverflowError):  # a newer version, or a custom mixer
        return
    _check_shapes(str(path), shapes, header.entries)


def _read_tensors(file: Opened, header: _Header, verify: bool) -> dict[str, Tensor]:
    """Read the tensors of a file, verify their checksums, and convert them to the present schema."""
    return _migrate(file.path, header.data["schema"], _read_verified(file, header.large, verify)).tensors


def _read_verified(file: Opened, large: dict[str, str], verify: bool) -> Stored:
    """Read the tensors and the header of a file. Raises an error if a checksum does not match."""
    path, stored = file.path, read_tensors(file, is_mapped=is_lazy, digest=False)
    header = dict(stored.metadata)
    if header.pop("checksum", None) != _checksum(stored.tensors, header, set(large)):
        raise ValueError(f"{path}: altered or damaged: its checksum does not fit its content")
    for name, digest in large.items():
        if (verify or not is_lazy(name, stored.tensors[name].nbytes)) and sha256(
            stored.tensors[name]
        ) != digest:
            raise ValueError(f"{path}: altered or damaged: the checksum of {name} does not fit its content")
    return stored


def _migrate(path: Path, schema: int, stored: Stored) -> Stored:
    """Convert the content of a file from an earlier schema to the present one."""
    for old in range(schema, SCHEMA):
        if old not in MIGRATIONS:
            raise ValueError(f"{path}: schema {old} cannot be brought to schema {SCHEMA}")
        stored = MIGRATIONS[old](stored)
    return stored


def _parse_large(header: dict[str, str], entries: Mapping[str, Entry]) -> dict[str, str] | None:
    """Return the checksums of large tensors by name, or None if that field of the header is invalid."""
    try:
        large = json.loads(header.get("large", "{}"))
    except (ValueError, RecursionError):
        return None
    is_valid = isinstance(large, dict) and all(isinstance(digest, str) for digest in large.values())
    return large if is_valid and all(name in entries for name in large) else None


def _config_dict(model: HasWeights) -> dict[str, Any]:
    """Return the model's configuration as data for JSON."""
    return model.current_config().to_dict()


def fit_state(
    source: str, model: CausalModel, tensors: dict[str, Tensor], unread: set[str] | None = None
) -> State:
    """Convert tensors by name to a state of this model, on its device and in its dtypes.

    Raises an error if a tensor is missing, has a wrong shape or dtype, or has implausible values. The values of the
    `unread` tensors are not checked. `source` is the start of the error messages.
    """
    _check_shapes(
        source,
        _StateLayout(*model.state_layout()),
        {name: entry_of(tensor) for name, tensor in tensors.items()},
    )
    template = model.state_template()
    growing = _field_names(template, "growing")
    unbounded = {
        f"{path}.{stored_field(field)}" for path, part in parts(template) for field in part.minus_infinity
    }
    state = assemble_state(template, tensors, model.device)
    for name, tensor in named_tensors(
        state
    ):  # checked in the model's dtypes, in which a float64 value may overflow
        if name not in (unread or ()):
            _check_finite(f"{source}: {name}", tensor, name in unbounded)
    longest = int(state.position.max())
    if longest > MAX_TOKENS_READ:
        raise ValueError(
            f"{source}: position: expected at most {MAX_TOKENS_READ:,} tokens read, got {longest:,}"
        )
    for name in growing:
        if 0 < tensors[name].shape[1] < longest:
            got = tensors[name].shape[1]
            raise ValueError(
                f"{source}: {name}: expected an entry for each of the {longest} tokens read, got {got}"
            )
    lag = sum(part.lag() for _, part in parts(state))
    for _, part in parts(state):
        if not bool(torch.as_tensor(part.agrees(state.position - lag + part.lag())).all()):
            kind = type(part).__name__
            raise ValueError(
                f"{source}: its parts do not agree on the tokens read, or it has diverged ({kind})"
            )
    return state


class _StateLayout(NamedTuple):
    """The shapes of a state: a template with each distinct kind of layer once, and the index in it of each
    layer.
    """

    template: State
    places: list[int]


def _check_shapes(source: str, shapes: _StateLayout, entries: Mapping[str, Entry]) -> None:
    """Raise an error if the names, dtypes or shapes of tensors are not those of a state. `source` is the start
    of the error messages.
    """
    template, places = shapes
    likes = dict(named_tensors(template))
    grown = _field_names(template, "growing") | _field_names(template, "variable")
    wanted = {name: name for name in likes if not name.startswith(LAYER)}
    for name in wanted:
        if name not in entries:
            raise ValueError(f"{source}: expected a tensor {name!r}, which is missing")
    rows = list(entries["position"].shape)
    if len(rows) != 1 or rows == [0]:
        raise ValueError(f"{source}: position: expected a count for each document, got shape {rows}")
    layers: dict[str, list[str]] = {}
    for name in likes:
        if name.startswith(LAYER):
            layers.setdefault(name.removeprefix(LAYER).partition(".")[0], []).append(name)
    for layer, place in enumerate(places):
        for similar in layers.get(str(place), []):
            name = f"{LAYER}{layer}.{similar.removeprefix(LAYER).partition('.')[2]}"
            if name not in entries:
                raise ValueError(f"{source}: expected a tensor {name!r}, which is missing")
            wanted[name] = similar
    for name, entry in entries.items():
        if name not in wanted:
            raise ValueError(f"{source}: a tensor {name!r}, for which this model has no place")
        like = likes[wanted[name]]
        length = entry.shape[1:2] if wanted[name] in grown else like.shape[1:2]
        shape, kind = [*rows, *length, *like.shape[2:]], entry_of(like).dtype
        if list(entry.shape) != shape:
            raise ValueError(f"{source}: {name}: expected shape {shape}, got {list(entry.shape)}")
        if entry.dtype not in (FLOATS if like.is_floating_point() else (kind,)):
            raise ValueError(f"{source}: {name}: expected {kind}, got {entry.dtype}")


def _field_names(template: State, kind: Literal["growing", "variable"]) -> set[str]:
    """Return the names of the tensors whose length grows with the text, or may be any."""
    return {f"{path}.{field}" for path, part in parts(template) for field in getattr(part, kind)()}


def assemble_state(template: State, tensors: dict[str, Tensor], device: torch.device) -> State:
    """Put tensors by name into a state with the structure and dtypes of `template`. Nothing is checked."""
    host = {f"{path}.{stored_field(field)}" for path, part in parts(template) for field in part.host}
    found = iter(
        [
            tensors[name].to("cpu" if name in host else device, like.dtype)
            for name, like in named_tensors(template)
        ]
    )
    return template.map(lambda _: next(found))


def named_tensors(node: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each tensor in a state; a name is a path such as
    ``blocks.0.memory.layers.1``.
    """
    if isinstance(node, Tensor):
        yield path, node
    elif node is not None:
        names = map(stored_field, node._fields) if hasattr(node, "_fields") else range(len(node))
        for name, child in zip(names, node, strict=True):
            yield from named_tensors(child, f"{path}.{name}" if path else str(name))


def _check_finite(source: str, tensor: Tensor, unbounded: bool) -> None:
    """Raise an error if a tensor has NaN, infinite or very large values. `unbounded` allows -inf."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    lowest, highest = tensor.aminmax()  # NaN if there is any
    if float(lowest) >= -MAX_VALUE and float(highest) <= MAX_VALUE:
        return
    bad = tensor.isnan() | (tensor == torch.inf) if unbounded else ~tensor.isfinite()
    if bool(bad.any()):
        raise ValueError(
            f"{source}: expected finite numbers, got {int(bad.sum())} infinite or NaN of {tensor.numel()}"
        )
    huge = (tensor.abs() > MAX_VALUE) & tensor.isfinite()
    if bool(huge.any()):
        raise ValueError(
            f"{source}: expected numbers up to {MAX_VALUE:g}, got {int(huge.sum())} above of {tensor.numel()}"
        )


def _json(data: Mapping[str, object]) -> str:
    """Return data as JSON text with a fixed key order and spacing, for checksums."""
    return canonical(data).decode()


def _tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the content of a CPU tensor as bytes, without a copy if it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _checksum(tensors: dict[str, Tensor], header: dict[str, str], unread: set[str] | None = None) -> str:
    """Compute the checksum of the header and of all tensors except `unread`, by default those that are large
    enough to have a separate checksum.
    """
    unread = (
        {name for name, tensor in tensors.items() if is_lazy(name, tensor.nbytes)}
        if unread is None
        else unread
    )
    digest = hashlib.sha256(canonical(header))
    for name in sorted(set(tensors) - unread):
        digest.update(name.encode())
        digest.update(_tensor_bytes(tensors[name]))
    return digest.hexdigest()
