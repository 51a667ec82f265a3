"""The configuration of a training run: model, data and optimizer. It is immutable, validated and saved with
the run.

This module does not import torch.
"""

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
        lr: the peak learning rate.
        betas, eps, weight_decay: the settings of AdamW. Weight decay applies to matrices only, never to
            gains, biases or the learned initial state of a memory.
        clip: the norm to which larger gradients are scaled down.
        schedule: the learning rate after the warm-up: "cosine" (decay to the end), "wsd" (constant, then
            linear decay to the end) or "constant".
        warmup: the number of steps in which the learning rate rises from 0 to the peak.
        final: the learning rate of the last step, as a fraction of the peak.
        decay: the length of the decay of "wsd", as a fraction of all steps.
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
        """Return the learning rate of a step, counted from 0, of a run of `steps` steps.

        It depends on nothing else.
        """
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
"""The kinds of block that have no neural memory."""


@accepts_old_names("train")
@dataclass(frozen=True, kw_only=True)
@with_vertical_fields
class TrainConfig:
    """The configuration of one training run.

    Attributes:
        model, optimizer: the configuration of the model and of the optimizer.
        data: where batches come from: the dataclass of a kind of data (`DATA_KINDS`).
        init_from: the folder of a model whose weights the run starts from. The configuration of that model is
            used instead of `model`. If it is a memory attached to a pretrained model, only the new parameters
            are trained.
        windows: attention windows, in tokens, for a model attached to a pretrained one. They are used one
            after the other in equal parts of the first half of the run; the second half uses the model's own
            window. Decreasing windows wider than the model's own narrow its attention step by step; narrower
            ones force the model to use its memory from the first step, and a kNN store then begins at the
            narrower window. Empty: the model's own window in all steps.
        steps, batch: the number of optimizer steps, and the number of rows of a step (over all accumulated
            parts and processes).
        accumulate: the number of parts into which a step's rows are split. Gradients are summed over the
            parts.
        carry: whether rows carry their memory from step to step, without gradient between steps. Only for
            kinds of data whose rows continue from step to step.
        initial_state: the memory of a row when a document begins: "fresh" (the learned state), "neighbor"
            (the memory of the neighbouring row after the previous step) or "noise" (normal random numbers of
            the same magnitude as memories have after a step).
        initial_state_share: the fraction of the documents that `initial_state` applies to; the others begin
            fresh.
        write_cost: a penalty on writing to the memory, in nats. The loss gets this factor times the mean over
            tokens of log(s / threshold), where s is the step gate; tokens with s below
            ``model.memory.threshold`` count as 0. The factor is 0 in the first half of the run and grows
            linearly in the second half, when the memory is already useful and learns to write only the tokens
            that it needs.
        precision: "float32", or "bfloat16" by autocast; parameters and memories stay float32.
        checkpointing: recompute activations in the backward pass, which needs less memory.
        compile: apply torch.compile to the feed-forward networks.
        graph: whether the forward and backward pass of a step are captured as a CUDA graph and replayed.
            None: if possible, and if enough GPU memory stays free; see docs/training.md.
        seed: the seed of the initial weights and of the batches.
        validate_every: the number of steps between two validations, on ``data.held_out`` or the part that the
            kind of data holds out. The resulting model is the one with the lowest validation loss. 0: no
            validation, and the resulting model is that of the last step.
        stop_after: the run ends after this many validations in a row without a lower loss. 0: never.
        save_every, keep: the number of steps between checkpoints, and how many of the latest checkpoints are
            kept.
        log_every: the number of steps between lines of the log.
        trackers: destinations of the metrics in addition to metrics.jsonl: "tensorboard", "wandb".
        prompt, sample_tokens: the prompt and the number of tokens of the sample that the run writes on
            SIGUSR1.
        patience: the run stops after this many steps in a row with a non-finite loss or gradient; they are
            skipped.
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
        """Raise an error for settings that apply only to other kinds of data, or that this kind does not
        support.
        """
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
        """Return the attention window of a step, counted from 0.

        `own` is the model's own window, used at the end.
        """
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
    """Return a copy with fields changed.

    Names are dotted and values are text: ``{"optimizer.lr": "3e-4"}``.
    """
    of_data, others = split_prefix(changes.items(), "data.")
    renamed = current_fields("train", dict(others))
    changes = {name: current_value(f"train.{name}", value, warn=False) for name, value in renamed.items()}
    data = apply_overrides(config, changes)
    data["data"] = config.data.override(of_data)
    if "model.dim" in changes and "model.memory.dim" not in changes:
        del data["model"]["memory"]["dim"]  # by default it is derived from model.dim
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
    """Build nested dataclasses from plain data.

    An unknown field is an error that suggests the nearest name.
    """
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
