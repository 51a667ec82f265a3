"""What is attached to a pretrained model, as frozen data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from remanence.config import KnnConfig, MemoryConfig, ModelConfig, build
from remanence.runtime.choices import brief, check_choice

Kind = Literal["neural", "knn"]
Place = Literal["beside", "front"]
PLACES: dict[str, str] = {"beside": "mag", "front": "mal"}
"""Where a neural memory stands, and the variant of Titans that does the same."""


@dataclass(frozen=True, kw_only=True)
class AttachConfig:
    """What was attached to which model.

    Attributes:
        base: a digest of the pretrained model: its weights, and its configuration.
        vocabulary, dim, depth: of that model.
        heads: of its attention: queries, keys and values, and the width of each.
        layers: the layers with a memory, counted from 0.
        kind: "neural", or "knn" for a store of past keys and values.
        place: "beside" attention (as in MAG) or in "front" of it (as in MAL). A store is always beside.
        window: tokens that attention sees, the current one included; None: all, as the model was made.
        sinks: of a window: the first tokens of a text, which attention goes on to see.
        attention: the name of an attention module in its layer.
        segment: a memory's life in mode "fresh", in tokens.
        memory, knn: the neural memories and the stores.
        lora: the rank of the changes to the attention's own projections; 0: none.
    """

    base: str
    vocabulary: int
    dim: int
    depth: int
    heads: tuple[int, int, int]
    layers: tuple[int, ...]
    kind: Kind = "neural"
    place: Place = "beside"
    window: int | None = None
    sinks: int = 4
    attention: str = "self_attn"
    segment: int = 512
    memory: MemoryConfig = None  # type: ignore[assignment]  # never None once made: the default needs dim
    knn: KnnConfig = None  # type: ignore[assignment]
    lora: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "heads"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        memory = (
            self.memory if isinstance(self.memory, MemoryConfig) else {"dim": self.dim, **(self.memory or {})}
        )
        knn = self.knn if isinstance(self.knn, KnnConfig) else build(KnnConfig, self.knn or {})
        object.__setattr__(
            self, "memory", memory if isinstance(memory, MemoryConfig) else build(MemoryConfig, memory)
        )
        object.__setattr__(self, "knn", knn)
        check_choice("memory", self.kind, ("neural", "knn"))
        check_choice("place", self.place, PLACES)
        for name, least in (("window", 2), ("sinks", 0), ("segment", 1), ("lora", 0)):
            value = getattr(self, name)
            if not (name == "window" and value is None) and (type(value) is not int or value < least):
                raise ValueError(f"{name}: expected a whole number of at least {least}, got {brief(value)}")
        if not self.layers or any(type(n) is not int or not 0 <= n < self.depth for n in self.layers):
            raise ValueError(
                f"layers: expected some of 0 to {self.depth - 1}, the model's layers, got {brief(self.layers)}"
            )
        if self.kind == "knn" and self.window is None and self.knn.size:
            raise ValueError(
                "window: expected a number of tokens with memory='knn', whose store begins behind it"
            )
        if self.segment % self.memory.chunk:
            raise ValueError(
                f"segment: expected a multiple of the chunk {self.memory.chunk}, got {self.segment}"
            )

    @property
    def blocks(self) -> tuple[str, ...]:
        """What each layer would be called in a model of ours."""
        plain = "attention" if self.window is None else "window"
        own = "knn" if self.kind == "knn" else PLACES[self.place]
        return tuple(own if layer in self.layers else plain for layer in range(self.depth))

    @property
    def pattern(self) -> tuple[str, ...]:
        return self.blocks

    def outline(self) -> ModelConfig:
        """A model of ours with the same vocabulary, layers and memories, for who asks a configuration what it has."""
        return ModelConfig(
            vocabulary=self.vocabulary, dim=self.dim, depth=self.depth, pattern=self.blocks, heads=1,
            window=self.window or 2048, segment=self.segment, memory=self.memory, knn=self.knn,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "layers": list(self.layers), "heads": list(self.heads)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttachConfig:
        for name in data:
            check_choice("AttachConfig field", name, [each.name for each in fields(cls)])
        try:
            return cls(**data)
        except TypeError as error:
            raise ValueError(f"remanence: expected the fields of AttachConfig ({error})") from None
