"""A pretrained model with a memory as a causal language model of transformers, and `attach`, which makes one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from remanence.attached import base as pretrained
from remanence.attached import folder as attached_folder
from remanence.attached.config import AttachConfig, Kind, Place
from remanence.attached.families import attention_modules
from remanence.attached.folder import KIND
from remanence.attached.model import Attached
from remanence.config import KnnConfig, MemoryConfig, build
from remanence.hf.native import FolderConfig, RemanenceForCausalLM
from remanence.io.files import unsealed
from remanence.model import State, Trace


class AttachedConfig(FolderConfig):
    """Of a pretrained model with a memory: what was attached, where the pretrained model is found, and what
    transformers asks any configuration.
    """

    model_type = KIND
    auto = attached_folder.AUTO

    base: dict[str, Any] | None = None
    remanence: dict[str, Any] | None = None

    def __init__(
        self, base: Mapping[str, Any] | None = None, remanence: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        native = AttachConfig.from_dict(unsealed("remanence", remanence)) if remanence else None
        own = {} if native is None else {
            "vocab_size": native.vocabulary, "hidden_size": native.dim, "num_hidden_layers": native.depth,
            "num_attention_heads": native.heads[0],
        }  # fmt: skip
        super().__init__(**{**own, **kwargs})
        self.auto_map = self.auto.names
        self.base = dict(base or {})
        self.remanence = native.to_dict() if native else None


SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
"""What a configuration takes over from the pretrained model's."""


class AttachedForCausalLM(RemanenceForCausalLM):
    """A pretrained model with a memory, as `remanence.attach` makes it or ``from_pretrained`` finds it in a folder.

    ``.model`` is what sessions and our own training use, ``.model.base`` the pretrained model. Only what is new is
    trained and saved.
    """

    config_class = AttachedConfig  # type: ignore[assignment]

    def __init__(self, model: Attached) -> None:
        described = model.describe()
        known = {name: getattr(model.base.config, name, None) for name in SPECIAL}
        config = AttachedConfig(base=described["base"], remanence=model.config.to_dict(), **known)
        config._attn_implementation = "sdpa"
        PreTrainedModel.__init__(self, config)
        self._no_split_modules = list(getattr(model.base, "_no_split_modules", None) or [])
        self.model: Any = model
        self.generation_config = copy.deepcopy(model.base.generation_config)
        self.name_or_path = model.source.name

    def _trace(
        self, tokens: Tensor, state: State | None, mask: Tensor | None, every_layer: bool | None
    ) -> tuple[Trace, Any]:
        trace = self.model.trace(tokens, state, mask=mask, layers=bool(every_layer))
        return trace, (*trace.layers, trace.hidden) if every_layer else None

    def get_output_embeddings(self) -> nn.Module:
        return self.model.base.get_output_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        raise ValueError(
            "value: expected none, as the pretrained model is left as it is, got other embeddings"
        )

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        raise ValueError(
            "new_num_tokens: expected the pretrained model's vocabulary; resize it before attaching"
        )

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """What is new: weights, configuration, and the pretrained model's name."""
        self.model.save(save_directory)
        self.generation_config.save_pretrained(save_directory)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        base: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> AttachedForCausalLM:
        """The attached model of a folder. The pretrained one is found by the name that the folder has, or is `base`."""
        dtype = kwargs.get("torch_dtype") if dtype is None else dtype
        dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
        loaded = attached_folder.load(
            pretrained_model_name_or_path, base, dtype=dtype if isinstance(dtype, torch.dtype) else None
        )
        return cls(loaded.eval())


def attach(
    model: Any,
    *,
    every: int | None = None,
    layers: Sequence[int] | None = None,
    memory: Kind = "neural",
    place: Place = "beside",
    window: int | None = None,
    sinks: int = 4,
    attention: str | None = None,
    lora: int = 0,
    **fields: Any,
) -> AttachedForCausalLM:
    """A pretrained causal language model with a memory that says nothing yet: its logits are those of before.

    Args:
        model: a model of transformers, of the Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM) or, if `attention`
            names its attention modules, another; or the folder, name or GGUF file of one. It is not copied: it becomes
            a part of what is returned, its weights frozen.
        every: a memory in every so many layers; None: in every eighth. A store is in one, at three quarters of the
            depth.
        layers: or in these, counted from 0.
        memory: "neural", or "knn" for a store of past keys and values (needs a window).
        place: of a neural memory: "beside" attention (MAG) or in "front" of it (MAL).
        window: tokens that attention is narrowed to; None leaves it as it is. Constant memory needs one.
        sinks: the first tokens of a text, which a narrowed attention goes on to see.
        attention: what the attention modules are called in their layers, for other families.
        lora: the rank of trained changes to the attention's projections (extra `lora`); 0: none.
        fields: of the memory: those of `MemoryConfig` (heads, head_dim, chunk, ...) or of `KnnConfig` (k, size, ...).
    """
    source = None
    attached_folder.check_unattached(model)
    if isinstance(model, str | Path):
        source = pretrained.Source.of(model)
        model = source.model()
    pretrained.check_model(model)
    attention, modules = attention_modules(model, attention)
    if any(hasattr(module, "remanence_site") for module in modules):
        raise ValueError("base: expected a model without a memory, got one that has been attached to already")
    depth = len(modules)
    every = min(8, depth) if every is None else every
    if type(every) is not int or not 1 <= every <= depth:
        raise ValueError(f"every: expected a number from 1 to the model's {depth} layers, got {every!r}")
    if layers is None:
        layers = [round(depth * 9 / 12) - 1] if memory == "knn" else range(every - 1, depth, every)
    shape = pretrained.shape_of(model)
    config = AttachConfig(
        base=pretrained.digest(model), **shape, layers=tuple(layers), kind=memory, place=place, window=window,
        sinks=sinks, attention=attention, lora=lora, **_memory_fields(memory, shape["dim"], fields),
    )  # fmt: skip
    found = Attached(model, config, source)
    if not found.family.known:
        _check_logits(model, found)
    return AttachedForCausalLM(found).train(model.training)


def _memory_fields(memory: Kind, dim: int, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a memory, in the part of the configuration that they belong to."""
    if memory == "knn":
        return {"knn": build(KnnConfig, fields)}
    return {"memory": build(MemoryConfig, {"dim": dim, **MEMORY, **fields})}


MEMORY: dict[str, Any] = {"heads": 4, "head_dim": 128, "conv": 8, "induction": True, "forget_bias": -10.0}
"""Where an attached neural memory differs from our models' own: what was measured on books and told facts
(docs/results/attach.md).
"""


@torch.no_grad()
def _check_logits(model: Any, found: Attached) -> None:
    """Refuse a model whose logits are more than its output embeddings make of the last hidden state."""
    tokens = torch.arange(4, device=found.device).unsqueeze(0) % found.config.vocabulary
    if not torch.equal(model(tokens).logits, found(tokens)[0]):
        raise ValueError(
            "model: expected logits that the output embeddings make of the last hidden state, got "
            f"{type(model).__name__}, which does more"
        )


AutoConfig.register(KIND, AttachedConfig, exist_ok=True)
AutoModelForCausalLM.register(AttachedConfig, AttachedForCausalLM, exist_ok=True)
