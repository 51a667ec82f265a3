"""The transformers classes for a native `Model`: configuration, causal language model and cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from remanence.config import Mode, ModelConfig, preset
from remanence.folder import AUTO, AutoClasses, describe
from remanence.inference import memfile
from remanence.io.files import check_digest
from remanence.io.migrations import TENSORS
from remanence.io.tensors import aligned
from remanence.model import Model, State, Trace


class FolderConfig(PreTrainedConfig):
    """The base class of configurations that save a small module beside them, from which the Auto classes
    import.
    """

    auto: ClassVar[AutoClasses]
    """The module to write into the folder, and the class names that the Auto classes import from it."""
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the configuration as transformers does, and write the module that its ``auto_map`` names."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        self.auto.write(Path(save_directory))
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Does nothing. Saved model folders refer to the installed package, so the source code need not be
        copied into them.
        """


class RemanenceConfig(FolderConfig):
    """The transformers configuration of a native model: ``RemanenceConfig(preset("tiny", "mag"))``.

    The entry ``remanence`` holds the fields of the `ModelConfig`. The fields that transformers expects
    (``vocab_size``, ...) are computed from it. If the entry has a digest, the constructor checks it and
    removes it. Files that transformers writes therefore have no digest, because the entry may have been
    changed since.
    """

    model_type = "remanence"
    auto = AUTO

    remanence: dict[str, Any] | None = None
    """The fields of the `ModelConfig`, without a digest."""

    def __init__(self, remanence: ModelConfig | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if remanence is None:
            remanence = preset("tiny")
        if isinstance(remanence, ModelConfig):
            native = remanence
        else:
            native = ModelConfig.from_dict(check_digest("remanence", remanence))
        super().__init__(**{**_transformers_fields(native), **kwargs})
        self.remanence, self.auto_map = native.to_dict(), AUTO.names

    @property
    def native(self) -> ModelConfig:
        """The `ModelConfig` of the native model. Raises a ValueError if a field of transformers contradicts
        it.
        """
        native = ModelConfig.from_dict(self.remanence or {})
        for name, value in _transformers_fields(native).items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name}: expected {value}, as its entry 'remanence' says, got {getattr(self, name)!r}"
                )
        return native


def _transformers_fields(native: ModelConfig) -> dict[str, Any]:
    """The fields that transformers expects (``vocab_size``, ...) and their values for a native configuration."""
    described = describe(native, torch.float32)
    return {
        name: described[name]
        for name in described
        if name not in ("architectures", "auto_map", "model_type", "dtype", "remanence")
    }


class RemanenceCache(Cache):
    """The cache class for ``past_key_values``. It holds a `State`, which each call of the model replaces.
    Pass a state to the constructor to continue from it.

    `length` counts the columns of the batch, including padding, because ``generate`` uses it to cut its
    inputs. The number of tokens that each row has read is ``state.position``.
    """

    def __init__(self, state: State | None = None) -> None:
        super().__init__(layers=[])
        self.state = state
        self.length = 0 if state is None else int(state.position.max())
        # Number of columns after the last column with padding. At most this many tokens can be cropped.
        self.unpadded = self.length

    @classmethod
    def from_file(
        cls, path: str | Path, model: RemanenceForCausalLM, *, force: bool = False
    ) -> RemanenceCache:
        """Load a cache from a memory file. ``model.generate(prompt, past_key_values=cache)`` then reads the
        prompt as a continuation of the text that the memory has read. If the file holds one document, its
        memory is used for every prompt of a batch. `force` accepts a memory made with other weights.
        """
        cache = cls(memfile.load(path, model.model, force=force))
        cache.length = cache.unpadded = 0  # the text read before is not a part of the prompts
        return cache

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.length}, batch_size={self.batch_size})"

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state.blocks)

    def advance(self, state: State, tokens: Tensor, mask: Tensor | None) -> None:
        """Store the state after a call with `tokens` ``[b t]``, and update the lengths. `mask`: false at
        padding.
        """
        self.state = state
        self.length += tokens.shape[1]
        whole = tokens.shape[1] if mask is None else int(mask.all(0).flip(0).cumprod(0).sum())
        self.unpadded = whole + (self.unpadded if whole == tokens.shape[1] else 0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of columns read so far, including padding."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: the length is not limited."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The length and the offset of attention masks, as transformers asks for them."""
        return self.length + query_length, 0

    @property
    def batch_size(self) -> int:
        """Number of rows of the state; -1 before the first call."""
        return -1 if self.state is None else len(self.state.position)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        """False, because only the latest tokens can be removed. `crop` removes them."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens. Their number is negative, by the convention of transformers. They must be
        in the open chunk of the memories.
        """
        tokens = -tokens_to_remove
        if not 0 <= tokens <= self.unpadded:
            raise ValueError(
                f"tokens_to_remove: expected 0 to {-self.unpadded} (tokens since padding), got {tokens_to_remove}"
            )
        if self.state is not None:
            self.state = self.state.crop(tokens)
        self.length -= tokens
        self.unpadded -= tokens

    def reset(self) -> None:
        self.state, self.length, self.unpadded = None, 0, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows of the state by index, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows of the state with these indices, in this order."""
        if self.state is not None:
            self.state = self.state.rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the state `repeats` times."""
        if self.state is not None:
            self.state = self.state.map(lambda tensor: tensor.repeat_interleave(repeats, 0))


UNSUPPORTED_ARGUMENTS = {
    "inputs_embeds": "the model reads tokens",
    "position_ids": "tokens are read in the order they stand, counted from the document's start",
    "output_attentions": "attention weights are never laid out",
}
"""Arguments of `forward` that transformers knows and this model does not support, with the reason for the
error.
"""


class RemanenceForCausalLM(PreTrainedModel, GenerationMixin):
    """A native `Model` as a causal language model of transformers. Load one with
    ``AutoModelForCausalLM.from_pretrained(folder)``, or make a new one with
    ``RemanenceForCausalLM(RemanenceConfig(config))``.
    """

    config_class = RemanenceConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _supports_sdpa = True

    def __init__(self, config: RemanenceConfig) -> None:
        super().__init__(config)
        self._no_split_modules = ["Block"]
        self.model = Model(config.native)
        for parameter in self.model.parameters():
            if not parameter.is_meta:
                parameter._is_hf_initialized = True  # the constructor of Model has initialised it
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RemanenceCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        memory_mode: Mode | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits ``[b t v]`` and, if there are labels, the loss.

        Args:
            attention_mask: false at padding; covers the tokens of this call, or earlier tokens as well.
            past_key_values: the cache that the previous call returned, or None at the start of a document. It is
                updated in place.
            labels: the tokens themselves, not shifted; -100 for tokens that the loss ignores.
            use_cache: whether to return a cache; by default true, except in training without a given cache.
            logits_to_keep: number of last tokens whose logits are returned, 0 for all; or a tensor of their indices.
            memory_mode: "on", "off", "frozen" or "fresh"; None: ``model.model.memory_mode``. ``generate`` accepts it
                as well.
            kwargs: further arguments of the loss function, such as the Trainer's ``num_items_in_batch``.
        """
        for name, reason in UNSUPPORTED_ARGUMENTS.items():
            given = kwargs.pop(name, None)
            if given is not None and given is not False:
                raise ValueError(f"{name}: expected None, as {reason}, got {type(given).__name__}")
        if input_ids is None:
            raise ValueError("input_ids: expected tokens, got None")
        if past_key_values is not None and not isinstance(past_key_values, RemanenceCache):
            raise ValueError(
                f"past_key_values: expected a RemanenceCache or None, got {type(past_key_values).__name__}"
            )
        cache = RemanenceCache() if past_key_values is None else past_key_values
        if cache.batch_size == 1 < len(input_ids):  # use one memory for all prompts and beams
            cache.batch_repeat_interleave(len(input_ids))
        mask = (
            None
            if attention_mask is None
            else attention_mask[:, attention_mask.shape[1] - input_ids.shape[1] :].bool()
        )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        trace, layers = self._trace(input_ids, cache.state, mask, output_hidden_states, memory_mode)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(trace.hidden[:, kept])
        loss = None
        if labels is not None:
            if mask is not None:  # a token after padding has no earlier token to be predicted from
                labels = labels.masked_fill(~mask.roll(1, 1), -100)
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        if use_cache is None:
            use_cache = past_key_values is not None or not self.training
        if use_cache:
            cache.advance(trace.state, input_ids, mask)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache if use_cache else None, hidden_states=layers
        )

    def _trace(
        self,
        tokens: Tensor,
        state: State | None,
        mask: Tensor | None,
        every_layer: bool | None,
        memory_mode: Mode | None,
    ) -> tuple[Trace, Any]:
        """The trace of the native model; and, if `every_layer`, the input of each layer followed by the
        normalised output of the last layer, else None.
        """
        trace = self.model.trace(tokens, state, mask=mask, memory_mode=memory_mode)
        return trace, (*trace.layers, trace.hidden) if every_layer else None

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """Raise a ValueError if a row ends in padding: ``generate`` continues from the last column, so every
        row must end in a token.
        """
        super()._validate_model_kwargs(model_kwargs)  # type: ignore[misc]
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError(
                "attention_mask: expected padding on the left only (padding_side='left'), got a row that ends in it"
            )

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Does nothing, as `FolderConfig.register_for_auto_class`."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False: ``generate`` must use a `RemanenceCache`."""
        return False

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *rest: Any
    ) -> None:
        """Let ``generate`` start with an empty `RemanenceCache`, unless it is given one or uses none."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *rest)  # type: ignore[misc]
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = RemanenceCache()

    @property
    def gradient_checkpointing(self) -> bool:
        return self.model.checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, on: bool) -> None:
        self.model.checkpointing = on

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The layer that computes the logits; None if the logits use the weights of the input embeddings."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        if self.model.head is None:
            got = type(new_embeddings).__name__
            raise ValueError(f"new_embeddings: expected none, as the logits use the input's (tie), got {got}")
        self.model.head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the vocabulary, and update the configuration and the token frequencies to match."""
        embed = super().resize_token_embeddings(*args, **kwargs)
        self.config.vocab_size = embed.num_embeddings
        self.config.remanence = {**self.config.remanence, "vocab_size": embed.num_embeddings}
        self.model.config = self.config.native
        table = self.model.log_unigrams
        if table is not None:  # new tokens have no counts: treat them as the rarest known token
            more = table.detach().min().expand(max(0, embed.num_embeddings - len(table)))
            self.model.log_unigrams = nn.Parameter(
                torch.cat([table.detach()[: embed.num_embeddings], more]), requires_grad=False
            )
        return embed

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise new rows of the vocabulary, with the scale of a new model. `initialize_weights` does the
        rest.
        """
        if isinstance(module, (nn.Embedding, nn.Linear)):
            nn.init.normal_(module.weight, std=self.config.hidden_size**-0.5)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Set each parameter that no constructor or checkpoint has initialised to its value in a new `Model`."""
        missing = {
            name: weight
            for name, weight in self.model.named_parameters()
            if not getattr(weight, "_is_hf_initialized", False)
        }
        if missing:
            new = dict(Model(self.model.config).named_parameters())
            for name, weight in missing.items():
                weight.copy_(new[name])

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        output_loading_info: bool = False,
        ignore_mismatched_sizes: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a model as transformers does, but raise a ValueError if a tensor is missing, unexpected or of
        a wrong shape. transformers would initialise such a weight at random.
        """
        kwargs.setdefault("key_mapping", {f"^model.{old}": f"model.{new}" for old, new in TENSORS.items()})
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path,
            *args,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **kwargs,
        )
        (model, found), where = loaded, pretrained_model_name_or_path
        model.model.folder = Path(where) if Path(where).is_dir() else None
        for parameter in model.parameters():  # copy weights that are unaligned views of the file
            # Quantised and sharded tensors manage their own storage.
            if type(parameter.data) is Tensor:
                parameter.data = aligned(parameter.data)
        if model.model.log_unigrams is not None:  # transformers makes all loaded parameters trainable
            model.model.log_unigrams.requires_grad_(False)
        for name in sorted(found["missing_keys"]):
            raise ValueError(f"{where}: expected a tensor {name!r}, which is missing")
        for name in sorted(found["unexpected_keys"]):
            raise ValueError(f"{where}: a tensor {name!r} that a model of this configuration has not")
        for name, got, expected in sorted(found["mismatched_keys"]):
            if not ignore_mismatched_sizes:
                raise ValueError(f"{where}: {name}: expected shape {list(expected)}, got {list(got)}")
        return (model, found) if output_loading_info else model


AutoConfig.register("remanence", RemanenceConfig, exist_ok=True)
AutoModelForCausalLM.register(RemanenceConfig, RemanenceForCausalLM, exist_ok=True)
