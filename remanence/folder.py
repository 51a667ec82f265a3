"""The folder a model is saved in: ``config.json`` and ``model.safetensors``, as Hugging Face has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remanence.config import ModelConfig
from remanence.core.files import read_json, write_json
from remanence.core.migrations import current_name
from remanence.core.tensors import aligned, read_tensors, write_tensors
from remanence.model import Model


def save_model(model: Model, folder: str | Path) -> None:
    """`Model.save`."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder: expected a folder to write into, got the file {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    write_json(folder / "config.json", describe(model.config, model.embed.weight.dtype))


def load_model(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Model:
    """`Model.load`."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model: expected a folder with config.json and model.safetensors, got {folder}")
    with torch.device("meta"):
        model = Model(read_config(folder))
    found = {current_name(name.removeprefix("model.")): tensor for name, tensor in _weights(folder).items()}
    wanted = dict(model.named_parameters())
    for name, parameter in wanted.items():
        if name not in found:
            raise ValueError(f"{folder / 'model.safetensors'}: expected a tensor {name!r}, which is missing")
        if found[name].shape != parameter.shape:
            got, expected = list(found[name].shape), list(parameter.shape)
            raise ValueError(f"{folder / 'model.safetensors'}: {name}: expected shape {expected}, got {got}")
        if not found[name].is_floating_point():
            raise ValueError(
                f"{folder / 'model.safetensors'}: {name}: expected real numbers, got {found[name].dtype}"
            )
    for name in found:
        if name not in wanted:
            raise ValueError(
                f"{folder / 'model.safetensors'}: a tensor {name!r} that a model of this configuration has not"
            )
    model = model.to_empty(device="cpu")
    found = {name: aligned(tensor.to(device, dtype or tensor.dtype)) for name, tensor in found.items()}
    model.load_state_dict(found, strict=False, assign=True)
    return model.to(device=device, dtype=dtype)


def _weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, in one file or, as Hugging Face saves large models, in several with an index; left in
    the files, so that a large model need not lie in memory twice on its way to another dtype or device.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return read_tensors(folder / "model.safetensors", mapped=0).tensors
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index}: expected a weight_map from tensors to files, got {type(places).__name__}")
    names = {Path(name).name for name in places.values()}
    return {
        name: tensor
        for part in sorted(names)
        for name, tensor in read_tensors(folder / part, mapped=0).tensors.items()
    }


def describe(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """``config.json``: a Hugging Face configuration whose ``remanence`` entry is ours."""
    return {
        "architectures": ["RemanenceForCausalLM"],
        "model_type": "remanence",
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocabulary,
        "hidden_size": config.dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "tie_word_embeddings": config.tie,
        "remanence": config.to_dict(),
    }


def read_config(folder: Path) -> ModelConfig:
    data = read_json(folder / "config.json")
    if data.get("model_type") != "remanence" or not isinstance(data.get("remanence"), dict):
        raise ValueError(
            f"{folder / 'config.json'}: expected model_type 'remanence', got {data.get('model_type')!r}"
        )
    return ModelConfig.from_dict(data["remanence"])
