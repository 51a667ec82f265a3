"""The configuration of a memory that is attached to a pretrained model. This module does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from remanence.attached.sentences.config import ChatFormat, SentenceConfig, sentence_config
from remanence.config import KnnConfig, MemoryConfig, ModelConfig, build
from remanence.io.migrations import accepts_old_names, current_fields
from remanence.runtime.choices import check_choice, short_repr

Kind = Literal["neural", "knn", "sentences"]
"""The kind of memory: a neural memory, a store of past keys and values, or a store of sentences."""
Place = Literal["beside", "front"]
"""The position of a neural memory relative to the attention module: in parallel, or before it."""
PLACES: dict[str, str] = {"beside": "mag", "front": "mal"}
"""For each position of a neural memory, the mixer of native models with the same structure."""


@accepts_old_names("attach")
@dataclass(frozen=True, kw_only=True)
class AttachConfig:
    """The settings of `attach`: ``attach(model, AttachConfig(kind="knn", window=512))``.

    The fields that describe the pretrained model (`base`, `vocab_size`, `dim`, `num_layers`, `heads`) are filled in by
    `attach`, as are `layers`, `attention` and the dimensions of the memory, where they are not given.

    Attributes:
        base: a digest of the weights and the configuration of the pretrained model.
        vocab_size, dim, num_layers: vocabulary size, width and number of layers of the pretrained model.
        heads: sizes of the model's attention: number of query heads, number of key and value heads, width of a head.
        layers: indices of the layers that have a memory, counted from 0.
        every: instead of `layers`: add a neural memory to every `every`-th layer; None: to every eighth. A kNN store is
            added to one layer only, at three quarters of the depth. Not saved, because `layers` is.
        kind: "neural"; "knn" for a store of past keys and values; or "sentences" for a store of sentences, which are
            put into the context before an answer. Both stores need a window.
        place: position of a neural memory: "beside" attention (as in MAG) or in "front" of it (as in MAL). A kNN store
            is always beside attention.
        window: number of tokens that attention sees, including the current one; None: the model's own attention.
        sinks: number of tokens at the start of a text that attention with a window sees in addition.
        attention: the name of the attention module within each layer; None: the name for the model's family.
        segment: number of tokens after which memories are reset in mode "fresh".
        memory, knn, sentences: settings of neural memories (a `MemoryConfig` or a dict of its fields), of stores
            (`KnnConfig`) and of stores of sentences (`SentenceConfig`).
        lora: the rank of LoRA on the attention's projections (needs the extra `lora`); 0: no LoRA.
    """

    base: str = ""
    vocab_size: int = 0
    dim: int = 0
    num_layers: int = 0
    heads: tuple[int, int, int] = (0, 0, 0)
    layers: tuple[int, ...] = ()
    every: int | None = None
    kind: Kind = "neural"
    place: Place = "beside"
    window: int | None = None
    sinks: int = 4
    attention: str | None = None
    segment: int = 512
    memory: MemoryConfig = None  # type: ignore[assignment]  # never None once the model is known: it needs dim
    knn: KnnConfig = None  # type: ignore[assignment]
    sentences: SentenceConfig = None  # type: ignore[assignment]  # never None after __post_init__
    lora: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "heads"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not isinstance(self.knn, KnnConfig):
            object.__setattr__(self, "knn", build(KnnConfig, self.knn or {}))
        if self.num_layers and not isinstance(self.memory, MemoryConfig):
            object.__setattr__(
                self, "memory", build(MemoryConfig, {"dim": self.dim, **_memory_fields(self.memory)})
            )
        object.__setattr__(self, "sentences", sentence_config(self.sentences))
        check_choice("kind", self.kind, get_args(Kind))
        check_choice("place", self.place, PLACES)
        for name, least in (("window", 2), ("sinks", 0), ("segment", 1), ("lora", 0)):
            value = getattr(self, name)
            if not (name == "window" and value is None) and (type(value) is not int or value < least):
                raise ValueError(f"{name}: expected an integer of at least {least}, got {short_repr(value)}")
        if self.kind == "knn" and self.window is None and self.knn.size:
            raise ValueError(
                "window: expected a number of tokens with kind='knn', whose store begins behind it"
            )
        if self.kind == "sentences" and (self.window is None or self.layers or self.lora):
            raise ValueError(
                "kind: expected a window, and neither layers nor lora, with kind='sentences'; its encoded layers are "
                "sentences.layers, the rank of its update is sentences.rank"
            )
        if not self.num_layers:
            _memory_fields(self.memory)
            return
        if self.kind == "sentences":
            return
        if not self.layers or any(type(n) is not int or not 0 <= n < self.num_layers for n in self.layers):
            raise ValueError(
                f"layers: expected some of 0 to {self.num_layers - 1}, got {short_repr(self.layers)}"
            )
        if self.segment % self.memory.chunk:
            raise ValueError(
                f"segment: expected a multiple of the chunk {self.memory.chunk}, got {self.segment}"
            )

    def for_model(
        self,
        base: str,
        attention: str,
        *,
        vocab_size: int,
        dim: int,
        num_layers: int,
        heads: tuple[int, int, int],
        chat_format: ChatFormat | None = None,
    ) -> AttachConfig:
        """A copy completed for a pretrained model: with its digest (`base`), the name of its attention
        modules, its sizes, the indices of the layers that get a memory, and the format of chats, which a store of
        sentences needs.
        """
        every = min(8, num_layers) if self.every is None else self.every
        if type(every) is not int or not 1 <= every <= num_layers:
            raise ValueError(
                f"every: expected a number from 1 to the model's {num_layers} layers, got {every!r}"
            )
        layers, sentences = self.layers, self.sentences
        if self.kind == "sentences":
            sentences = sentences.for_model(num_layers, chat_format)
        elif not layers:
            layers = (
                (round(num_layers * 9 / 12) - 1,)
                if self.kind == "knn"
                else tuple(range(every - 1, num_layers, every))
            )
        memory: Any = self.memory
        if not isinstance(memory, MemoryConfig):
            memory = {**DEFAULT_MEMORY, **_memory_fields(memory)}
        elif memory.dim != dim:
            raise ValueError(f"memory.dim: expected the model's dim={dim}, got {memory.dim}")
        return replace(
            self, base=base, attention=attention, vocab_size=vocab_size, dim=dim, num_layers=num_layers, heads=heads,
            layers=layers, every=None, memory=memory, sentences=sentences,
        )  # fmt: skip

    @property
    def blocks(self) -> tuple[str, ...]:
        """For each layer, the name in `MIXERS` of the native layer with the same structure."""
        plain = "attention" if self.window is None else "window"
        own = "knn" if self.kind == "knn" else PLACES[self.place]
        return tuple(own if layer in self.layers else plain for layer in range(self.num_layers))

    @property
    def slack(self) -> int:
        """Number of tokens by which a state can be rewound with `crop`."""
        return 0 if self.kind == "sentences" else self.memory.chunk - 1

    @property
    def pattern(self) -> tuple[str, ...]:
        """The same as `blocks`, under the name that `ModelConfig` uses."""
        return self.blocks

    def outline(self) -> ModelConfig:
        """The configuration of a native model with the same vocabulary, layers and memories, for code that
        needs a `ModelConfig`.
        """
        return ModelConfig(
            vocab_size=self.vocab_size, dim=self.dim, num_layers=self.num_layers, pattern=self.blocks, heads=1,
            window=self.window or 2048, segment=self.segment, memory=self.memory, knn=self.knn,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON data, without `every`, which `layers` replaces."""
        saved = {**asdict(self), "layers": list(self.layers), "heads": list(self.heads)}
        del saved["every"]
        if self.kind != "sentences":
            del saved["sentences"]
        else:
            saved["sentences"] = json.loads(json.dumps(saved["sentences"]))  # with lists for tuples
        return saved

    @classmethod
    def upgraded(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Saved fields with default values for newer ones. Data that is no configuration is returned unchanged."""
        try:
            return cls.from_dict(data).to_dict()
        except (ValueError, TypeError):
            return dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttachConfig:
        """A saved configuration; fields that were renamed since are accepted. Raises a ValueError for unknown
        or missing fields.
        """
        data = current_fields("attach", data)
        for name in data:
            check_choice("AttachConfig field", name, [each.name for each in fields(cls)])
        try:
            found = cls(**data)
        except TypeError as error:
            raise ValueError(f"remanence: expected the fields of AttachConfig ({error})") from None
        for name in ("base", "vocab_size", "dim", "num_layers", "layers", "attention"):
            if not getattr(found, name) and not (name == "layers" and found.kind == "sentences"):
                raise ValueError(f"remanence: expected the fields of AttachConfig (no {name!r})")
        return found


DEFAULT_MEMORY: dict[str, Any] = {
    "heads": 4,
    "head_dim": 128,
    "conv": 8,
    "induction": True,
    "forget_bias": -10.0,
}
"""Defaults of attached neural memories that differ from those of `MemoryConfig`, chosen by experiments on
books and facts (docs/results/attach.md).
"""


def _memory_fields(memory: Any) -> dict[str, Any]:
    """The fields of `memory`, which is a `MemoryConfig`, a mapping, or None for no fields, as a dict."""
    if isinstance(memory, MemoryConfig):
        return asdict(memory)
    if not isinstance(memory, Mapping | None):
        got = short_repr(memory)
        raise ValueError(
            f"memory: expected a MemoryConfig or its fields as a dict, got {got}; kind= chooses the kind"
        )
    return dict(memory or {})
