"""Configurations of models: frozen dataclasses that are validated on creation and saved with every
checkpoint. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from math import gcd, isqrt
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from remanence.io.migrations import accepts_old_names, current_fields, renamed_fields
from remanence.runtime.choices import check_choice, short_repr
from remanence.runtime.field_checks import (
    ABOVE_0,
    LARGE,
    MOST,
    check_integers,
    check_names,
    check_optional_integers,
    is_number,
)
from remanence.runtime.keywords import KnnFields, MemoryFields, show_fields
from remanence.runtime.mode import MODES as MODES
from remanence.runtime.mode import Mode as Mode
from remanence.tokenizers.vocabulary import BYTES

Config = TypeVar("Config", "MemoryConfig", "KnnConfig", "ModelConfig")


def build(cls: type[Config], given: Mapping[str, Any]) -> Config:
    """Create a config from a mapping of field names to values. An unknown name is an error that suggests the
    nearest field.
    """
    if cls is ModelConfig:
        given = renamed_fields("model", given)
    for name in given:
        check_choice(f"{cls.__name__} field", name, [field.name for field in fields(cls)])
    missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in given]
    if missing:
        raise ValueError(f"{missing[0]}: expected a value for this field of {cls.__name__}, got none")
    return cls(**given)


def change(config: Config, given: Mapping[str, Any]) -> Config:
    """Return a copy of a config with some fields changed. An unknown name is an error that suggests the
    nearest field.
    """
    if isinstance(config, ModelConfig):
        given = renamed_fields("model", given)
    for name in given:
        check_choice(f"{type(config).__name__} field", name, [field.name for field in fields(config)])
    if isinstance(config, ModelConfig):
        for part in ("memory", "knn"):
            if isinstance(given.get(part), Mapping):
                given = {**given, part: change(getattr(config, part), given[part])}
    if isinstance(config, MemoryConfig) and given.get("net", config.net) != config.net:
        given = {**dict.fromkeys(FOLLOWS), **given}
    return replace(config, **given)


PAPER: MemoryFields = {"rule": "titans", "chunk": 16, "forget_bias": -10.0}
"""Default field values for every other net, as in the paper."""
DEEP: MemoryFields = {"rule": "gated_delta", "chunk": 64, "forget_bias": -6.0, "step_bias": 0.0}
"""Default field values for `FEATURE_NETS`."""
FEATURE_NETS = ("deep", "sparse", "sparse_random")
"""Nets of which a last matrix is written, at features of the keys."""

FOLLOWS = ("depth", "expansion", "activation", "bias", "rule", "anchor", "chunk", "step_bias", "forget_bias")
"""Fields that are reset to their defaults when `change` selects another net."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The configuration of one neural memory layer.

    The net, the rule and the chunk define the function that the memory computes. The default trained best in
    our measurements (docs/results/dynamics.md): two layers, of which only the last is updated, with token-exact
    gradients. ``net="titans"`` is the
    net of the paper: two layers, expansion 4, GELU, ``x + LN(...)``, momentum, chunk 16.

    Attributes:
        dim: width of the model.
        heads: number of independent memories. Default: the divisor of dim for which head_dim is closest to 128 for
            the nets "deep" and "sparse", else to 64.
        head_dim: width of a head. Default: dim / heads.
        net: name of an entry of `remanence.ops.NETS`.
        depth, expansion, activation, bias: change this field of the net. None: keep the net's own value.
        rule: name of an entry of `remanence.ops.RULES`. Default: "gated_delta" for the nets "deep" and "sparse",
            else "titans".
        anchor: the weights at which the gradient of a token is computed: "token", those just before the token (exact),
            or "chunk", those at the start of its chunk. Default: "token" for a net that is linear in its weights,
            otherwise the default of the rule.
        chunk: number of tokens whose gradients are computed at the same weights; with a token-exact rule, number of
            tokens that are processed together. Default: 64 for the nets "deep" and "sparse", else 16.
        conv: kernel size of the causal depthwise convolution on queries, keys and values; 0: no convolution.
        induction: initialise the key of a token as the query of the previous token. From the first
            training step on, a repeated token then retrieves the token that followed it before. Otherwise queries
            and keys are unrelated at first, and training has to learn both (docs/results/facts.md).
        step_bias, momentum_bias, forget_bias: initial biases of the gates, before the sigmoid. Default of step_bias: a
            step size of about 1 / (10 depth), or 0.5 for the nets "deep" and "sparse"; of forget_bias: -10, or -6 for
            these two.
        threshold: step sizes s become max(0, s - threshold) / (1 - threshold), and the keep factor is raised to that
            power, so that a token with s below the threshold changes nothing. A sigmoid alone is never 0: over a
            million tokens, small steps overwrite the memory.
    """

    dim: int
    heads: int | None = None
    head_dim: int | None = None
    net: str = "deep"
    depth: int | None = None
    expansion: float | None = None
    activation: Literal["gelu", "silu"] | None = None
    bias: bool | None = None
    rule: str = None  # type: ignore[assignment]  # never None after creation: the default depends on the net
    anchor: Literal["chunk", "token"] | None = None
    chunk: int = None  # type: ignore[assignment]
    conv: int = 4
    induction: bool = False
    step_bias: float | None = None
    momentum_bias: float = 0.0
    forget_bias: float = None  # type: ignore[assignment]
    threshold: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (DEEP if self.net in FEATURE_NETS else PAPER).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        check_integers(1, dim=self.dim, chunk=self.chunk)
        check_optional_integers(1, heads=self.heads, head_dim=self.head_dim, depth=self.depth)
        check_integers(0, conv=self.conv)
        check_names(net=self.net, rule=self.rule)
        if self.heads is not None and self.head_dim is None and self.dim % self.heads:
            raise ValueError(
                f"heads: expected a divisor of dim={self.dim}, got {self.heads} (or give head_dim too)"
            )
        if self.anchor not in (None, "chunk", "token"):
            raise ValueError(f"anchor: expected 'chunk', 'token' or None, got {short_repr(self.anchor)}")
        if self.activation not in (None, "gelu", "silu"):
            raise ValueError(
                f"activation: expected 'gelu', 'silu' or None, got {short_repr(self.activation)}"
            )
        if self.bias is not None and not isinstance(self.bias, bool):
            raise ValueError(f"bias: expected True, False or None, got {short_repr(self.bias)}")
        if self.expansion is not None and not is_number(self.expansion, ABOVE_0, MOST):
            raise ValueError(
                f"expansion: expected a number above 0 and at most {MOST:,}, got {short_repr(self.expansion)}"
            )
        for name in ("step_bias", "momentum_bias", "forget_bias"):
            value = getattr(self, name)
            if not (is_number(value, -LARGE, LARGE) or (name == "step_bias" and value is None)):
                raise ValueError(f"{name}: expected a finite number, got {short_repr(value)}")
        if not isinstance(self.induction, bool):
            raise ValueError(f"induction: expected True or False, got {short_repr(self.induction)}")
        if self.induction and self.conv < 2:
            raise ValueError(
                f"induction: expected conv of at least 2, which reaches the token before, got {self.conv}"
            )
        if not (is_number(self.threshold, 0, 1) and self.threshold < 1):
            raise ValueError(f"threshold: expected at least 0 and below 1, got {short_repr(self.threshold)}")

    @property
    def shape(self) -> tuple[int, int]:
        """The number of heads and the width of each head, with defaults filled in."""
        if self.heads is not None:
            return self.heads, self.head_dim or self.dim // self.heads
        if self.head_dim is not None:
            return max(1, self.dim // self.head_dim), self.head_dim
        few = [heads for heads in range(1, isqrt(self.dim) + 1) if self.dim % heads == 0]
        divisors = [*few, *[self.dim // heads for heads in reversed(few)]]
        wanted = 128 if self.net in FEATURE_NETS else 64
        heads = min(divisors, key=lambda heads: abs(self.dim // heads - wanted))
        return heads, self.dim // heads

    @property
    def inner(self) -> int:
        """Total width of all heads: heads * head_dim."""
        heads, width = self.shape
        return heads * width


@dataclass(frozen=True, kw_only=True)
class KnnConfig:
    """The configuration of the stores of a model's kNN layers. docs/paper.md gives the settings of the paper.

    Attributes:
        k: number of retrieved entries per query and head.
        size: capacity of a store in key-value pairs, per document; 0: local window only. The pairs of a whole window
            are added at once, while attention still sees the window, so up to one window of the capacity holds
            pairs that are visible anyway.
        fuse: "gate": a learned gate per head mixes window and store; "joint": one softmax over the window and the
            retrieved entries.
        search: name of an entry of `remanence.memory.search.SEARCHES`: "exact", "dense" (uses all entries),
            "triton", or "ivf" (approximate; extra `knn`).
        write: name of an entry of `remanence.memory.policies.POLICIES`: "all", "rare", "surprise", "random".
        fraction: share of the tokens of a window that a policy other than "all" writes, at least one token.
        neighbours: number of adjacent tokens, on each side, that are written too.
        evict: which entry a full store drops: the "oldest", or the one with the lowest "importance" (see `write`).
        half_life: number of tokens after which importance has halved; None: no decay.
        shared: whether all kNN layers use the store of the first kNN layer.
        store_dtype: "auto": keys and values are stored in the model's dtype; "int8": as int8 with a float32 factor for
            each vector, in about half the memory of bfloat16.
        store_device: "auto": keys and values are on the device of the model; "cpu": in the memory of the host, for
            stores larger than that of a GPU. A search copies them to the GPU in blocks.
    """

    k: int = 32
    size: int = 8192
    fuse: Literal["gate", "joint"] = "gate"
    search: str = "exact"
    write: str = "all"
    fraction: float = 0.1
    neighbours: int = 0
    evict: Literal["oldest", "importance"] = "oldest"
    half_life: float | None = None
    shared: bool = False
    store_dtype: Literal["auto", "int8"] = "auto"
    store_device: Literal["auto", "cpu"] = "auto"

    def __post_init__(self) -> None:
        check_integers(1, **{"knn.k": self.k})
        check_integers(0, **{"knn.size": self.size, "knn.neighbours": self.neighbours})
        if 0 < self.size < self.k:
            raise ValueError(f"knn.k: expected at most the store's size of {self.size}, got {self.k}")
        check_choice("knn.fuse", self.fuse, ("gate", "joint"))
        check_choice("knn.evict", self.evict, ("oldest", "importance"))
        check_choice("knn.store_dtype", self.store_dtype, ("auto", "int8"))
        check_choice("knn.store_device", self.store_device, ("auto", "cpu"))
        check_names(**{"knn.search": self.search, "knn.write": self.write})
        if not is_number(self.fraction, ABOVE_0, 1):
            raise ValueError(f"knn.fraction: expected above 0 and at most 1, got {short_repr(self.fraction)}")
        if self.half_life is not None and not is_number(self.half_life, ABOVE_0, LARGE):
            raise ValueError(
                f"knn.half_life: expected a number of tokens above 0, or None, got {short_repr(self.half_life)}"
            )
        if not isinstance(self.shared, bool):
            raise ValueError(f"knn.shared: expected True or False, got {short_repr(self.shared)}")


@accepts_old_names("model")
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The configuration of a whole model: embedding, layers and output head.

    Attributes:
        vocab_size: number of different tokens.
        dim: width of the residual stream.
        num_layers: number of layers.
        pattern: names of entries of `remanence.mixers.BLOCKS`, repeated to `num_layers`: ("mac",), ("lmm", "window"),
            ...; "lmm+window" is the same.
        heads: number of attention heads. The number of memory heads is set in `memory`.
        ffn: width of the feed-forward layers. Default: 8/3 of dim, rounded up to a multiple of 8.
        window: number of tokens that sliding-window attention sees, including the current one.
        segment: length in tokens of MAC's segments, and the interval at which the memory mode "fresh" resets
            memories; a multiple of the memory's chunk.
        persistent: number of learned tokens that windowed attention always sees in front of the text (eq. 19).
        rotary: base of the rotary position embeddings.
        tie: whether the output head shares the embedding's weights.
        memory: the configuration of the neural memories: a MemoryConfig, or a dict with some of its fields.
        knn: the configuration of the kNN stores: a KnnConfig, or a dict with some of its fields.
    """

    vocab_size: int
    dim: int
    num_layers: int
    pattern: tuple[str, ...] = ("mac",)
    heads: int = 4
    ffn: int | None = None
    window: int = 2048
    segment: int = 512
    persistent: int = 128
    rotary: float = 10_000.0
    tie: bool = True
    memory: MemoryConfig = None  # type: ignore[assignment]  # never None after creation: the default depends on dim
    knn: KnnConfig = KnnConfig()

    def __post_init__(self) -> None:
        check_integers(
            1, vocab_size=self.vocab_size, dim=self.dim, num_layers=self.num_layers, heads=self.heads
        )
        check_optional_integers(1, ffn=self.ffn)
        check_integers(1, window=self.window, segment=self.segment)
        check_integers(0, persistent=self.persistent)
        if self.dim % self.heads or self.dim // self.heads % 2:
            raise ValueError(
                f"heads: expected a divisor of dim={self.dim} that leaves heads of even width, got {self.heads}"
            )
        named = isinstance(self.pattern, (str, tuple, list)) and all(isinstance(x, str) for x in self.pattern)
        pattern = tuple(x for part in _pattern(self.pattern) for x in _pattern(part)) if named else ()
        if not all(pattern) or not pattern:
            expected = "expected names of blocks, as ('mac',), ('lmm', 'window') or 'lmm+window'"
            raise ValueError(f"pattern: {expected}, got {short_repr(self.pattern)}")
        if not is_number(self.rotary, ABOVE_0, LARGE):
            raise ValueError(
                f"rotary: expected a base above 0 and at most {LARGE:.0e}, got {short_repr(self.rotary)}"
            )
        if not isinstance(self.tie, bool):
            raise ValueError(f"tie: expected True or False, got {short_repr(self.tie)}")
        memory = {} if self.memory is None else self.memory
        if isinstance(memory, Mapping):
            own = {"dim": self.dim, **memory}
            if own.get("chunk") is None and own.get("net", "deep") in FEATURE_NETS:
                own["chunk"] = gcd(
                    DEEP["chunk"], self.segment
                )  # token-exact: the chunk does not change the results
            memory = build(MemoryConfig, own)
        if not isinstance(memory, MemoryConfig):
            raise ValueError(
                f"memory: expected a MemoryConfig, or its fields in a dict, got {type(memory).__name__}"
            )
        if memory.dim != self.dim:
            raise ValueError(f"memory.dim: expected the model's dim={self.dim}, got {memory.dim}")
        if self.segment % memory.chunk:
            raise ValueError(
                f"segment: expected a multiple of the memory's chunk ({memory.chunk}), got {self.segment}"
            )
        knn = build(KnnConfig, self.knn) if isinstance(self.knn, Mapping) else self.knn
        if not isinstance(knn, KnnConfig):
            raise ValueError(f"knn: expected a KnnConfig, or its fields in a dict, got {type(knn).__name__}")
        object.__setattr__(self, "knn", knn)
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "memory", memory)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The name of the block in each layer: the pattern, repeated up to `num_layers` entries."""
        return tuple(self.pattern[layer % len(self.pattern)] for layer in range(self.num_layers))

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layers: `ffn` if it is given, otherwise the default."""
        return self.ffn or -(-8 * self.dim // 24) * 8

    def condensed(self) -> tuple[ModelConfig, list[int]]:
        """Return the configuration of a smaller model that has each type of layer at most twice, and for
        every layer of this model the index of a layer with the same shapes in the smaller one. The shapes of
        a deep model can then be checked without building it.
        """
        kinds: list[str] = []
        places: list[int] = []
        again: dict[str, list[int]] = {}
        for name in self.blocks:
            own = again.setdefault(name, [])
            if (
                len(own) < 2
            ):  # the first layer of a type may differ from the others, which can share its store
                own.append(len(kinds))
                kinds.append(name)
            places.append(own[-1])
        return replace(self, num_layers=len(kinds), pattern=tuple(kinds)), places

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as data for a JSON file, which `ModelConfig.from_dict` reads."""
        return {**asdict(self), "pattern": list(self.pattern)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Create a configuration from the data in a JSON file, which an earlier version may have written."""
        return build(cls, current_fields("model", data))


class ModelFields(TypedDict, total=False):
    """The fields of `ModelConfig` as keyword arguments. `memory` and `knn` may also be dicts with some of
    their fields.
    """

    vocab_size: int
    dim: int
    num_layers: int
    pattern: str | tuple[str, ...]
    heads: int
    ffn: int | None
    window: int
    segment: int
    persistent: int
    rotary: float
    tie: bool
    memory: MemoryConfig | MemoryFields
    knn: KnnConfig | KnnFields


# The default window (2048), segment (512) and number of persistent tokens (128) are those of the NeurIPS paper. Its
# table 5 gives the four larger sizes; `tiny` and `small` are our own, for use on a CPU.
_SMALL = {"window": 128, "segment": 128, "persistent": 16}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"dim": 128, "num_layers": 2, "heads": 4, **_SMALL, "memory": {"head_dim": 32}},
    "small": {"dim": 256, "num_layers": 6, "heads": 4, **_SMALL, "memory": {"head_dim": 64}},
    "170m": {"dim": 768, "num_layers": 12, "heads": 16},
    "340m": {"dim": 1024, "num_layers": 24, "heads": 16},
    "760m": {"dim": 1536, "num_layers": 24, "heads": 16},
    "1.3b": {"dim": 2048, "num_layers": 18, "heads": 8},
}
"""The fields of each preset that differ from the defaults of `ModelConfig`, by preset name."""


@show_fields(ModelConfig, default_of="preset", omit=("pattern",))
def preset(name: str, variant: str | tuple[str, ...] = "mac", **changes: Unpack[ModelFields]) -> ModelConfig:
    """Return a configuration by name: ``preset("340m", "mag", window=1024, memory={"chunk": 64})``.

    The variant is the name of an entry of `remanence.mixers.BLOCKS`, a pattern of several names ("mag+knn", or a
    tuple), or "memorizing": sliding-window attention, and one kNN layer three quarters of the way up. The default of
    `vocab_size` is the size of the byte tokenizer for `tiny` and `small`, and 32,000 for the larger sizes.
    """
    check_choice("preset", name, PRESETS)
    own = PRESETS[name]
    given = renamed_fields("model", changes)
    alone = variant in ("memorizing", ("memorizing",))
    pattern = memorizing(given.get("num_layers", own["num_layers"])) if alone else _pattern(variant)
    given = {"vocab_size": BYTES if own["dim"] < 768 else 32_000, "pattern": pattern, **given}
    memory = given.pop("memory", {})
    if isinstance(memory, Mapping):
        memory = {**own.get("memory", {}), **memory}
    return build(ModelConfig, {**own, **given, "memory": memory})


def memorizing(num_layers: int, *layers: int) -> tuple[str, ...]:
    """Return the pattern of a Memorizing Transformer: kNN layers at the given places, counted from 1, and
    sliding-window attention in all other layers. By default there is one kNN layer, three quarters of the way
    up, as in the paper (layer 9 of 12).
    """
    check_integers(1, num_layers=num_layers)
    layers = layers or (round(num_layers * 9 / 12),)
    if not all(isinstance(layer, int) and 1 <= layer <= num_layers for layer in layers):
        raise ValueError(f"layers: expected places from 1 to num_layers={num_layers}, got {layers}")
    return tuple("knn" if place in layers else "window" for place in range(1, num_layers + 1))


def _pattern(variant: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of blocks as a tuple, given as a tuple or as one string joined by +."""
    return tuple(variant.split("+")) if isinstance(variant, str) else tuple(variant)
