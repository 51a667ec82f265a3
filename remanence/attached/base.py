"""A Hugging Face model that is to get a memory: whether it can have one, where its attention is, and what it is called.

transformers comes with the extra `attach`; nothing of it is imported before a model is there.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from remanence.core.choices import brief
from remanence.core.errors import first_line
from remanence.core.files import canonical

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Model types whose layers are known: attention modules named `self_attn`, rotary positions, keys and values that a
cache of transformers holds, logits that are the output embeddings' of the last hidden state.
"""
SAMPLES = 4096
"""Numbers of each weight that go into a digest."""
LORA = ("q_proj", "k_proj", "v_proj", "o_proj")


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


def check_model(model: Any) -> None:
    """Refuse what is no causal language model that can be trained through."""
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise ValueError(
            f"attach needs the extra 'attach': pip install 'remanence[attach]' ({error})"
        ) from None
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model: expected a causal language model of transformers, got {brief(type(model).__name__)}"
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


def attention_modules(model: Any, attention: str | None) -> tuple[str, list[nn.Module]]:
    """Every layer's attention module, in order, and what it is called in its layer."""
    kind = model.config.model_type
    if attention is None:
        if kind not in FAMILIES:
            names = ", ".join(candidates(model)) or "none"
            raise ValueError(
                f"attention: expected the name of the attention modules, as {kind} is none of {', '.join(FAMILIES)}; "
                f"candidates: {names}"
            )
        attention = "self_attn"
    named = re.compile(rf".*\.\d+\.{re.escape(attention)}")
    found = [module for name, module in model.base_model.named_modules() if named.fullmatch(name)]
    depth = model.config.get_text_config().num_hidden_layers
    if len(found) != depth:
        names = ", ".join(candidates(model)) or "none"
        raise ValueError(
            f"attention: expected a name that each of the {depth} layers has once, got {attention!r} ({len(found)} "
            f"found); candidates: {names}"
        )
    return attention, found


def candidates(model: Any) -> list[str]:
    """What the attention modules may be called: modules in numbered layers whose class is named so."""
    names = [
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if "attention" in type(module).__name__.lower() and re.search(r"\.\d+\.[^.]+$", name)
    ]
    return sorted(set(names))


def shape_of(model: Any) -> dict[str, Any]:
    """What a configuration needs to know of a model."""
    c = model.config.get_text_config()
    heads = c.num_attention_heads
    return {
        "vocabulary": model.get_input_embeddings().num_embeddings,
        "dim": c.hidden_size,
        "depth": c.num_hidden_layers,
        "heads": (
            heads,
            getattr(c, "num_key_value_heads", None) or heads,
            getattr(c, "head_dim", None) or c.hidden_size // heads,
        ),
    }


def digest(model: Any) -> str:
    """Of a pretrained model: the shapes of its weights, and some numbers of each as bfloat16, so that copies in other
    dtypes agree. What was attached to it does not count.
    """
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


def _bytes(numbers: Tensor) -> bytes:
    if numbers.is_floating_point():
        numbers = numbers.to("cpu", torch.bfloat16)
    return numbers.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def add_lora(model: Any, rank: int) -> None:
    """Low-rank changes to the attention's projections, by peft; they begin at nothing."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            f"lora: expected 0, or the extra 'lora': pip install 'remanence[lora]' ({error})"
        ) from None
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(LORA)), model)
