"""One adapter per family of pretrained models: where its attention is, and what a memory or a narrowed window has to
know of it.

A family is transformers' `model_type`. The model's own code makes queries, keys and values, rotates them and calls its
attention with the scaling and the soft cap of the layer, so an adapter describes only what that call does not contain.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


QueriesKeys = Callable[[Any, Tensor, tuple[int, int, int]], tuple[Tensor, Tensor]]
"""Of an attention module and its input ``[b t d]``: queries and keys ``[b t h e]`` before rotation. The numbers are the
heads of queries, the heads of keys, and their width.
"""


def separate(module: Any, x: Tensor, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Projections `q_proj` and `k_proj`, with norms over each head where the module has them (Qwen3, Gemma 3)."""
    q, k = (project(x).unflatten(-1, (-1, heads[2])) for project in (module.q_proj, module.k_proj))
    return (module.q_norm(q), module.k_norm(k)) if hasattr(module, "q_norm") else (q, k)


def normalized_together(module: Any, x: Tensor, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """The same with one norm over all heads (OLMo 2)."""
    q, k = module.q_norm(module.q_proj(x)), module.k_norm(module.k_proj(x))
    return q.unflatten(-1, (-1, heads[2])), k.unflatten(-1, (-1, heads[2]))


def fused(name: str) -> QueriesKeys:
    """One projection to all queries, then all keys, then all values (Phi-3's `qkv_proj`, GPT-2's `c_attn`)."""

    def queries_keys(module: Any, x: Tensor, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        found = getattr(module, name)(x).unflatten(-1, (-1, heads[2]))
        return found[..., : heads[0], :], found[..., heads[0] : heads[0] + heads[1], :]

    return queries_keys


def fused_by_head(module: Any, x: Tensor, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """One projection to query, key and value of the first head, then of the next (GPT-NeoX's `query_key_value`)."""
    q, k, _ = module.query_key_value(x).unflatten(-1, (-1, 3 * heads[2])).chunk(3, -1)
    return q, k


@dataclass(frozen=True)
class Family:
    """How the models of a family are built.

    Attributes:
        models: what they are called, for the documentation.
        attention: the name of an attention module in its layer.
        queries_keys: how it makes queries and keys, which a store searches before rotation.
        lora: the attention's projections, which LoRA changes.
        sliding: where a sliding window of the model's own is found: in the "config", for all layers, or in each
            attention module ("layer"), as some layers see the whole text; None: the family has no windows.
        positions: "rotary", rotary with frequencies for each "layer type", or "learned" for each position.
        capped: whether logits are soft-capped by the configuration's `final_logit_softcapping`.
        known: whether its layers are known, so that its attention can be narrowed.
    """

    models: str
    attention: str = "self_attn"
    queries_keys: QueriesKeys = separate
    lora: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    sliding: Literal["config", "layer"] | None = None
    positions: Literal["rotary", "layer type", "learned"] = "rotary"
    capped: bool = False
    known: bool = True

    def window_of(self, module: Any) -> int | None:
        """Tokens that an attention module sees as the model was made, the current one included; None: all."""
        if self.sliding is None:
            return None
        return getattr(module if self.sliding == "layer" else module.config, "sliding_window", None)

    def max_positions(self, model: PreTrainedModel) -> int | None:
        """The longest text, for positions that are learned; None: no limit."""
        return model.config.max_position_embeddings if self.positions == "learned" else None

    def why_not_narrowed(self, model: PreTrainedModel) -> str | None:
        """Why attention cannot be narrowed to a window, in words; None if it can."""
        kind = model.config.model_type
        if not self.known:
            return f"{kind}: only {', '.join(narrowed_families())} can be narrowed"
        if (limit := self.max_positions(model)) is not None:
            return f"{kind}: its learned positions end at {limit:,} tokens, with a window too"
        for name in sorted(rope_types(model.config) & {"dynamic", "longrope"}):
            return f"{kind} with rope_type {name!r}: its rotation changes with the length of a text"
        return None

    def rotation_key(self, module: Any) -> str | None:
        """Which of `rotations` an attention module uses; None if it rotates nothing (some layers of SmolLM3)."""
        if not getattr(module, "use_rope", True):
            return None
        return module.layer_type if self.positions == "layer type" else "rotary"

    def rotations(
        self, model: PreTrainedModel, like: Tensor, place: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Cosines and sines ``[b t e]`` of places ``[b t]``, by what `rotation_key` says. Only the first e numbers of
        a head are rotated, where e is less than its width (partial rotary: GPT-NeoX, some of Phi-3).
        """
        rotary = model.base_model.get_submodule("rotary_emb")
        if self.positions == "layer type":
            return {name: rotary(like, place, name) for name in sorted(set(model.config.layer_types))}
        return {"rotary": rotary(like, place)}

    def logits(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """What the output embeddings make of the last hidden state, soft-capped as the model does (Gemma)."""
        logits = model.get_output_embeddings()(hidden)
        cap = (
            getattr(model.config.get_text_config(), "final_logit_softcapping", None) if self.capped else None
        )
        return logits if cap is None else (logits / cap).tanh() * cap

    def cache(self, model: PreTrainedModel) -> Any:
        """An empty cache of transformers as the model itself would make it."""
        from transformers.cache_utils import DynamicCache

        return DynamicCache(config=model.config) if self.known else DynamicCache()


FAMILIES = {
    "llama": Family("Llama 2 and 3, SmolLM, SmolLM2, TinyLlama, others in Llama's format"),
    "mistral": Family("Mistral 7B", sliding="config"),
    "qwen2": Family("Qwen2, Qwen2.5", sliding="layer"),
    "qwen3": Family("Qwen3, dense", sliding="layer"),
    "smollm3": Family("SmolLM3", sliding="layer"),
    "gemma2": Family("Gemma 2", sliding="layer", capped=True),
    "gemma3_text": Family("Gemma 3, text only", sliding="layer", positions="layer type", capped=True),
    "phi3": Family("Phi-3, Phi-3.5, Phi-4", queries_keys=fused("qkv_proj"), lora=("qkv_proj", "o_proj"),
                   sliding="config"),
    "olmo2": Family("OLMo 2", queries_keys=normalized_together),
    "gpt_neox": Family("GPT-NeoX, Pythia", attention="attention", queries_keys=fused_by_head,
                       lora=("query_key_value", "dense")),
    "gpt2": Family("GPT-2", attention="attn", queries_keys=fused("c_attn"), lora=("c_attn", "c_proj"),
                   positions="learned"),
}  # fmt: skip
"""By `model_type`. docs/base-models.md has the same table, which a test compares with this one."""


def narrowed_families() -> list[str]:
    """The families whose attention can be narrowed."""
    return [name for name, family in FAMILIES.items() if family.positions != "learned"]


def family_of(model: PreTrainedModel) -> Family:
    """A model's adapter; of other families, one that leaves attention as it is."""
    return FAMILIES.get(model.config.model_type, Family("", known=False))


def rope_types(config: PreTrainedConfig) -> set[str]:
    """How a model's rotary frequencies are scaled: one for all layers, or one for each type of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    each = [given, *(value for value in given.values() if isinstance(value, dict))]
    return {str(entry["rope_type"]) for entry in each if "rope_type" in entry}


def attention_modules(model: PreTrainedModel, attention: str | None) -> tuple[str, list[nn.Module]]:
    """Every layer's attention module, in order, and its name in the layer."""
    kind, family = model.config.model_type, family_of(model)
    if getattr(model.config.get_text_config(), "use_bidirectional_attention", False):
        raise ValueError(f"model: expected causal attention, got {kind} with use_bidirectional_attention")
    if attention is None:
        if not family.known:
            names = ", ".join(candidates(model)) or "none"
            raise ValueError(
                f"attention: expected the name of the attention modules, as {kind} is none of {', '.join(FAMILIES)}; "
                f"candidates: {names}"
            )
        attention = family.attention
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


def candidates(model: PreTrainedModel) -> list[str]:
    """Possible names of the attention modules: modules in numbered layers whose class is named so."""
    names = [
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if "attention" in type(module).__name__.lower() and re.search(r"\.\d+\.[^.]+$", name)
    ]
    return sorted(set(names))


def add_lora(model: PreTrainedModel, rank: int, attention: str) -> None:
    """Low-rank changes to the attention's projections, by peft. Their output is initialised to zero."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            f"lora: expected 0, or the extra 'lora': pip install 'remanence[lora]' ({error})"
        ) from None
    family = family_of(model)
    targets = rf".*\.{re.escape(attention)}\.({'|'.join(family.lora)})"
    transposed = family.positions == "learned"  # GPT-2's Conv1D, whose weights are [in, out]
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, fan_in_fan_out=transposed), model
    )


def remove_lora(model: PreTrainedModel) -> None:
    """Take out what `add_lora` put in; the projections are the model's own again."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.base_layer)
    if hasattr(model, "peft_config"):
        del model.peft_config
