"""Saving and loading of attached models.

In the folder of an attached model, ``config.json`` contains the name of the pretrained model and the
`AttachConfig`, and ``model.safetensors`` only the parameters of memories and LoRA. Loading finds the
pretrained model by its name, and raises an error if its digest differs.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from remanence.attached.base import PretrainedSource, check_model, digest, is_legacy_digest, matches_digest
from remanence.attached.config import AttachConfig
from remanence.attached.model import Attached
from remanence.attached.sentences.model import SentenceModel
from remanence.folder import AutoClasses
from remanence.io.files import add_digest, check_digest, read_json, write_json
from remanence.io.shipped import resolve_model_path
from remanence.io.tensors import aligned, read_tensors, write_tensors
from remanence.model import CausalModel, Model
from remanence.runtime.choices import short_repr
from remanence.runtime.device import inference_dtype

KIND = "remanence_attached"
"""The `model_type` in ``config.json``."""
WEIGHTS = "model.safetensors"
"""The file name of the parameters of memories and LoRA."""
AUTO = AutoClasses("AttachedConfig", "AttachedForCausalLM")
"""The module written into the folder, from which the Auto classes of transformers import these two classes."""
MAX_CONFIG_BYTES = 2**21
"""The largest size of a ``config.json`` that is read, in bytes."""


def check_unattached(base: Any) -> None:
    """Raise a ValueError if `base` has a memory already: a model or a folder of this package. Loads no
    weights.
    """
    kind = getattr(getattr(base, "config", None), "model_type", None)
    if isinstance(base, str | Path) and (path := resolve_model_path(base) / "config.json").is_file():
        with suppress(ValueError):
            kind = read_json(path, MAX_CONFIG_BYTES).get("model_type")
    if kind in (KIND, "remanence") or isinstance(base, CausalModel):
        what = base if isinstance(base, str | Path) else type(base).__name__
        raise ValueError(f"base: expected a model without a memory, got {what}, which has one already")


def is_attached(folder: str | Path) -> bool:
    """Whether a folder contains an attached model, according to the `model_type` in its config.json."""
    path = resolve_model_path(folder) / "config.json"
    if not path.is_file():
        return False
    with suppress(ValueError):
        return read_json(path, MAX_CONFIG_BYTES).get("model_type") == KIND
    return False


def attached_model(attached: Attached) -> Attached | SentenceModel:
    """The model with the kind of memory that the configuration names."""
    return SentenceModel(attached) if attached.config.kind == "sentences" else attached


def save(model: Attached | SentenceModel, folder: str | Path) -> None:
    """Write an attached model to a folder: the implementation of `Attached.save`."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder: expected a folder to write into, got the file {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.saved_parameters()}
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    write_json(folder / "config.json", describe(model, model.current_config()))
    AUTO.write(folder)


def read_config(folder: str | Path) -> tuple[AttachConfig, PretrainedSource]:
    """Read config.json of an attached model: the configuration, and the source of the pretrained model."""
    path = resolve_model_path(folder) / "config.json"
    data = read_json(path, MAX_CONFIG_BYTES)
    try:
        config = AttachConfig.from_dict(check_digest(path, data["remanence"]))
        source = PretrainedSource(**data["base"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: expected the configuration of an attached model ({error})") from None
    if not isinstance(source.name, str) or not isinstance(source.gguf, str | None):
        raise ValueError(f"{path}: base: expected a name, got {short_repr(data['base'])}")
    return config, source


def load(
    folder: str | Path,
    base: Any = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    trained: bool = False,
) -> Any:
    """Load an attached model from a folder that `save` wrote. `base` is the pretrained model, its folder or
    its name; None: the one named in config.json. `dtype` is that of the pretrained model; None: the dtype in
    which it is stored, or for the quantised weights of a GGUF file the one that is fastest on the device
    (`inference_dtype`). With `trained`, the parameters of memories and LoRA are loaded as float32, so that
    they can be trained, and so are the weights of a GGUF file.
    """
    folder = resolve_model_path(folder)
    config, source = read_config(folder)
    if base is None and not source.name:
        raise ValueError(
            f"{folder}: expected base=, the pretrained model it was attached to, which has no name here"
        )
    if isinstance(base, str | Path):
        source = PretrainedSource.from_path(base)
    if dtype is None and source.gguf is not None and not trained:
        dtype = inference_dtype(device)
    model = base if base is not None and not isinstance(base, str | Path) else source.load_model(dtype)
    check_model(model)
    # Digests are of weights rounded to bfloat16. Weights that were rounded to float16 first would give another digest,
    # so the digest is computed from the model in its stored dtype.
    rounded = model is not base and dtype == torch.float16 and model.dtype == dtype
    stored = source.load_model() if rounded else model
    if not matches_digest(stored, config.base):
        got = source.name if base is None or isinstance(base, str | Path) else f"this {type(model).__name__}"
        raise ValueError(
            f"{folder}: made for another pretrained model than {got}: weights or "
            "configuration differ; give the right one (base=), or its name under 'base' in config.json"
        )
    if is_legacy_digest(config.base):
        warnings.warn(
            f"{folder}: its digest covers samples of the pretrained model only; save it again for one of all weights",
            stacklevel=2,
        )
        config = replace(config, base=digest(stored))
    attached = attached_model(Attached(model.to(device), config, source))  # type: ignore[arg-type]
    attached.folder = folder
    tensors = {
        name.removeprefix("model."): x for name, x in read_tensors(folder / WEIGHTS, mapped=0).tensors.items()
    }
    own = dict(attached.saved_parameters())
    for name in sorted(own.keys() ^ tensors.keys()):
        problem = "is missing" if name in own else "this model has no place for"
        raise ValueError(f"{folder / WEIGHTS}: a tensor {name!r} that {problem}")
    for name, parameter in own.items():
        if parameter.shape != tensors[name].shape:
            shapes = f"{list(parameter.shape)}, got {list(tensors[name].shape)}"
            raise ValueError(f"{folder / WEIGHTS}: {name}: expected shape {shapes}")
        wanted = torch.float32 if trained and parameter.is_floating_point() else parameter.dtype
        parameter.data = aligned(tensors[name].to(parameter.device, wanted))
    return attached


def load_model(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Any:
    """Load a `CausalModel` from a folder: a native `Model`, or an `Attached` model."""
    if is_attached(folder):
        return load(folder, device=device, dtype=dtype)
    return Model.load(folder, device=device, dtype=dtype)


def describe(model: Attached | SentenceModel, config: AttachConfig | None = None) -> dict[str, Any]:
    """The content of config.json: the source of the pretrained model, and the `AttachConfig` with a digest.
    `config` replaces the configuration of the model; None: the model's own.
    """
    return {
        "architectures": ["AttachedForCausalLM"],
        "model_type": KIND,
        "auto_map": AUTO.names,
        "base": model.source._asdict(),
        "remanence": add_digest((config or model.config).to_dict()),
    }
