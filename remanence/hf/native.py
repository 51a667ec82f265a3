"""A model of ours as transformers' configuration, causal language model and cache."""

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
from remanence.folder import AUTO, Auto, describe
from remanence.inference import memfile
from remanence.io.files import unsealed
from remanence.io.migrations import TENSORS
from remanence.io.tensors import aligned
from remanence.model import Model, State, Trace


class FolderConfig(PreTrainedConfig):
    """A configuration whose folder says by itself where Hugging Face finds its classes."""

    auto: ClassVar[Auto]
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """As of every configuration, with the module that its ``auto_map`` names."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        self.auto.write(Path(save_directory))
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: a folder names this package, and needs no copy of its source."""


class RemanenceConfig(FolderConfig):
    """``RemanenceConfig(preset("tiny", "mag"))``: a `ModelConfig` in transformers' clothes.

    The entry ``remanence`` is what counts; the names beside it that transformers looks for (``vocab_size``, ...) follow
    from it. Its digest, where it has one, is checked here and not kept: what transformers writes has none, as the entry
    may be changed in between.
    """

    model_type = "remanence"
    auto = AUTO

    remanence: dict[str, Any] | None = None

    def __init__(self, remanence: ModelConfig | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if remanence is None:
            remanence = preset("tiny")
        if isinstance(remanence, ModelConfig):
            native = remanence
        else:
            native = ModelConfig.from_dict(unsealed("remanence", remanence))
        super().__init__(**{**_transformers_fields(native), **kwargs})
        self.remanence, self.auto_map = native.to_dict(), AUTO.names

    @property
    def native(self) -> ModelConfig:
        """The configuration that the native model is made from."""
        native = ModelConfig.from_dict(self.remanence or {})
        for name, value in _transformers_fields(native).items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name}: expected {value}, as its entry 'remanence' says, got {getattr(self, name)!r}"
                )
        return native


def _transformers_fields(native: ModelConfig) -> dict[str, Any]:
    """What transformers calls a configuration's fields."""
    described = describe(native, torch.float32)
    return {
        name: described[name]
        for name in described
        if name not in ("architectures", "auto_map", "model_type", "dtype", "remanence")
    }


class RemanenceCache(Cache):
    """A `State` where transformers keeps keys and values: each call puts a new one here. Begin from any with its
    constructor.

    Its length counts columns of the batch, padding included, because ``generate`` cuts its inputs by that; how many
    tokens each row has read is ``state.position``.
    """

    def __init__(self, state: State | None = None) -> None:
        super().__init__(layers=[])
        self.state = state
        self.length = 0 if state is None else int(state.position.max())
        # Columns since the last one with padding: as many tokens can be counted back.
        self.unpadded = self.length

    @classmethod
    def from_file(
        cls, path: str | Path, model: RemanenceForCausalLM, *, force: bool = False
    ) -> RemanenceCache:
        """What a memory file holds, to go on from: ``model.generate(prompt, past_key_values=cache)`` reads the prompt
        alone, after all that the memory has read. One document's memory serves every prompt of a batch. `force` accepts
        a memory made with other weights.
        """
        cache = cls(memfile.load(path, model.model, force=force))
        cache.length = cache.unpadded = 0  # what was read is no column of the prompts
        return cache

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.length}, batch_size={self.batch_size})"

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state.blocks)

    def advance(self, state: State, tokens: Tensor, mask: Tensor | None) -> None:
        """Keep the state after a call with these tokens."""
        self.state = state
        self.length += tokens.shape[1]
        whole = tokens.shape[1] if mask is None else int(mask.all(0).flip(0).cumprod(0).sum())
        self.unpadded = whole + (self.unpadded if whole == tokens.shape[1] else 0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length + query_length, 0

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else len(self.state.position)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        """Not anywhere, which is what transformers asks; but see `crop`."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, whose number transformers gives below zero. They must lie in the memories' open
        chunk.
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
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda tensor: tensor.repeat_interleave(repeats, 0))


UNSUPPORTED_ARGUMENTS = {
    "inputs_embeds": "the model reads tokens",
    "position_ids": "tokens are read in the order they stand, counted from the document's start",
    "output_attentions": "attention weights are never laid out",
}


class RemanenceForCausalLM(PreTrainedModel, GenerationMixin):
    """``AutoModelForCausalLM.from_pretrained(folder)``, or ``RemanenceForCausalLM(RemanenceConfig(config))`` for a new
    one.
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
                parameter._is_hf_initialized = True  # by its own constructor
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
        """The native model's logits, and the loss if there are labels.

        Args:
            attention_mask: false at padding, for these tokens or for all that came before them too.
            past_key_values: None at a document's start, then what the call before returned; changed to hold the new
                state.
            labels: the tokens themselves, -100 where they do not count; shifted here.
            use_cache: whether to return a cache; by default not in training, unless one is given.
            logits_to_keep: only those of so many last tokens, 0 for all; or of these places.
            memory_mode: "on", "off", "frozen" or "fresh"; None: ``model.model.memory_mode``. Also of ``generate``.
            kwargs: for the loss, as the Trainer's ``num_items_in_batch``.
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
        if cache.batch_size == 1 < len(input_ids):  # one memory for all prompts, and for every beam
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
            if mask is not None:  # what follows padding is predicted from nothing
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
        """The native model's trace and, if wanted, what went into each layer, with the last one's normalised output."""
        trace = self.model.trace(tokens, state, mask=mask, memory_mode=memory_mode)
        return trace, (*trace.layers, trace.hidden) if every_layer else None

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """``generate`` goes on from the last column, so that every row must end in a token."""
        super()._validate_model_kwargs(model_kwargs)  # type: ignore[misc]
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError(
                "attention_mask: expected padding on the left only (padding_side='left'), got a row that ends in it"
            )

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing, as of the configuration."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *rest: Any
    ) -> None:
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
        """The layer that makes logits; None if they use the input embeddings' weights, as then there is none."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        if self.model.head is None:
            got = type(new_embeddings).__name__
            raise ValueError(f"new_embeddings: expected none, as the logits use the input's (tie), got {got}")
        self.model.head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embed = super().resize_token_embeddings(*args, **kwargs)
        self.config.vocab_size = embed.num_embeddings
        self.config.remanence = {**self.config.remanence, "vocab_size": embed.num_embeddings}
        self.model.config = self.config.native
        table = self.model.log_unigrams
        if table is not None:  # what is new has not been counted: it is as rare as the rarest
            more = table.detach().min().expand(max(0, embed.num_embeddings - len(table)))
            self.model.log_unigrams = nn.Parameter(
                torch.cat([table.detach()[: embed.num_embeddings], more]), requires_grad=False
            )
        return embed

    def _init_weights(self, module: nn.Module) -> None:
        """Rows new in the vocabulary, at the scale of the others' beginning. All else is done by
        `initialize_weights`.
        """
        if isinstance(module, (nn.Embedding, nn.Linear)):
            nn.init.normal_(module.weight, std=self.config.hidden_size**-0.5)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Give every parameter that no constructor and no checkpoint has set the value it has in a new native model."""
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
        """As of every model, but a tensor that is missing, left over or of a wrong shape is an error, never a random
        weight.
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
        for parameter in model.parameters():  # which transformers leaves in the file, too
            # Others, as quantised or sharded ones, see to themselves where they lie.
            if type(parameter.data) is Tensor:
                parameter.data = aligned(parameter.data)
        if model.model.log_unigrams is not None:  # transformers trains all that it loads
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
