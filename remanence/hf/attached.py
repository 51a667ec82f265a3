"""The transformers model class for a pretrained model with a memory, and the functions `attach` and `detach`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from remanence.attached import base as pretrained
from remanence.attached import folder as attached_folder
from remanence.attached.config import DEFAULT_MEMORY, AttachConfig, Kind, Place
from remanence.attached.families import attention_modules
from remanence.attached.folder import KIND
from remanence.attached.model import Attached
from remanence.attached.sentences.model import SentenceModel
from remanence.attached.sentences.vocabulary import chat_format, token_flags
from remanence.config import KnnConfig, MemoryConfig, Mode
from remanence.hf.native import FolderConfig, RemanenceForCausalLM
from remanence.io.files import check_digest
from remanence.model import State, Trace
from remanence.runtime.choices import short_repr
from remanence.runtime.keywords import AttachFields, show_fields
from remanence.runtime.terminal import echo


class AttachedConfig(FolderConfig):
    """The transformers configuration of a pretrained model with a memory. It contains the `AttachConfig`, the
    source of the pretrained model, and the fields that transformers expects in every configuration.
    """

    model_type = KIND
    auto = attached_folder.AUTO

    base: dict[str, Any] | None = None
    """The fields of the `PretrainedSource` from which the pretrained model is loaded."""
    remanence: dict[str, Any] | None = None
    """The fields of the `AttachConfig`; None in a configuration made without arguments."""

    def __init__(
        self, base: Mapping[str, Any] | None = None, remanence: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        native = AttachConfig.from_dict(check_digest("remanence", remanence)) if remanence else None
        own = {} if native is None else {
            "vocab_size": native.vocab_size, "hidden_size": native.dim, "num_hidden_layers": native.num_layers,
            "num_attention_heads": native.heads[0],
        }  # fmt: skip
        super().__init__(**{**own, **kwargs})
        self.auto_map = self.auto.names
        self.base = dict(base or {})
        self.remanence = native.to_dict() if native else None


INHERITED_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
"""Fields that `AttachedConfig` copies from the configuration of the pretrained model."""


class AttachedForCausalLM(RemanenceForCausalLM):
    """A pretrained model with a memory, made by `remanence.attach` or loaded from a folder by
    ``from_pretrained``.

    The attribute ``model`` is the `Attached` model, which sessions and this package's training use;
    ``model.base`` is the pretrained model. Only the parameters of memories and LoRA are trained and saved.
    """

    config_class = AttachedConfig  # type: ignore[assignment]

    def __init__(self, model: Attached | SentenceModel) -> None:
        described = model.describe()
        known = {name: getattr(model.base.config, name, None) for name in INHERITED_FIELDS}
        config = AttachedConfig(base=described["base"], remanence=model.config.to_dict(), **known)
        config._attn_implementation = "sdpa"
        PreTrainedModel.__init__(self, config)
        self._no_split_modules = list(getattr(model.base, "_no_split_modules", None) or [])
        self.model: Any = model
        self.generation_config = copy.deepcopy(model.base.generation_config)
        self.name_or_path = model.source.name

    def _trace(
        self,
        tokens: Tensor,
        state: State | None,
        mask: Tensor | None,
        every_layer: bool | None,
        memory_mode: Mode | None,
    ) -> tuple[Trace, Any]:
        trace = self.model.trace(tokens, state, mask=mask, memory_mode=memory_mode, layers=bool(every_layer))
        return trace, (*trace.layers, trace.hidden) if every_layer else None

    def get_output_embeddings(self) -> nn.Module:
        return self.model.base.get_output_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Always raises a ValueError, because the pretrained model must not be changed."""
        raise ValueError(
            "value: expected none, as the pretrained model is left as it is, got other embeddings"
        )

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Always raises a ValueError, because the pretrained model must not be changed."""
        raise ValueError(
            "new_num_tokens: expected the pretrained model's vocabulary; resize it before attaching"
        )

    def print_trainable_parameters(self) -> None:
        """Print how many parameters are trained, as peft does."""
        trained = sum(weight.numel() for weight in self.parameters() if weight.requires_grad)
        total = sum(weight.numel() for weight in self.parameters())
        echo(
            f"trainable params: {trained:,} || all params: {total:,} || trainable%: {100 * trained / total:.4f}"
        )

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the parameters of memories and LoRA, the configuration, and the name of the pretrained model."""
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
        """Load an attached model from a folder. `base` is the pretrained model, its folder or its name; None:
        the pretrained model named in the folder's config.json.
        """
        dtype = kwargs.get("torch_dtype") if dtype is None else dtype
        dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
        loaded = attached_folder.load(
            pretrained_model_name_or_path, base, dtype=dtype if isinstance(dtype, torch.dtype) else None
        )
        return cls(loaded.eval())


@show_fields(MemoryConfig, KnnConfig, defaults=DEFAULT_MEMORY, omit=("dim",))
def attach(
    model: Any,
    config: AttachConfig | None = None,
    *,
    every: int | None = None,
    layers: Sequence[int] | None = None,
    kind: Kind = "neural",
    place: Place = "beside",
    window: int | None = None,
    sinks: int = 4,
    attention: str | None = None,
    lora: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
    memory: Kind | None = None,
    **fields: Unpack[AttachFields],
) -> AttachedForCausalLM:
    """Add a memory to a pretrained causal language model, and return the combined model. The output of the
    memory is initialised to zero, so before training the logits are those of the pretrained model.

    Args:
        model: a transformers model, or its folder, hub name or GGUF file. Its family must have an adapter
            (docs/base-models.md), unless `attention` names its attention modules. The model is not copied: it becomes
            a part of the returned model, with frozen weights. `detach` restores it.
        config: all settings as one `AttachConfig`, instead of the keyword arguments.
        every: add a neural memory to every `every`-th layer; None: to every eighth. A kNN store is added to one layer
            only, at three quarters of the depth.
        layers: indices of the layers that get a memory, counted from 0, instead of `every`.
        kind: "neural"; "knn" for a store of past keys and values; "sentences" for a store of sentences that are put
            into the context before an answer. Both stores need a window.
        place: position of a neural memory: "beside" attention (as in MAG) or in "front" of it (as in MAL).
        window: number of tokens that attention is limited to; None: the model's own attention. The state has a constant
            size only with a window.
        sinks: number of tokens at the start of a text that attention with a window sees in addition.
        attention: the name of the attention module within each layer, for families without an adapter.
        lora: the rank of LoRA on the attention's projections (needs the extra `lora`); 0: no LoRA.
        tokenizer: with kind="sentences", the transformers tokenizer of the model; None: loaded from where the model
            was.
        dtype: the dtype of a model that is given by its folder, name or file; None: the one in which it is stored,
            and float32 for a GGUF file. `remanence.runtime.device.inference_dtype` returns the fastest of a device.
        memory: deprecated: use `kind`.
        fields: settings of the memory: fields of `MemoryConfig` (heads, head_dim, chunk, ...); with kind="knn", of
            `KnnConfig` (k, size, ...); with kind="sentences", of `SentenceConfig` (recalled, rank, ...).
    """
    if memory is not None:
        warnings.warn("attach(memory=...) is deprecated: use kind=", DeprecationWarning, stacklevel=2)
        kind = memory
    settings: dict[str, Any] = {
        "every": every, "layers": _layers(layers), "kind": kind, "place": place, "window": window, "sinks": sinks,
        "attention": attention, "lora": lora,
    }  # fmt: skip
    if config is None:
        settings[kind if kind in ("knn", "sentences") else "memory"] = fields or None
        config = AttachConfig(**settings)
    elif not isinstance(config, AttachConfig):
        raise ValueError(f"config: expected an AttachConfig, got {short_repr(type(config).__name__)}")
    elif fields or any(getattr(AttachConfig(), name) != value for name, value in settings.items()):
        raise ValueError("config: expected an AttachConfig or keyword arguments, got both")
    return _attach(model, config, tokenizer, dtype)


def _layers(layers: Sequence[int] | None) -> tuple[int, ...]:
    """Convert `layers` to a tuple, empty for None. An empty sequence is an error, as () means the default
    layers.
    """
    if layers is not None and not len(layers):
        raise ValueError("layers: expected at least one of the model's layers, or None, got none")
    return () if layers is None else tuple(layers)


def _attach(
    model: Any,
    config: AttachConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
) -> AttachedForCausalLM:
    """Load and check the pretrained model, complete the configuration for it, and attach the memory."""
    source = None
    attached_folder.check_unattached(model)
    if isinstance(model, str | Path):
        source = pretrained.PretrainedSource.from_path(model)
        model = source.load_model(dtype)
    elif dtype is not None:
        raise ValueError(
            "dtype: expected None for a model that is loaded already; convert it with model.to(dtype)"
        )
    pretrained.check_model(model)
    attention, modules = attention_modules(model, config.attention)
    if any(hasattr(module, "remanence_layer") for module in modules):
        raise ValueError("base: expected a model without a memory, got one that has been attached to already")
    shape, known = pretrained.model_shape(model), None
    if config.kind == "sentences":
        tokenizer = tokenizer or (source or pretrained.PretrainedSource(model.name_or_path)).load_tokenizer()
        known = chat_format(tokenizer)
    config = config.for_model(pretrained.digest(model), attention, chat_format=known, **shape)
    found = Attached(model, config, source)
    if tokenizer is not None and config.kind == "sentences":
        flags = token_flags(tokenizer, shape["vocab_size"])
        return AttachedForCausalLM(SentenceModel(found, flags)).train(model.training)
    if not found.family.is_supported:
        _check_logits(model, found)
    return AttachedForCausalLM(found).train(model.training)


def detach(model: AttachedForCausalLM | Attached | SentenceModel) -> Any:
    """Undo `attach` and return the pretrained model: remove hooks, LoRA and the window, and make the same
    parameters trainable as before. The attached model cannot be used afterwards.
    """
    attached = model.model if isinstance(model, AttachedForCausalLM) else model
    if not isinstance(attached, Attached | SentenceModel):
        raise ValueError(
            f"model: expected what remanence.attach returns, got {short_repr(type(model).__name__)}"
        )
    return attached.detach()


@torch.no_grad()
def _check_logits(model: Any, found: Attached) -> None:
    """Raise a ValueError if the model does not compute its logits from the last hidden state by its output
    embeddings alone, for example if it scales them.
    """
    tokens = torch.arange(4, device=found.device).unsqueeze(0) % found.config.vocab_size
    if not torch.equal(model(tokens).logits, found(tokens)[0]):
        raise ValueError(
            "model: expected logits that the output embeddings make of the last hidden state, got "
            f"{type(model).__name__}, which does more"
        )


AutoConfig.register(KIND, AttachedConfig, exist_ok=True)
AutoModelForCausalLM.register(AttachedConfig, AttachedForCausalLM, exist_ok=True)
