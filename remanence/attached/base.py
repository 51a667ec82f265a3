"""The pretrained model that a memory is attached to: loading it, checking that it is supported, and its digest.

transformers comes with the extra `attach`, and is imported only when it is needed.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple, TypedDict, TypeVar

import torch
from torch import Tensor

from remanence.io.files import canonical
from remanence.runtime.choices import short_repr
from remanence.runtime.errors import first_line
from remanence.tokenizers.tokens import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")

JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]

LEGACY_SAMPLES = 4096
"""Number of values of each weight that digests of earlier versions cover."""


class PretrainedSource(NamedTuple):
    """Where a pretrained model is loaded from: a folder or a name on the hub, and the name of its GGUF file, if any."""

    name: str
    gguf: str | None = None

    @classmethod
    def from_path(cls, base: str | Path) -> PretrainedSource:
        """The source for a folder, a name on the hub, or the path of a ``.gguf`` file."""
        path = Path(base)
        if path.suffix == ".gguf":
            if not path.is_file():
                raise ValueError(f"base: expected a GGUF file, got {base}, which is not there")
            return cls(str(path.parent.resolve()), path.name)
        return cls(str(path.resolve()) if path.is_dir() else str(base))

    def _load(self, from_pretrained: Callable[..., T], **options: object) -> T:
        if self.gguf is not None:
            options["gguf_file"] = self.gguf
        try:
            return from_pretrained(self.name, **options)
        except ImportError as error:
            hint = "pip install 'remanence[attach]'"
            raise ValueError(
                f"base: reading {self.name} needs the extra 'attach': {hint} ({first_line(error)})"
            ) from None
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"base: expected the folder or name of a causal language model, got {self.name} ({first_line(error)})"
            ) from None

    def load_model(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Load the model, in its own dtype unless one is given."""
        from transformers import AutoModelForCausalLM

        return self._load(
            AutoModelForCausalLM.from_pretrained,
            dtype=dtype or ("auto" if self.gguf is None else torch.float32),
        )

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer of transformers."""
        from transformers import AutoTokenizer

        return self._load(AutoTokenizer.from_pretrained)

    def load_native_tokenizer(self) -> Tokenizer | None:
        """Load the tokenizer as a `remanence.tokenizers` tokenizer; None if there is none."""
        if not self.name:
            return None
        with suppress(ValueError, AttributeError), TemporaryDirectory() as folder:
            self.load_tokenizer().save_pretrained(folder)
            if (Path(folder) / "tokenizer.json").is_file():
                return load_tokenizer(folder)
        return None


def check_model(model: PreTrainedModel) -> None:
    """Raise a ValueError for anything but a causal language model that gradients can pass through."""
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
    """A digest of a pretrained model: of all weights as bfloat16, so that float64, float32 and bfloat16 copies agree,
    and of the part of the configuration that changes what it computes. Memories and LoRA are not included.
    """
    named = sorted((name_without_peft(name), tensor) for name, tensor in _base_tensors(model))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # sha256 is slower than memory
        parts = list(pool.map(lambda item: hashlib.sha256(_bytes(item[1])).hexdigest(), named))
    shapes = [[name, list(tensor.shape), part] for (name, tensor), part in zip(named, parts, strict=True)]
    return (
        DIGEST_VERSION + hashlib.sha256(canonical([function_fields(model.config), shapes])).hexdigest()[:32]
    )


DIGEST_VERSION = "2:"
"""The prefix of a digest. Digests of earlier versions, which cover samples of the weights, have no prefix."""


def matches_digest(model: PreTrainedModel, saved: object, now: str | None = None) -> bool:
    """Whether a saved digest, of this version or an earlier one, is that of a model. `now` is the model's current
    digest, if known.
    """
    if isinstance(saved, str) and not saved.startswith(DIGEST_VERSION):
        return _legacy_digest(model) == saved
    return (now or digest(model)) == saved


def is_legacy_digest(saved: object) -> bool:
    """Whether a digest was written by an earlier version, and covers only samples of the weights."""
    return isinstance(saved, str) and not saved.startswith(DIGEST_VERSION)


IGNORED_FIELDS = re.compile(
    r"_.*|architectures|auto_map|transformers_version|(torch_)?dtype|name_or_path|tokenizer_class|"
    r".*token_ids?|use_cache|return_dict.*|output_.*|id2label|label2id|num_labels|problem_type|initializer_.*|"
    r".*(dropout|pdrop)|pretraining_tp|chunk_size_feed_forward|gradient_checkpointing|attn_implementation|"
    r"quantization_config|tie_word_embeddings|max_window_layers|no_rope_layer_interval|"
    r"task_specific_params|finetuning_task|use_bfloat16|torchscript"
)
"""Names of configuration fields that the digest ignores: they do not change what a model computes in evaluation, or
repeat what the weights or another field say (tied embeddings show in the weights, windows in `layer_types`).
"""


def function_fields(config: PreTrainedConfig) -> JsonValue:
    """The part of a configuration that changes what a model computes: rotary positions, norms, activation, windows,
    scaling. Fields that are unknown to the configuration's class are ignored, as the model ignores them.
    """
    found = config.to_dict()
    try:
        known = type(config)().to_dict().keys()
    except Exception:  # a class that cannot be made without arguments
        known = found.keys()
    return _normalized({name: value for name, value in found.items() if name in known})


def _normalized(value: object) -> JsonValue:
    """Configuration data in a form that does not depend on how it was saved: without ignored and empty fields, and with
    numbers rounded to 6 digits, as a GGUF file has them in float32.
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
    """The parameters and saved buffers of a pretrained model, without LoRA."""
    for name, weight in model.named_parameters():
        if ".lora_" not in name:
            yield name, weight.detach()
    for owner, module in model.named_modules():
        for name, buffer in module.named_buffers(owner, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def weights_key(model: PreTrainedModel) -> bytes:
    """A key that changes whenever a weight changes, also in place. Much faster to compute than a digest."""
    weights = [(x.data_ptr(), x._version, float(x.sum(dtype=torch.float32))) for _, x in _base_tensors(model)]
    return canonical([function_fields(model.config), weights])


def _legacy_digest(model: PreTrainedModel) -> str:
    """The digest of earlier versions, of at most 4,096 values of each weight; old files have it."""
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
    """The name of a weight without the part that peft adds."""
    return name.replace(".base_layer.", ".")


def _bytes(numbers: Tensor) -> memoryview:
    if numbers.is_floating_point():
        numbers = numbers.to("cpu", torch.bfloat16)
    return numbers.cpu().contiguous().flatten().view(torch.uint8).numpy().data
