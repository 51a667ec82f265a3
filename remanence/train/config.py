"""A training run as data: what to train, on what, and how. Frozen, validated, saved with the run. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from math import cos, pi
from typing import Any, Literal, get_origin, get_type_hints

from remanence.config import FOLLOWS, ModelConfig, preset
from remanence.io.migrations import accepts_old_names, current_fields, current_value, without_absent
from remanence.runtime.choices import check_choice
from remanence.runtime.overrides import apply_overrides, split_prefix
from remanence.train.checks import check_between, check_positive, check_types
from remanence.train.data_config import DATA_KINDS, DataConfig, PackedData
from remanence.verticals import with_vertical_fields


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
        check_types(self)
        check_positive(lr=self.lr, eps=self.eps, clip=self.clip, decay=self.decay)
        check_between(0, 1, final=self.final, decay=self.decay)
        check_between(0, 0.999999, **{f"betas[{i}]": beta for i, beta in enumerate(self.betas)})
        check_between(0, float("inf"), weight_decay=self.weight_decay, warmup=self.warmup)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0: a function, so that a resumed run needs no memory of it."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        decay_start = (
            self.warmup
            if self.schedule == "cosine"
            else max(self.warmup, steps - max(1, round(self.decay * steps)))
        )
        if self.schedule == "constant" or step < decay_start:
            return self.lr
        done = min(1.0, (step - decay_start + 1) / max(1, steps - decay_start))  # 1 at the last step
        left = 0.5 * (1 + cos(pi * done)) if self.schedule == "cosine" else 1 - done
        return self.lr * (self.final + (1 - self.final) * left)


PLAIN = {"attention", "window", "conv_window", "knn"}
"""Blocks without a neural memory."""


@accepts_old_names("train")
@dataclass(frozen=True, kw_only=True)
@with_vertical_fields
class TrainConfig:
    """One run.

    Attributes:
        model, optimizer: see their classes.
        data: where batches come from: the dataclass of a kind of data (`DATA_KINDS`).
        init_from: the folder of a model whose weights the run begins with; its shape counts then, not `model`'s. Of one
            that is attached to a pretrained model, only what is new is trained.
        windows: of an attached model: windows that its attention has, one after the other in equal parts of the run's
            first half; in the second it is the model's own. Wider ones, falling, narrow a model step by step; narrower
            ones have it look into its memory from the first step on. Without, it is its own all the time.
        steps, batch: optimizer steps, and rows of one (of all accumulated parts and processes together).
        accumulate: parts that a step's rows are read in, one after the other.
        carry: whether rows carry their memory from step to step (kinds of data that continue), without gradient between
            steps.
        initial_state: a row's memory when a document begins: "fresh", the learned state; "neighbor", that of the
            neighbouring row after the step before; "noise", normal random numbers as large as memories are after a
            step.
        initial_state_share: the share of the documents that `initial_state` applies to; the others begin fresh.
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
    data: DataConfig = field(default_factory=PackedData)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    init_from: str | None = None
    windows: tuple[int, ...] = ()
    steps: int = 1000
    batch: int = 16
    accumulate: int = 1
    carry: bool = False
    initial_state: Literal["fresh", "neighbor", "noise"] = "fresh"
    initial_state_share: float = 0.5
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
                raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
        check_choice("precision", self.precision, ("float32", "bfloat16"))
        object.__setattr__(self, "initial_state", current_value("train.initial_state", self.initial_state))
        check_choice("initial_state", self.initial_state, ("fresh", "neighbor", "noise"))
        check_types(self)
        check_between(
            0, 2**63 - 1, seed=self.seed, validate_every=self.validate_every, stop_after=self.stop_after
        )
        self._check_kind()
        if any(type(window) is not int or window < 2 for window in self.windows):
            raise ValueError(f"windows: expected numbers of tokens of at least 2, got {self.windows}")
        check_between(0, 1, initial_state_share=self.initial_state_share)
        check_between(0, 1e3, write_cost=self.write_cost)
        if self.write_cost and (self.model.memory.threshold == 0 or set(self.model.blocks) <= PLAIN):
            got = f"threshold={self.model.memory.threshold:g} and {'+'.join(self.model.pattern)}"
            raise ValueError(
                f"write_cost: expected 0, or a neural memory with model.memory.threshold above 0, got {got}"
            )
        if not self.prompt:
            raise ValueError("prompt: expected at least one character, got an empty text")
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate: expected a divisor of batch={self.batch}, got {self.accumulate}")
        if self.carry and not self.data.carries:
            kinds = " or ".join(repr(kind) for kind, data in DATA_KINDS.items() if data.carries)
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
        if self.initial_state != "fresh" and self.data.stages:
            wanted = "'fresh' with data.curriculum, whose steps differ in their rows"
            raise ValueError(f"initial_state: expected {wanted}, got {self.initial_state!r}")
        if self.initial_state != "fresh" and set(self.model.blocks) <= PLAIN:
            expected = f"'fresh', as {self.model.pattern} have no neural memory"
            raise ValueError(f"initial_state: expected {expected}, got {self.initial_state!r}")

    def _check_kind(self) -> None:
        """Refuse what only other kinds of data have, and what this one does not support."""
        data, kind = self.data, self.data.kind
        defaults = {each.name: each.default_factory for each in fields(self)}
        for owner, other in DATA_KINDS.items():
            for name in set(other.train_fields) - set(data.train_fields):
                if getattr(self, name) != defaults[name]():  # type: ignore[operator]
                    raise ValueError(f"{name}: expected only with data.kind={owner!r}, got it with {kind!r}")
        for name, required in data.required.items():
            if (value := getattr(self, name)) != required:
                raise ValueError(f"{name}: expected {required!r} with data.kind={kind!r}, got {value!r}")
        if self.stop_after and not self.validate_every:
            raise ValueError("stop_after: expected 0, or validate_every above 0, got neither")
        if getattr(data, "held_out", None) is not None and not self.validate_every:
            raise ValueError("data.held_out: expected validate_every above 0 beside it, got 0")

    def window_at(self, step: int, own: int | None) -> int | None:
        """The window of a step, counted from 0, of a model whose own it is in the end."""
        part = 2 * step * len(self.windows) // self.steps
        return self.windows[part] if part < len(self.windows) else own

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "model": self.model.to_dict(), "data": self.data.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> TrainConfig:
        present = without_absent("train", current_fields("train", data), [each.name for each in fields(cls)])
        if "initial_state" in present:
            present["initial_state"] = current_value(
                "train.initial_state", present["initial_state"], warn=False
            )
        return _build(cls, present)


def override(config: TrainConfig, changes: Mapping[str, str]) -> TrainConfig:
    """A copy with dotted fields changed, given as text: ``{"optimizer.lr": "3e-4", "model.memory.chunk": "64"}``."""
    of_data, others = split_prefix(changes.items(), "data.")
    renamed = current_fields("train", dict(others))
    changes = {name: current_value(f"train.{name}", value, warn=False) for name, value in renamed.items()}
    data = apply_overrides(config, changes)
    data["data"] = config.data.override(of_data)
    if "model.dim" in changes and "model.memory.dim" not in changes:
        del data["model"]["memory"]["dim"]  # it follows the model's
    if changes.get("model.memory.net", config.model.memory.net) != config.model.memory.net:
        given = {dotted.removeprefix("model.memory.") for dotted in changes}
        data["model"]["memory"].update(dict.fromkeys(name for name in FOLLOWS if name not in given))
    for name in changes:
        if name.startswith("model.") and data["init_from"] is not None:
            raise ValueError(
                f"{name}: expected no change of the model beside init_from={data['init_from']}, whose configuration "
                "is used; --init_from=none trains a new model"
            )
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
