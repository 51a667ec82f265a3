"""A Hugging Face model that a memory is attached to: where it is loaded from, whether it can have one, and its digest.

transformers comes with the extra `attach`; nothing of it is imported before a model is there.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from remanence.io.files import canonical
from remanence.runtime.choices import short_repr
from remanence.runtime.errors import first_line
from remanence.tokenizers.tokens import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


SAMPLES = 4096
"""Values of each weight that an earlier version's digest covers."""


class Source(NamedTuple):
    """Where a pretrained model comes from: a folder or a hub's name, and the file in it if that is a GGUF."""

    name: str
    gguf: str | None = None

    @classmethod
    def of(cls, base: str | Path) -> Source:
        """A folder, a hub's name, or the path of a ``.gguf`` file."""
        path = Path(base)
        if path.suffix == ".gguf":
            if not path.is_file():
                raise ValueError(f"base: expected a GGUF file, got {base}, which is not there")
            return cls(str(path.parent.resolve()), path.name)
        return cls(str(path.resolve()) if path.is_dir() else str(base))

    def _load(self, auto: Any, **options: Any) -> Any:
        if self.gguf is not None:
            options["gguf_file"] = self.gguf
        try:
            return auto.from_pretrained(self.name, **options)
        except ImportError as error:
            hint = "pip install 'remanence[attach]'"
            raise ValueError(
                f"base: reading {self.name} needs the extra 'attach': {hint} ({first_line(error)})"
            ) from None
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"base: expected the folder or name of a causal language model, got {self.name} ({first_line(error)})"
            ) from None

    def model(self, dtype: torch.dtype | None = None) -> Any:
        """The pretrained model, in its own dtype unless one is given."""
        from transformers import AutoModelForCausalLM

        return self._load(
            AutoModelForCausalLM, dtype=dtype or ("auto" if self.gguf is None else torch.float32)
        )

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return self._load(AutoTokenizer)

    def own_tokenizer(self) -> Tokenizer | None:
        """Its tokenizer as one of ours; None if there is none that can be found."""
        if not self.name:
            return None
        with suppress(ValueError, AttributeError), TemporaryDirectory() as folder:
            self.tokenizer().save_pretrained(folder)
            if (Path(folder) / "tokenizer.json").is_file():
                return load_tokenizer(folder)
        return None


def check_model(model: PreTrainedModel) -> None:
    """Refuse what is no causal language model that can be trained through."""
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
    # A GGUF's weights are plain numbers once they are loaded.
    plain = all(weight.is_floating_point() and weight.element_size() > 1 for weight in model.parameters())
    if quantizer is not None and not quantizer.is_trainable and not plain:
        how = getattr(quantizer.quantization_config, "quant_method", "quantised")
        raise ValueError(
            f"model: expected weights that gradients pass through, got {name} quantised by {how}, which cannot be "
            "trained; load it dequantised"
        )


def shape_of(model: PreTrainedModel) -> dict[str, Any]:
    """What a configuration needs to know of a model."""
    c = model.config.get_text_config()
    heads = c.num_attention_heads
    return {
        "vocab_size": model.get_input_embeddings().num_embeddings,
        "dim": c.hidden_size,
        "num_layers": c.num_hidden_layers,
        "heads": (
            heads,
            getattr(c, "num_key_value_heads", None) or heads,
            getattr(c, "head_dim", None) or c.hidden_size // heads,
        ),
    }


def digest(model: PreTrainedModel) -> str:
    """Of a pretrained model: every weight as bfloat16, so that float64, float32 and bfloat16 copies agree, and the
    configuration that changes what the model computes. What was attached to it does not count.
    """
    named = sorted((plain_name(name), tensor) for name, tensor in _own_tensors(model))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # sha256 is slower than memory
        parts = list(pool.map(lambda item: hashlib.sha256(_bytes(item[1])).hexdigest(), named))
    shapes = [[name, list(tensor.shape), part] for (name, tensor), part in zip(named, parts, strict=True)]
    return VERSION + hashlib.sha256(canonical([function_fields(model.config), shapes])).hexdigest()[:32]


VERSION = "2:"
"""What a digest begins with. Earlier ones, of samples of the weights, are 32 hexadecimal digits alone."""


def same_base(model: PreTrainedModel, saved: object, now: str | None = None) -> bool:
    """Whether a model is the one of a saved digest, also of an earlier version's; `now` is its digest, if known."""
    if isinstance(saved, str) and not saved.startswith(VERSION):
        return _earlier_digest(model) == saved
    return (now or digest(model)) == saved


def is_earlier(saved: object) -> bool:
    """Whether a digest was written by an earlier version, which saw samples of the weights only."""
    return isinstance(saved, str) and not saved.startswith(VERSION)


UNUSED = re.compile(
    r"_.*|architectures|auto_map|transformers_version|(torch_)?dtype|name_or_path|tokenizer_class|"
    r".*token_ids?|use_cache|return_dict.*|output_.*|id2label|label2id|num_labels|problem_type|initializer_.*|"
    r".*(dropout|pdrop)|pretraining_tp|chunk_size_feed_forward|gradient_checkpointing|attn_implementation|"
    r"quantization_config|tie_word_embeddings|max_window_layers|no_rope_layer_interval|"
    r"task_specific_params|finetuning_task|use_bfloat16|torchscript"
)
"""Fields of a configuration that do not change what a model computes in evaluation, or that its weights or another
field hold: whether embeddings are tied shows in the weights, and `layer_types` names the layers with a window.
"""


def function_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The part of a configuration that changes what a model computes: rotary positions, norms, activation, windows,
    scaling. Fields that the configuration's class does not have are ignored, as its model is.
    """
    found = config.to_dict()
    try:
        known = type(config)().to_dict().keys()
    except Exception:  # a class that cannot be made without arguments
        known = found.keys()
    return _plain({name: value for name, value in found.items() if name in known})


def _plain(value: Any) -> Any:
    """Data as every way of saving it leaves it: without what is absent by default, numbers to 6 digits (a GGUF has
    them in float32).
    """
    if isinstance(value, Mapping):
        entries = {
            str(name): _plain(inner) for name, inner in value.items() if not UNUSED.fullmatch(str(name))
        }
        if set(entries.get("layer_types", ())) == {"full_attention"}:
            del entries["layer_types"]
        absent = lambda inner: inner is None or inner is False or inner in ([], {})
        return {name: inner for name, inner in entries.items() if not absent(inner)}
    if isinstance(value, list | tuple | set):
        return [_plain(inner) for inner in (sorted(value) if isinstance(value, set) else value)]
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.6g}")
    return value if isinstance(value, str | int | None) else str(value)


def _own_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """A model's parameters and saved buffers, without what was attached."""
    for name, weight in model.named_parameters():
        if ".lora_" not in name:
            yield name, weight.detach()
    for owner, module in model.named_modules():
        for name, buffer in module.named_buffers(owner, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def weights_key(model: PreTrainedModel) -> bytes:
    """Changes whenever a weight changes, in place too, and takes a small part of a digest's time."""
    weights = [(x.data_ptr(), x._version, float(x.sum(dtype=torch.float32))) for _, x in _own_tensors(model)]
    return canonical([function_fields(model.config), weights])


def _earlier_digest(model: PreTrainedModel) -> str:
    """As earlier versions computed it, from at most 4,096 values of each weight: folders and memory files have it."""
    found = hashlib.sha256(canonical({"model_type": model.config.model_type}))
    for name, weight in sorted((plain_name(name), weight) for name, weight in model.named_parameters()):
        if ".lora_" in name:
            continue
        flat = weight.detach().flatten()
        some = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]
        found.update(f"{name} {list(weight.shape)}".encode())
        found.update(_bytes(some))
    return found.hexdigest()[:32]


def plain_name(name: str) -> str:
    """A weight's name without what peft adds."""
    return name.replace(".base_layer.", ".")


def _bytes(numbers: Tensor) -> memoryview:
    if numbers.is_floating_point():
        numbers = numbers.to("cpu", torch.bfloat16)
    return numbers.cpu().contiguous().flatten().view(torch.uint8).numpy().data
