"""A training run as data: what to train, on what, and how. Frozen, validated, saved with the run. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from itertools import pairwise
from math import cos, isfinite, pi
from typing import Any, Literal, get_args, get_origin, get_type_hints

from remanence.config import FOLLOWS, ModelConfig, preset
from remanence.io.migrations import accepts_old_names, current_fields, without_absent
from remanence.runtime.choices import check_choice
from remanence.runtime.overrides import apply_overrides
from remanence.verticals import Kind, check_vertical_fields, kinds, with_vertical_fields


def _check(config: Any) -> None:
    """Check every field against its annotation, which a file or a caller may have ignored."""
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if not _fits(kind, value):
            raise ValueError(f"{name}: expected {_describe(kind)}, got {value!r}")


def _fits(kind: Any, value: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1:] == (...,) and isinstance(value, tuple) else inner
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, kinds, value))
    if origin is not None:  # one of several
        return any(_fits(option, value) for option in inner)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        return (
            f"several, each {_describe(inner[0])}"
            if inner[-1] is ...
            else f"{len(inner)}, each {_describe(inner[0])}"
        )
    if get_origin(kind) is not None:
        return " or ".join(_describe(option) for option in get_args(kind))
    names = {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "a text",
        type(None): "none",
    }
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def _between(low: float, high: float, **values: float) -> None:
    for name, value in values.items():
        if not low <= value <= high:
            raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, got {value!r}")


def _positive(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name}: expected a number above 0, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning rate over time.

    Attributes:
        lr: the peak.
        betas, eps, weight_decay: AdamW's; only matrices are decayed, never gains, biases or a memory's beginning.
        clip: the largest norm of the gradient.
        schedule: after the warm-up, "cosine" to the end, "wsd" (constant, then down to the end) or "constant".
        warmup: steps from 0 to the peak.
        final: the last learning rate, as a share of the peak.
        decay: wsd's last part, as a share of all steps.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: int = 50
    final: float = 0.1
    decay: float = 0.2

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, ("cosine", "wsd", "constant"))
        _check(self)
        _positive(lr=self.lr, eps=self.eps, clip=self.clip, decay=self.decay)
        _between(0, 1, final=self.final, decay=self.decay)
        _between(0, 0.999999, **{f"betas[{i}]": beta for i, beta in enumerate(self.betas)})
        _between(0, float("inf"), weight_decay=self.weight_decay, warmup=self.warmup)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0: a function, so that a resumed run needs no memory of it."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        begin = (
            self.warmup
            if self.schedule == "cosine"
            else max(self.warmup, steps - max(1, round(self.decay * steps)))
        )
        if self.schedule == "constant" or step < begin:
            return self.lr
        done = min(1.0, (step - begin + 1) / max(1, steps - begin))  # 1 at the last step
        left = 0.5 * (1 + cos(pi * done)) if self.schedule == "cosine" else 1 - done
        return self.lr * (self.final + (1 - self.final) * left)


KINDS: dict[str, Kind] = {
    "packed": Kind(fields=("path", "held_out")),
    "documents": Kind(fields=("path", "held_out"), carries=True),
    "text": Kind(fields=("path", "held_out"), carries=True),
    "recall": Kind(fields=("pairs", "rounds", "keys", "noise")),
    "needle": Kind(fields=("pairs",)),
    "facts": Kind(fields=("path", "held_out", "weight", "ramp", "ends"), carries=True),
    "told": Kind(fields=("path", "held_out", "pairs", "share", "weight", "curriculum", "ramp"), carries=True),
    "babilong": Kind(fields=("path", "held_out", "books", "tasks", "curriculum")),
    **kinds(),
}
"""What is known of each kind of data."""
KIND_FIELDS = {name: kind.fields for name, kind in KINDS.items()}
"""The fields of each kind of data beside `kind` and `length`. A kind that you add to `SOURCES` may use all fields."""
CARRIED = tuple(name for name, kind in KINDS.items() if kind.carries)
"""Kinds of data whose rows go on from step to step."""


def kind_of(config: TrainConfig) -> Kind:
    """What is known of a run's kind of data; of one that a user has added, that it is one of tokens."""
    return KINDS.get(config.data.kind, Kind())


@dataclass(frozen=True, kw_only=True)
@with_vertical_fields("data")
class DataConfig:
    """Where batches come from. A field that the kind does not have (`KIND_FIELDS`) is refused.

    Attributes:
        kind: an entry of `remanence.train.sources.SOURCES`: "packed" or "documents" (prepared shards), "text" (a text
            as it is, whose end is held out), "recall" or "needle" (generated), "facts" (planted in prepared shards and
            asked for later), "told" (facts told and asked for in conversations, beside the shards' texts), "babilong"
            (stories hidden in books), or a kind of a vertical (`remanence.verticals`): "genome" (FASTA), "dna"
            (sequences with labels), "forecast" (time series).
        path: packed, documents, facts, told: the folder of the shards; text: a file, a folder of them or hf:NAME;
            babilong: bAbI's folder or archive, or hf:NAME; genome: a FASTA file or a folder of them; dna: a table, or a
            folder in GUE's or GenomicBenchmarks' layout.
        held_out: data of the same kind and form as `path` that is not trained on, for ``validate_every``. Of "text" the
            end of `path` is held out without it; kinds without a path generate other rows.
        length: tokens of a row; dna: the most, as rows are no longer than the longest sequence needs.
        pairs: recall: pairs of a row; needle: needles of a row; told: the most facts of a conversation.
        share: told: the share of the rows that are conversations; the others read texts.
        rounds: recall: how often each pair occurs.
        keys, noise: recall: the number of different keys, and of values; the number of noise tokens.
        weight: facts, told, dna: how much a token of the text counts in the loss, beside one of an answer; 0: only
            answers do.
        ramp: facts, told: steps over which the text between facts grows from nothing, and the distances with it.
        ends: facts: whether the token that ends an answer counts as much as the answer. Runs of earlier
            versions, in which it counted as text, are resumed with False.
        books, tasks: babilong: the text around the facts (a file, a folder or hf:NAME), and which of qa1 to qa20.
        curriculum: babilong, told: the lengths of texts, from short to long, each for an equal part of the steps (one
            given twice, for two), 0 for stories alone. Steps then have batch x length tokens, in rows of the part's
            length. Without it, every row has `length` tokens, of babilong one text with one question.
    """

    kind: str = "packed"
    path: str | None = None
    held_out: str | None = None
    length: int = 256
    pairs: int = 8
    rounds: int = 2
    keys: int = 32
    noise: int = 16
    share: float = 0.5
    weight: float = 0.1
    ramp: int = 0
    ends: bool = True
    books: str | None = None
    tasks: tuple[str, ...] = ("qa1", "qa2", "qa3", "qa4", "qa5")
    curriculum: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check(self)
        check_vertical_fields("data", self)
        _positive(length=self.length, pairs=self.pairs, rounds=self.rounds, keys=self.keys, noise=self.noise)
        _between(0, 1, weight=self.weight, share=self.share)
        _between(0, float("inf"), ramp=self.ramp)
        for each in fields(self):
            if not self.has_field(self.kind, each.name) and getattr(self, each.name) != each.default:
                owners = " or ".join(repr(kind) for kind, names in KIND_FIELDS.items() if each.name in names)
                raise ValueError(
                    f"data.{each.name}: expected only with data.kind={owners}, got it with {self.kind!r}"
                )

        for before, after in pairwise((0, *self.curriculum)):
            if after < before or (before and after % before):
                wanted = "rising lengths, each a multiple of the one before"
                raise ValueError(f"data.curriculum: expected {wanted}, got {after} after {before}")

    @staticmethod
    def has_field(kind: str, name: str) -> bool:
        return name in ("kind", "length", *KIND_FIELDS.get(kind, (name,)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DataConfig:
        """From a file. Fields of other kinds, which earlier versions saved as well, are dropped."""
        kind = data.get("kind", cls.kind)
        if kind == "facts":
            data = {"ends": False, **data}  # saved before the field existed
        data = without_absent("data", data, [each.name for each in fields(cls)])
        foreign = {name for names in KIND_FIELDS.values() for name in names if not cls.has_field(kind, name)}
        return _build(cls, {name: value for name, value in data.items() if name not in foreign})


PLAIN = {"attention", "window", "conv_window", "knn"}
"""Blocks without a neural memory."""


@accepts_old_names("train")
@dataclass(frozen=True, kw_only=True)
@with_vertical_fields("train")
class TrainConfig:
    """One run.

    Attributes:
        model, data, optimizer: see their classes.
        init_from: the folder of a model whose weights the run begins with; its shape counts then, not `model`'s. Of one
            that is attached to a pretrained model, only what is new is trained.
        windows: of an attached model: windows that its attention has, one after the other in equal parts of the run's
            first half; in the second it is the model's own. Wider ones, falling, narrow a model step by step; narrower
            ones have it look into its memory from the first step on. Without, it is its own all the time.
        steps, batch: optimizer steps, and rows of one (of all accumulated parts and processes together).
        accumulate: parts that a step's rows are read in, one after the other.
        carry: whether rows carry their memory from step to step (`CARRIED` kinds), without gradient between steps.
        begin: a row's memory when a document begins: "fresh", the learned start; "passed", that of the neighbouring
            row after the step before; "noise", normal random numbers as large as memories are after a step.
        begin_share: the share of the documents that begin so; the others begin fresh.
        write_cost: what writing costs, in nats: it is added to the loss times the mean of log(s / threshold) over the
            tokens whose step gate s is above ``model.memory.threshold``. It grows evenly from 0 over the second half of
            the run, when the memory is of use, which then writes what it needs and passes over the rest.
        precision: "float32", or "bfloat16" by autocast; parameters and memories stay float32.
        checkpointing: recompute activations in backward.
        compile: torch.compile of the feed-forward nets.
        graph: whether a step's forward and backward are captured as a CUDA graph and replayed. None: where that is
            possible and leaves enough of the GPU's memory free; docs/training.md.
        seed: of weights and batches.
        validate_every: steps between two validations, on ``data.held_out`` or what the kind of data holds out; the
            run's model is then the one with the lowest loss in them. 0: never, and the model is the last.
        stop_after: validations in a row without a lower loss after which the run ends. 0: never.
        save_every, keep: steps between checkpoints, and how many of the last ones stay.
        log_every: steps between lines of the log.
        trackers: where metrics go in addition to metrics.jsonl: "tensorboard", "wandb".
        prompt, sample_tokens: of the sample that the run writes on SIGUSR1.
        patience: steps with a non-finite loss or gradient, which are skipped, before the run stops.
        device: "auto", "cpu", "cuda" or "mps".
    """

    model: ModelConfig = field(default_factory=lambda: preset("tiny"))
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    init_from: str | None = None
    windows: tuple[int, ...] = ()
    steps: int = 1000
    batch: int = 16
    accumulate: int = 1
    carry: bool = False
    begin: Literal["fresh", "passed", "noise"] = "fresh"
    begin_share: float = 0.5
    write_cost: float = 0.0
    precision: Literal["float32", "bfloat16"] = "float32"
    checkpointing: bool = False
    compile: bool = False
    graph: bool | None = None
    seed: int = 0
    validate_every: int = 0
    stop_after: int = 0
    save_every: int = 200
    keep: int = 2
    log_every: int = 10
    trackers: tuple[str, ...] = ()
    prompt: str = "The "
    sample_tokens: int = 128
    patience: int = 10
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch",
            "accumulate",
            "save_every",
            "keep",
            "log_every",
            "patience",
            "sample_tokens",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
        check_choice("precision", self.precision, ("float32", "bfloat16"))
        check_choice("begin", self.begin, ("fresh", "passed", "noise"))
        _check(self)
        _between(0, 2**63 - 1, seed=self.seed, validate_every=self.validate_every, stop_after=self.stop_after)
        self._check_kind()
        if any(type(window) is not int or window < 2 for window in self.windows):
            raise ValueError(f"windows: expected numbers of tokens of at least 2, got {self.windows}")
        _between(0, 1, begin_share=self.begin_share)
        _between(0, 1e3, write_cost=self.write_cost)
        if self.write_cost and (self.model.memory.threshold == 0 or set(self.model.blocks) <= PLAIN):
            got = f"threshold={self.model.memory.threshold:g} and {'+'.join(self.model.pattern)}"
            raise ValueError(
                f"write_cost: expected 0, or a neural memory with model.memory.threshold above 0, got {got}"
            )
        if not self.prompt:
            raise ValueError("prompt: expected at least one character, got an empty text")
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate: expected a divisor of batch={self.batch}, got {self.accumulate}")
        if self.carry and self.data.kind not in CARRIED:
            kinds = " or ".join(map(repr, CARRIED))
            raise ValueError(
                f"carry: expected data.kind={kinds}, whose rows continue from step to step, got {self.data.kind!r}; "
                "--carry=false carries nothing"
            )
        if self.carry and self.accumulate > 1:
            raise ValueError(
                f"accumulate: expected 1 with carry=true, as each row carries its memory to the next step, got "
                f"{self.accumulate}; --batch={max(1, self.batch // self.accumulate)} --accumulate=1 reads as few rows "
                "at once"
            )
        if self.carry and "attention" in self.model.blocks:
            raise ValueError(
                "carry: expected blocks of constant size, got full attention, which would keep all it has read"
            )
        if self.begin != "fresh" and self.data.curriculum:
            wanted = "'fresh' with data.curriculum, whose steps differ in their rows"
            raise ValueError(f"begin: expected {wanted}, got {self.begin!r}")
        if self.begin != "fresh" and set(self.model.blocks) <= PLAIN:
            raise ValueError(
                f"begin: expected 'fresh', as {self.model.pattern} have no neural memory, got {self.begin!r}"
            )

    def _check_kind(self) -> None:
        """Refuse what only other kinds of data have, and what this one does not support."""
        check_vertical_fields("train", self)
        own, kind = kind_of(self), self.data.kind
        defaults = {each.name: each.default_factory for each in fields(self)}
        for owner, other in KINDS.items():
            for name in set(other.sections) - set(own.sections):
                if getattr(self, name) != defaults[name]():  # type: ignore[operator]
                    raise ValueError(f"{name}: expected only with data.kind={owner!r}, got it with {kind!r}")
        for name, fixed in own.fixed.items():
            if (value := getattr(self, name)) != fixed:
                raise ValueError(f"{name}: expected {fixed!r} with data.kind={kind!r}, got {value!r}")
        if self.stop_after and not self.validate_every:
            raise ValueError("stop_after: expected 0, or validate_every above 0, got neither")
        if self.data.held_out is not None and not self.validate_every:
            raise ValueError("data.held_out: expected validate_every above 0 beside it, got 0")

    def window_at(self, step: int, own: int | None) -> int | None:
        """The window of a step, counted from 0, of a model whose own it is in the end."""
        part = 2 * step * len(self.windows) // self.steps
        return self.windows[part] if part < len(self.windows) else own

    def to_dict(self) -> dict[str, Any]:
        plain = {**asdict(self), "model": self.model.to_dict()}
        if self.data.kind != "facts" or not self.data.ends:
            del plain["data"]["ends"]  # the config of a run of an earlier version stays as it was
        if self.data.held_out is None:
            del plain["data"]["held_out"]
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainConfig:
        present = without_absent("train", current_fields("train", data), [each.name for each in fields(cls)])
        return _build(cls, present)


def override(config: TrainConfig, changes: Mapping[str, str]) -> TrainConfig:
    """A copy with dotted fields changed, given as text: ``{"optimizer.lr": "3e-4", "model.memory.chunk": "64"}``."""
    changes = current_fields("train", changes)
    data = apply_overrides(config, changes)
    data["data"].setdefault("ends", config.data.ends)  # to_dict leaves it out for other kinds
    data["data"].setdefault("held_out", None)
    for dotted in changes:
        if dotted.startswith("data."):
            # Refuse a given field of another kind; what the recipe has for another kind is dropped by from_dict.
            name = dotted.removeprefix("data.")
            _build(DataConfig, {"kind": data["data"]["kind"], name: data["data"][name]})
    if "model.dim" in changes and "model.memory.dim" not in changes:
        del data["model"]["memory"]["dim"]  # it follows the model's
    if changes.get("model.memory.net", config.model.memory.net) != config.model.memory.net:
        given = {dotted.removeprefix("model.memory.") for dotted in changes}
        data["model"]["memory"].update(dict.fromkeys(name for name in FOLLOWS if name not in given))
    return TrainConfig.from_dict(data)


def _build(cls: Any, data: Mapping[str, Any]) -> Any:
    """Nested dataclasses from plain data; an unknown field is refused, with the nearest name."""
    if cls is ModelConfig:
        return ModelConfig.from_dict(data)
    hints = get_type_hints(cls)
    given = {}
    for name, value in data.items():
        check_choice(f"{cls.__name__} field", name, [each.name for each in fields(cls)])
        hint = hints[name]
        if is_dataclass(hint) and isinstance(value, Mapping):
            value = DataConfig.from_dict(value) if hint is DataConfig else _build(hint, value)
        elif get_origin(hint) is tuple and isinstance(value, list):
            value = tuple(value)
        given[name] = value
    return cls(**given)
