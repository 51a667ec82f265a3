"""One adapter per family of pretrained models: the names of its attention modules, and how they differ from
those of other families.

A family is a `model_type` of transformers. The code of the pretrained model computes queries, keys and
values, rotates them and calls an attention function with the scaling and soft cap of the scores. An adapter
describes only properties that are not arguments of that function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import DynamicCache


QueriesKeys = Callable[[Any, Tensor, tuple[int, int, int]], tuple[Tensor, Tensor]]
"""A function from an attention module and its input ``[b t d]`` to queries and keys ``[b t h e]`` before rotation. The
three integers are the number of query heads, the number of key heads, and the width of a head.
"""


def separate_projections(module: Any, x: Tensor, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Queries and keys of modules with separate `q_proj` and `k_proj`, normalised per head if the module has
    `q_norm` (Qwen3, Gemma 3).
    """
    q, k = (project(x).unflatten(-1, (-1, heads[2])) for project in (module.q_proj, module.k_proj))
    return (module.q_norm(q), module.k_norm(k)) if hasattr(module, "q_norm") else (q, k)


def separate_joint_norm(module: Any, x: Tensor, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Queries and keys of modules with separate `q_proj` and `k_proj`, and one norm over all heads (OLMo 2)."""
    q, k = module.q_norm(module.q_proj(x)), module.k_norm(module.k_proj(x))
    return q.unflatten(-1, (-1, heads[2])), k.unflatten(-1, (-1, heads[2]))


def fused_projection(name: str) -> QueriesKeys:
    """Return a `QueriesKeys` function for modules with one projection, called `name`, whose output is all
    queries, then all keys, then all values (Phi-3's `qkv_proj`, GPT-2's `c_attn`).
    """

    def queries_keys(module: Any, x: Tensor, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        found = getattr(module, name)(x).unflatten(-1, (-1, heads[2]))
        return found[..., : heads[0], :], found[..., heads[0] : heads[0] + heads[1], :]

    return queries_keys


def fused_projection_by_head(module: Any, x: Tensor, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Queries and keys of modules with one projection, whose output is the query, key and value of the first
    head, then of the second, and so on (GPT-NeoX's `query_key_value`).
    """
    q, k, _ = module.query_key_value(x).unflatten(-1, (-1, 3 * heads[2])).chunk(3, -1)
    return q, k


@dataclass(frozen=True)
class Family:
    """How the models of a family are built.

    Attributes:
        models: names of models, for the documentation.
        attention: the name of an attention module in its layer.
        queries_keys: computes queries and keys before rotation, for a kNN store.
        lora: the names of the attention's projections, to which LoRA is added.
        sliding: the object that has the attribute `sliding_window`: "config" if it is the same for all layers, "layer"
            (the attention module) if it differs between layers; None: the family has no sliding windows.
        positions: the position embedding: "rotary", "layer type" (rotary with other frequencies for each type of
            layer), or "learned" (one vector per position).
        caps_logits: whether logits are soft-capped by the configuration's `final_logit_softcapping`.
        is_supported: whether the family is in `FAMILIES`. Other models cannot have an attention window.
    """

    models: str
    attention: str = "self_attn"
    queries_keys: QueriesKeys = separate_projections
    lora: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    sliding: Literal["config", "layer"] | None = None
    positions: Literal["rotary", "layer type", "learned"] = "rotary"
    caps_logits: bool = False
    is_supported: bool = True

    def window_of(self, module: nn.Module) -> int | None:
        """Number of tokens in the sliding window that the pretrained model gives an attention module,
        including the current token; None: full attention.
        """
        if self.sliding is None:
            return None
        return getattr(module if self.sliding == "layer" else module.config, "sliding_window", None)

    def max_positions(self, model: PreTrainedModel) -> int | None:
        """The number of learned positions, which limits the length of a text; None: positions are not
        learned.
        """
        return model.config.max_position_embeddings if self.positions == "learned" else None

    def window_unsupported_reason(self, model: PreTrainedModel) -> str | None:
        """Why the attention of a model cannot be limited to a window; None if it can."""
        kind = model.config.model_type
        if not self.is_supported:
            return f"{kind}: only {', '.join(families_with_window())} can be narrowed"
        if (limit := self.max_positions(model)) is not None:
            return f"{kind}: its learned positions end at {limit:,} tokens, with a window too"
        for name in sorted(rope_types(model.config) & {"dynamic", "longrope"}):
            return f"{kind} with rope_type {name!r}: its rotation changes with the length of a text"
        return None

    def rotation_key(self, module: nn.Module) -> str | None:
        """The key of an attention module in the result of `rotations`; None if the module has no rotary
        positions (some layers of SmolLM3).
        """
        if not getattr(module, "use_rope", True):
            return None
        return str(module.layer_type) if self.positions == "layer type" else "rotary"

    def rotations(
        self, model: PreTrainedModel, like: Tensor, place: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """The cosines and sines ``[b t e]`` of positions `place` ``[b t]``, as a dict by `rotation_key`. If e
        is less than the width of a head, only its first e channels are rotated (partial rotary: GPT-NeoX,
        some Phi-3 models). `like` has the wanted dtype and device.
        """
        rotary = model.base_model.get_submodule("rotary_emb")
        if self.positions == "layer type":
            return {name: rotary(like, place, name) for name in sorted(set(model.config.layer_types))}
        return {"rotary": rotary(like, place)}

    def logit_cap(self, config: PreTrainedConfig) -> float | None:
        """The soft cap of the logits (Gemma); None: the logits are not capped."""
        return (
            getattr(config.get_text_config(), "final_logit_softcapping", None) if self.caps_logits else None
        )

    def cache(self, model: PreTrainedModel) -> DynamicCache:
        """An empty transformers cache of the kind that the model itself would create."""
        from transformers.cache_utils import DynamicCache

        return DynamicCache(config=model.config) if self.is_supported else DynamicCache()


FAMILIES = {
    "llama": Family("Llama 2 and 3, SmolLM, SmolLM2, TinyLlama, others in Llama's format"),
    "mistral": Family("Mistral 7B", sliding="config"),
    "qwen2": Family("Qwen2, Qwen2.5", sliding="layer"),
    "qwen3": Family("Qwen3, dense", sliding="layer"),
    "smollm3": Family("SmolLM3", sliding="layer"),
    "gemma2": Family("Gemma 2", sliding="layer", caps_logits=True),
    "gemma3_text": Family("Gemma 3, text only", sliding="layer", positions="layer type", caps_logits=True),
    "phi3": Family("Phi-3, Phi-3.5, Phi-4", queries_keys=fused_projection("qkv_proj"), lora=("qkv_proj", "o_proj"),
                   sliding="config"),
    "olmo2": Family("OLMo 2", queries_keys=separate_joint_norm),
    "gpt_neox": Family("GPT-NeoX, Pythia", attention="attention", queries_keys=fused_projection_by_head,
                       lora=("query_key_value", "dense")),
    "gpt2": Family("GPT-2", attention="attn", queries_keys=fused_projection("c_attn"), lora=("c_attn", "c_proj"),
                   positions="learned"),
}  # fmt: skip
"""The adapter of each `model_type`. A test compares this table with the one in docs/base-models.md."""


def families_with_window() -> list[str]:
    """The names of the families whose attention can be limited to a window."""
    return [name for name, family in FAMILIES.items() if family.positions != "learned"]


def family_of(model: PreTrainedModel) -> Family:
    """The adapter of a model. For a family that is not in `FAMILIES`, it is a default adapter, which supports
    only the model's own attention.
    """
    return FAMILIES.get(model.config.model_type, Family("", is_supported=False))


def rope_types(config: PreTrainedConfig) -> set[str]:
    """The `rope_type` values of a configuration (how rotary frequencies are scaled), over all types of
    layers.
    """
    given = getattr(config, "rope_parameters", None) or {}
    each = [given, *(value for value in given.values() if isinstance(value, dict))]
    return {str(entry["rope_type"]) for entry in each if "rope_type" in entry}


def attention_modules(model: PreTrainedModel, attention: str | None) -> tuple[str, list[nn.Module]]:
    """The name of the attention module within each layer, and the list of these modules in the order of
    layers. `attention` is that name, if given; None: the name for the model's family.
    """
    kind, family = model.config.model_type, family_of(model)
    if getattr(model.config.get_text_config(), "use_bidirectional_attention", False):
        raise ValueError(f"model: expected causal attention, got {kind} with use_bidirectional_attention")
    if attention is None:
        if not family.is_supported:
            names = ", ".join(attention_candidates(model)) or "none"
            raise ValueError(
                f"attention: expected the name of the attention modules, as {kind} is none of {', '.join(FAMILIES)}; "
                f"candidates: {names}"
            )
        attention = family.attention
    named = re.compile(rf".*\.\d+\.{re.escape(attention)}")
    found = [module for name, module in model.base_model.named_modules() if named.fullmatch(name)]
    depth = model.config.get_text_config().num_hidden_layers
    if len(found) != depth:
        names = ", ".join(attention_candidates(model)) or "none"
        raise ValueError(
            f"attention: expected a name that each of the {depth} layers has once, got {attention!r} ({len(found)} "
            f"found); candidates: {names}"
        )
    return attention, found


def attention_candidates(model: PreTrainedModel) -> list[str]:
    """Possible names of the attention modules: submodules of numbered layers whose class name contains "attention"."""
    names = [
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if "attention" in type(module).__name__.lower() and re.search(r"\.\d+\.[^.]+$", name)
    ]
    return sorted(set(names))


def add_lora(model: PreTrainedModel, rank: int, attention: str) -> None:
    """Add LoRA of this rank to the projections of the attention modules, using peft. `attention` is the name
    of the attention module within each layer. The output of LoRA is initialised to zero.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            f"lora: expected 0, or the extra 'lora': pip install 'remanence[lora]' ({error})"
        ) from None
    family = family_of(model)
    targets = rf".*\.{re.escape(attention)}\.({'|'.join(family.lora)})"
    transposed = family.positions == "learned"  # the Conv1D of GPT-2 has weights [in, out]
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, fan_in_fan_out=transposed), model
    )


def remove_lora(model: PreTrainedModel) -> None:
    """Undo `add_lora`: put the original projections back."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.base_layer)
    if hasattr(model, "peft_config"):
        del model.peft_config
