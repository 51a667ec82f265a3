"""Functions for the pretrained model that a memory is attached to: check that it is supported, compute its digest.
`attached/source.py` loads it.

The extra `attach` installs transformers, which is imported only when it is needed.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from remanence.attached.source import PretrainedSource as PretrainedSource
from remanence.io.files import canonical
from remanence.runtime.choices import short_repr

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]
"""Data that can be written as JSON."""

LEGACY_SAMPLES = 4096
"""The maximum number of values of each weight tensor that a digest in the earlier format covers."""


def check_model(model: PreTrainedModel) -> None:
    """Raise a ValueError unless the model is a causal language model of transformers that supports
    backpropagation.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise ValueError(
            f"attach needs the extra 'attach': pip install 'remanence[attach]' ({error})"
        ) from None
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model: expected a causal language model of transformers, got {short_repr(type(model).__name__)}"
        )
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
        raise ValueError(
            f"model: expected a causal language model, got {name}, which does not generate token by token"
        )
    quantizer = getattr(model, "hf_quantizer", None)
    # The weights of a GGUF file are dequantised when they are loaded.
    plain = all(weight.is_floating_point() and weight.element_size() > 1 for weight in model.parameters())
    if quantizer is not None and not quantizer.is_trainable and not plain:
        how = getattr(quantizer.quantization_config, "quant_method", "quantised")
        raise ValueError(
            f"model: expected weights that gradients pass through, got {name} quantised by {how}, which cannot be "
            "trained; load it dequantised"
        )


class ModelShape(TypedDict):
    """The sizes of a pretrained model that `AttachConfig` has as fields."""

    vocab_size: int
    dim: int
    num_layers: int
    heads: tuple[int, int, int]
    """Number of query heads, number of key and value heads, width of a head."""


def model_shape(model: PreTrainedModel) -> ModelShape:
    """The sizes of a pretrained model."""
    c = model.config.get_text_config()
    heads = c.num_attention_heads
    return {
        "vocab_size": model.get_input_embeddings().num_embeddings,  # type: ignore[typeddict-item]
        "dim": c.hidden_size,
        "num_layers": c.num_hidden_layers,
        "heads": (
            heads,
            getattr(c, "num_key_value_heads", None) or heads,
            getattr(c, "head_dim", None) or c.hidden_size // heads,
        ),
    }


def digest(model: PreTrainedModel) -> str:
    """Compute a digest of a pretrained model, as a string. It covers all weights, rounded to bfloat16 so that
    float64, float32 and bfloat16 copies have the same digest, and the configuration fields that affect the
    model's output. Memories and LoRA are not included.
    """
    named = sorted((name_without_peft(name), tensor) for name, tensor in _base_tensors(model))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing is slower than reading memory
        parts = list(pool.map(lambda item: hashlib.sha256(_bytes(item[1])).hexdigest(), named))
    shapes = [[name, list(tensor.shape), part] for (name, tensor), part in zip(named, parts, strict=True)]
    return (
        DIGEST_VERSION + hashlib.sha256(canonical([function_fields(model.config), shapes])).hexdigest()[:32]
    )


DIGEST_VERSION = "2:"
"""The prefix of a digest. Digests in the earlier format, which cover samples of the weights, have no prefix."""


def matches_digest(model: PreTrainedModel, saved: object, current: str | None = None) -> bool:
    """Whether a saved digest, in the current or the earlier format, is the digest of a model. `current` is the
    model's current digest; None: compute it.
    """
    if isinstance(saved, str) and not saved.startswith(DIGEST_VERSION):
        return _legacy_digest(model) == saved
    return (current or digest(model)) == saved


def is_legacy_digest(saved: object) -> bool:
    """Whether a digest is in the earlier format, which covers only samples of the weights."""
    return isinstance(saved, str) and not saved.startswith(DIGEST_VERSION)


IGNORED_FIELDS = re.compile(
    r"_.*|architectures|auto_map|transformers_version|(torch_)?dtype|name_or_path|tokenizer_class|"
    r".*token_ids?|use_cache|return_dict.*|output_.*|id2label|label2id|num_labels|problem_type|initializer_.*|"
    r".*(dropout|pdrop)|pretraining_tp|chunk_size_feed_forward|gradient_checkpointing|attn_implementation|"
    r"quantization_config|tie_word_embeddings|max_window_layers|no_rope_layer_interval|"
    r"task_specific_params|finetuning_task|use_bfloat16|torchscript"
)
"""Names of configuration fields that the digest ignores. They do not affect the model's output in evaluation,
or are redundant: tied embeddings are visible in the weights, and windows in `layer_types`.
"""


def function_fields(config: PreTrainedConfig) -> JsonValue:
    """The configuration fields that affect the model's output: rotary positions, norms, activation, windows,
    scaling. Fields that the configuration's class does not define are left out, because the model ignores
    them.
    """
    found = config.to_dict()
    try:
        known = type(config)().to_dict().keys()
    except Exception:  # the class cannot be instantiated without arguments
        known = found.keys()
    return _normalized({name: value for name, value in found.items() if name in known})


def _normalized(value: object) -> JsonValue:
    """Configuration data in a form that does not depend on how it was saved. Ignored and empty fields are
    removed, and numbers are rounded to 6 digits, because a GGUF file stores them as float32.
    """
    if isinstance(value, Mapping):
        entries = {
            str(name): _normalized(inner)
            for name, inner in value.items()
            if not IGNORED_FIELDS.fullmatch(str(name))
        }
        layer_types = entries.get("layer_types")
        if isinstance(layer_types, list) and layer_types and all(x == "full_attention" for x in layer_types):
            del entries["layer_types"]
        is_empty = lambda inner: inner is None or inner is False or inner in ([], {})
        return {name: inner for name, inner in entries.items() if not is_empty(inner)}
    if isinstance(value, list | tuple | set):
        return [_normalized(inner) for inner in (sorted(value) if isinstance(value, set) else value)]
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.6g}")
    return value if isinstance(value, str | int | None) else str(value)


def _base_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a pretrained model's parameters and saved buffers, except LoRA
    parameters.
    """
    for name, weight in model.named_parameters():
        if ".lora_" not in name:
            yield name, weight.detach()
    for owner, module in model.named_modules():
        for name, buffer in module.named_buffers(owner, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def weights_key(model: PreTrainedModel) -> bytes:
    """A key that changes whenever a weight or the configuration changes, even in place. It is much faster to
    compute than a digest, and valid only within this process.
    """
    weights = [(x.data_ptr(), x._version, float(x.sum(dtype=torch.float32))) for _, x in _base_tensors(model)]
    return canonical([function_fields(model.config), weights])


def _legacy_digest(model: PreTrainedModel) -> str:
    """The digest in the earlier format, which old files contain. It covers at most 4,096 values of each
    weight.
    """
    found = hashlib.sha256(canonical({"model_type": model.config.model_type}))
    for name, weight in sorted(
        (name_without_peft(name), weight) for name, weight in model.named_parameters()
    ):
        if ".lora_" in name:
            continue
        flat = weight.detach().flatten()
        some = flat[:: max(1, flat.numel() // LEGACY_SAMPLES)][:LEGACY_SAMPLES]
        found.update(f"{name} {list(weight.shape)}".encode())
        found.update(_bytes(some))
    return found.hexdigest()[:32]


def name_without_peft(name: str) -> str:
    """The name of a parameter without the component ``base_layer`` that peft inserts."""
    return name.replace(".base_layer.", ".")


def _bytes(numbers: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU; floating-point values are rounded to bfloat16 first."""
    if numbers.is_floating_point():
        numbers = numbers.to("cpu", torch.bfloat16)
    return numbers.cpu().contiguous().flatten().view(torch.uint8).numpy().data
