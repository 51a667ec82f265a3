"""Saving and loading of model folders: ``config.json`` and ``model.safetensors`` in the format of Hugging Face, and a
short Python file by which Hugging Face's Auto classes find `remanence.hf`. Code in a folder is never run here.

A folder may come from an untrusted source. Everything in it is checked before a model is built or a tensor is read: the
configuration by itself, and then against the headers of the weight files. Loading a malicious folder therefore takes no
more memory or time than its weight files justify.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from remanence.config import ModelConfig
from remanence.io.files import DIGEST, add_digest, check_digest, read_json, replacing, write_json
from remanence.io.migrations import current_name
from remanence.io.shipped import resolve_model_path, shipped_models
from remanence.io.tensors import (
    FLOATS,
    Entry,
    Opened,
    aligned,
    opened,
    read_header,
    read_tensors,
    write_tensors,
)
from remanence.model import Model
from remanence.runtime.choices import short_repr
from remanence.runtime.device import memory_of
from remanence.runtime.errors import first_line

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""File names of the weights, and of the index of weights that are split into several files."""
LAYER = "backbone.blocks."
"""Prefix of the names of all tensors that belong to a layer."""


class AutoClasses(NamedTuple):
    """The Python file in a model folder from which Hugging Face's Auto classes import our classes, so that
    users need not import `remanence.hf`. `config_class` and `model_class` are their names.
    """

    config_class: str
    model_class: str

    @property
    def module(self) -> str:
        """Name of the Python file, without .py."""
        return f"modeling_{self.model_class.removesuffix('ForCausalLM').lower()}"

    @property
    def names(self) -> dict[str, str]:
        """The value of ``auto_map`` in config.json."""
        return {
            "AutoConfig": f"{self.module}.{self.config_class}",
            "AutoModelForCausalLM": f"{self.module}.{self.model_class}",
        }

    @property
    def code(self) -> str:
        """Source code of the Python file."""
        return (
            '"""For Hugging Face, with trust_remote_code=True: the model is in the package remanence[hf]."""\n\n'
            f"from remanence.hf import {self.config_class}, {self.model_class}\n\n"
            f'__all__ = ["{self.config_class}", "{self.model_class}"]\n'
        )

    def write(self, folder: Path) -> None:
        """Write the Python file into a model folder."""
        with replacing(folder / f"{self.module}.py") as temporary:
            temporary.write_text(self.code, encoding="utf-8")


AUTO = AutoClasses("RemanenceConfig", "RemanenceForCausalLM")
"""The Python file for folders of a `Model`."""

CONFIG = "config"
"""Key in the metadata of the weights: the digest of the configuration that they were saved with."""

MOST = 2**21
"""Largest accepted size of a config.json, in bytes."""

LEAST = 2**24
"""Number of elements up to which a matrix is always accepted, because a configuration also has fields that
its blocks do not use.
"""


def save_model(model: Model, folder: str | Path) -> None:
    """Write a model to a folder; see `Model.save`."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder: expected a folder to write into, got the file {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    described, index = describe(model.config, model.embed.weight.dtype), folder / INDEX
    words = {"format": "pt", CONFIG: described["remanence"][DIGEST]}
    write_tensors(folder / WEIGHTS, tensors, words)
    write_json(folder / "config.json", described)
    AUTO.write(folder)
    if index.is_file():  # left by another model that was saved here
        with suppress(ValueError):
            for part in set(_places(index).values()) - {WEIGHTS}:
                (folder / part).unlink(missing_ok=True)
        index.unlink()


def load_model(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Model:
    """Load a model from a folder; see `Model.load`."""
    folder = resolve_model_path(folder)
    if not (folder / "config.json").is_file():
        names = "".join(f", or the name {name}" for name in shipped_models())
        raise ValueError(
            f"model: expected a folder with config.json and model.safetensors{names}, got {folder}"
        )
    described = read_json(
        folder / "config.json", MOST
    )  # read once only: the file may be replaced while the model is loaded
    config = _config(folder, described)
    with ExitStack() as files:
        found = _found(folder, files)
        _check_pair(folder, described, found)
        return _load(folder, config, found, device, dtype)


def _load(
    folder: Path,
    config: ModelConfig,
    found: dict[str, Weight],
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> Model:
    """Check the tensors of a folder against the configuration, then build the model and read its weights."""
    _check_sizes(folder, config, found)
    _check_layers(folder, config, found)
    model = _outline(folder, config)
    _check_tensors(folder, model, found, dtype)
    _check_memory(folder, model, found, device, dtype)
    tensors = {
        _name(name): aligned(tensor.to(device, dtype or tensor.dtype))
        for file in {weight.path: weight.file for weight in found.values()}.values()
        for name, tensor in read_tensors(file, mapped=0).tensors.items()
    }
    model.load_state_dict(tensors, assign=True)
    model.folder = folder
    return model


class Weight(NamedTuple):
    """A tensor in a weight file: the path of the file, the tensor's entry in the file's header, and the open
    file.
    """

    path: Path
    entry: Entry
    file: Opened


def _found(folder: Path, files: ExitStack) -> dict[str, Weight]:
    """Return all tensors of a folder by their present names. They are in one file or, as Hugging Face saves
    large models, in several files with an index. Only the headers are read. `files` closes the opened files.
    """
    index = folder / INDEX
    places = _places(index) if index.is_file() and not (folder / WEIGHTS).is_file() else None
    parts = [WEIGHTS] if places is None else sorted(set(places.values()))
    found: dict[str, Weight] = {}
    for path in (folder / part for part in parts):
        file = files.enter_context(opened(path))
        for stored, entry in read_header(file).entries.items():
            name = _name(stored)
            if name in found:
                raise ValueError(
                    f"{path}: a second tensor {short_repr(name)}, beside that of {found[name].path.name}"
                )
            if places is not None and places.get(stored) != path.name:
                raise ValueError(f"{index}: expected {short_repr(stored)} in {path.name}, where it is")
            found[name] = Weight(path, entry, file)
    for stored, part in (places or {}).items():
        if _name(stored) not in found:
            raise ValueError(
                f"{index}: expected tensors that are there, got {short_repr(stored)}, not in {part}"
            )
    return found


def _places(index: Path) -> dict[str, str]:
    """Return the file name of each tensor according to an index file. The files must be in the same folder as
    the index.
    """
    places = read_json(index, 8 * MOST).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index}: expected a weight_map from tensors to files, got {short_repr(places)}")
    for name in places.values():
        plain = isinstance(name, str) and name.isprintable() and len(name) < 256
        if not plain or name != Path(name).name or "\\" in name or not name.endswith(".safetensors"):
            raise ValueError(
                f"{index}: expected names of .safetensors files beside it, got {short_repr(name)}"
            )
    return places


def _name(stored: str) -> str:
    """Return the present name of a stored tensor, without the prefix that Hugging Face adds."""
    return current_name(stored.removeprefix("model."))


def _check_pair(folder: Path, described: dict[str, Any], found: dict[str, Weight]) -> None:
    """Raise an error if the weights were saved with another configuration, as after an interrupted save.
    Without a digest in both files, nothing is checked: a configuration edited by hand or weights written by
    other software may have none.
    """
    told, file = described["remanence"].get(DIGEST), next(iter(found.values())).file if found else None
    saved = None if file is None or file.path.name != WEIGHTS else read_header(file).metadata.get(CONFIG)
    if told is not None and saved is not None and told != saved:
        raise ValueError(
            f"{folder / WEIGHTS}: saved with another configuration than config.json; save the model again"
        )


def _check_layers(folder: Path, config: ModelConfig, found: dict[str, Weight]) -> None:
    """Raise an error if a tensor of a layer is missing or has a wrong shape, before modules for all layers
    are created.
    """
    small, places = config.condensed()
    layers: dict[str, dict[str, Any]] = {}
    for name, parameter in _outline(folder, small).named_parameters():
        if name.startswith(LAYER):
            place, _, inside = name.removeprefix(LAYER).partition(".")
            layers.setdefault(place, {})[inside] = parameter.shape
    for layer, same in enumerate(places):
        for inside, shape in layers.get(str(same), {}).items():
            name = f"{LAYER}{layer}.{inside}"
            if name not in found:
                raise ValueError(f"{folder / WEIGHTS}: expected a tensor {name!r}, which is missing")
            if found[name].entry.shape != shape:
                expected, got = list(shape), short_repr(list(found[name].entry.shape))
                raise ValueError(f"{found[name].path}: {name}: expected shape {expected}, got {got}")


def _check_sizes(folder: Path, config: ModelConfig, found: dict[str, Weight]) -> None:
    """Raise an error if the configuration has sizes that are too large for the weights, before modules are
    created. Each size is a dimension of some matrix, and no matrix can have more numbers than all weights
    together.
    """
    path, memory = folder / "config.json", config.memory
    if config.num_layers > len(found):
        raise ValueError(
            f"{path}: num_layers: expected at most as many layers as tensors ({len(found)}), got {config.num_layers}"
        )
    numbers = sum(prod(weight.entry.shape) for weight in found.values())
    expanded = (memory.expansion or 1) * memory.shape[1]
    matrices = {
        "dim": config.dim**2,
        "vocab_size": config.vocab_size * config.dim,
        "ffn": config.hidden * config.dim,
        "persistent": config.persistent * config.dim,
        "memory.heads": memory.inner * config.dim,
        "memory.conv": memory.conv * memory.inner,
        "memory.expansion": expanded * memory.inner,
    }
    for name, size in matrices.items():
        if size > max(numbers, LEAST):
            raise ValueError(
                f"{path}: {name}: expected a size that fits the {numbers:,} numbers of the weights, "
                f"got one with {size:.3g}"
            )


def _outline(folder: Path, config: ModelConfig) -> Model:
    """Return the model on the meta device, without data."""
    try:
        with torch.device("meta"):
            return Model(config)
    except (ValueError, RuntimeError) as error:  # torch raises RuntimeError if a product of sizes overflows
        raise ValueError(f"{folder / 'config.json'}: {first_line(error)}") from None


def _check_tensors(folder: Path, model: Model, found: dict[str, Weight], dtype: torch.dtype | None) -> None:
    """Raise an error if a tensor is missing or unexpected, or has a wrong shape or dtype."""
    wanted = dict(model.named_parameters())
    for name, parameter in wanted.items():
        if name not in found:
            raise ValueError(f"{folder / 'model.safetensors'}: expected a tensor {name!r}, which is missing")
        path, entry, _ = found[name]
        if entry.shape != parameter.shape:
            expected, got = list(parameter.shape), short_repr(list(entry.shape))
            raise ValueError(f"{path}: {name}: expected shape {expected}, got {got}")
        if entry.dtype not in FLOATS:
            raise ValueError(f"{path}: {name}: expected {', '.join(FLOATS)}, got {entry.dtype}")
    for name in found:
        if name not in wanted:
            raise ValueError(
                f"{found[name].path}: a tensor {short_repr(name)} that a model of this configuration has not"
            )
    first = found["embed.weight"].entry.dtype
    for owner, module in model.named_modules():
        if isinstance(module, nn.Linear) and dtype is None:  # other modules, such as norms, accept any dtype
            path, entry, _ = found[f"{owner}.weight"]
            if entry.dtype != first:
                raise ValueError(
                    f"{path}: {owner}.weight: expected {first}, as the embedding, got {entry.dtype}; "
                    "load it in one dtype: Model.load(folder, dtype=torch.float32)"
                )


def _check_memory(
    folder: Path,
    model: Model,
    found: dict[str, Weight],
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> None:
    """Raise an error if the device has too little memory for the weights and two states of one document,
    before and after a call. The sizes of windows and stores in a state cannot be inferred from the weights.
    """
    config, room = model.config, memory_of(device)
    kept = dtype or getattr(torch, found["embed.weight"].entry.dtype)
    weights = sum(prod(weight.entry.shape) for weight in found.values()) * kept.itemsize
    with torch.device("meta"):
        state = model.to(kept).start(1).nbytes
    if weights + 2 * state > room:
        sizes = {"window": config.window, "segment": config.segment}
        sizes |= {"memory.chunk": config.memory.chunk, "knn.size": config.knn.size}
        largest = max(sizes, key=sizes.__getitem__)
        raise ValueError(
            f"{folder / 'config.json'}: expected a model for the {room:,.0f} bytes of memory that {device} has, got "
            f"{weights:,} of weights and {state:,} of state ({largest}: {sizes[largest]:,})"
        )


def describe(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of ``config.json``: a Hugging Face configuration whose ``remanence`` entry holds our
    configuration with a digest.
    """
    return {
        "architectures": ["RemanenceForCausalLM"],
        "auto_map": AUTO.names,
        "model_type": "remanence",
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.heads,
        "tie_word_embeddings": config.tie,
        "remanence": add_digest(config.to_dict()),
    }


def read_config(folder: Path) -> ModelConfig:
    """Read the configuration of the model in a folder."""
    return _config(folder, read_json(folder / "config.json", MOST))


def _config(folder: Path, data: dict[str, Any]) -> ModelConfig:
    """Return the model's configuration from the content of config.json."""
    path = folder / "config.json"
    kind, own = data.get("model_type"), data.get("remanence")
    if {"model", "data", "steps"} <= data.keys():  # a TrainConfig
        finished = (folder / "model" / "config.json").is_file()
        helps = (
            f"its model is {folder / 'model'}"
            if finished
            else f"`remanence export {folder} FOLDER` writes one"
        )
        raise ValueError(f"model: expected a model's folder, got the training run {folder}; {helps}")
    if kind != "remanence":
        raise ValueError(f"{path}: expected model_type 'remanence', got {short_repr(kind)}")
    if not isinstance(own, dict):
        raise ValueError(f"{path}: remanence: expected the model's fields, got {short_repr(own)}")
    fields = check_digest(path, own)
    try:
        return ModelConfig.from_dict(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
