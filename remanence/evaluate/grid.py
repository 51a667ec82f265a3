"""Ablations and memory depths: train variants of one recipe and evaluate all on the same held-out data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from remanence.config import ModelConfig, change
from remanence.data import Batch
from remanence.evaluate import published
from remanence.evaluate.plots import Points, curves
from remanence.evaluate.subject import LOGITS, Subject
from remanence.evaluate.task import Result, Row, Setting, Task, check_minimum, perplexity
from remanence.inference.reader import traces
from remanence.model import Model, parameters
from remanence.ops import RULES
from remanence.runtime.choices import check_choice
from remanence.runtime.overrides import format_length
from remanence.tasks.draw import HELD_OUT
from remanence.train import SOURCES, CorpusData, PackedData, TrainConfig, fit, run_config

SHARDS = ("packed", "documents")
"""Kinds of data that are read from shards. Their held-out data is another folder of shards."""
PAPER_NOTE = "table 5, 400M on text: for the order alone"
"""Column title of the paper's perplexities. They are from other models and texts, so only their order is
comparable.
"""

Changes = dict[str, Any]
"""Fields of a `ModelConfig` and their new values."""

ABLATIONS: dict[str, Changes] = {
    "base": {},
    "linear": {"memory": {"net": "linear", "depth": None}},
    "no_conv": {"memory": {"conv": 0}},
    "no_momentum": {"memory": {"rule": "no_momentum"}},
    "no_forget": {"memory": {"rule": "no_forget"}},
    "no_persistent": {"persistent": 0},
}
"""The ablations of Table 5 by name, as changes to the recipe's model."""
DEEP_ABLATIONS: dict[str, Changes] = {"linear": {"depth": 1}, "no_forget": {"rule": "delta"}}
"""Changes to the memory that replace those in `ABLATIONS` if the memory has the net "deep"."""
DEPTHS: dict[str, Changes] = {str(depth): {"memory": {"depth": depth}} for depth in range(1, 5)}
"""The memory depths of Figure 7 by name, as changes to the recipe's model."""


@dataclass(frozen=True, kw_only=True)
class GridSettings:
    """Settings of the ablation and depth evaluations.

    Attributes:
        variants: names of the variants. Default: all except ablations of parts that the recipe's model lacks.
        seeds: training seeds; each variant is trained with every seed.
        lengths: numbers of tokens in each held-out row. Default: the length of the recipe.
        batches: number of held-out batches. The batch size is that of training, per accumulation step.
        data: folder of held-out shards, if the recipe reads shards (`remanence data prepare`).
        steps: number of training steps. Default: the steps of the recipe.
    """

    variants: tuple[str, ...] | None = None
    seeds: tuple[int, ...] = (0,)
    lengths: tuple[int, ...] | None = None
    batches: int = 8
    data: str | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        check_minimum(0, seeds=self.seeds)
        check_minimum(1, lengths=self.lengths, batches=self.batches, steps=self.steps)


class Grid(Task):
    """Held-out perplexity and accuracy of each variant: mean and standard deviation over seeds.

    Interrupted training runs are resumed.
    """

    Settings = GridSettings
    needs = "recipe"
    changes: ClassVar[dict[str, Changes]]
    """The variants by name, as changes to the recipe's model."""
    published: ClassVar[dict[str, float]] = {}
    """Published perplexity by variant."""

    def __init__(self, subject: Subject, settings: GridSettings) -> None:
        super().__init__(subject, settings)
        if subject.recipe is None or subject.folder is None:
            raise ValueError(
                f"{self.name}: expected --json OUT, next to which the trained models are saved, got none"
            )
        self.recipe: TrainConfig = subject.recipe
        self.folder: Path = subject.folder
        kind = self.recipe.data.kind
        check_choice("data.kind", kind, SOURCES)
        if kind in SHARDS and settings.data is None:
            hint = f"--{self.name}.data=FOLDER, made by `remanence data prepare` from other texts than the training's"
            raise ValueError(f"{self.name}.data: expected held-out shards, got none; {hint}")
        if kind in SHARDS and getattr(self.recipe.data, "path", None) is None:
            hint = "--recipe.data.path=FOLDER, made by `remanence data prepare`"
            raise ValueError(
                f"{self.name}: expected a recipe that names the shards to train on, got none; {hint}"
            )
        with torch.device("meta"):
            if not Model(self.recipe.model).has_memory:
                raise ValueError(
                    f"{self.name}: expected a recipe whose model has a memory, got {self.recipe.model.pattern}"
                )
        for name in settings.variants or ():
            check_choice(f"{self.name}.variants", name, self.changes)
        self.variants = settings.variants or tuple(name for name in self.changes if self._differs(name))
        self.lengths = settings.lengths or (self.recipe.data.length,)
        for length in self.lengths:  # raises an error now if the data does not support a length
            self._held_out_batch(length, 0)

    def _differs(self, name: str) -> bool:
        """Whether a variant differs from the recipe's model, which may already lack persistent tokens or
        momentum.
        """
        if name == "no_momentum":
            return RULES[self.recipe.model.memory.rule].momentum
        return name != "no_persistent" or parameters(self._model(name)) != parameters(self.recipe.model)

    def _model(self, name: str) -> ModelConfig:
        """Return the model config of a variant: the recipe's model with only the variant's changes."""
        model, changes = self.recipe.model, self.changes[name]
        own = DEEP_ABLATIONS.get(name) if model.memory.net == "deep" else None
        memory = replace(model.memory, **(own or changes.get("memory", {})))
        return change(model, {**changes, "memory": memory})

    @property
    def identity(self) -> Setting:
        own = {
            "batches": self.settings.batches,
            "steps": self.settings.steps or self.recipe.steps,
            "data": self.settings.data,
        }
        return {**super().identity, **own}

    def units(self) -> list[list[Setting]]:
        return [
            [{"variant": name, "trained": seed, "lengths": list(self.lengths)}]
            for seed in self.settings.seeds
            for name in self.variants
        ]

    def cost(self, unit: Setting) -> int:
        return (self.settings.steps or self.recipe.steps) * self.recipe.batch * self.recipe.data.length

    def config(self, name: str, seed: int) -> TrainConfig:
        """Return the training config of a variant."""
        config = replace(self.recipe, model=self._model(name), seed=seed, device=self.subject.device.type)
        data = config.data
        if isinstance(data, CorpusData) and data.path is not None:
            config = replace(config, data=replace(data, path=str(Path(data.path).resolve())))
        return replace(config, steps=self.settings.steps or config.steps)

    def measure(self, units: list[Setting]) -> list[Result]:
        return [self._measure(self._train_or_load(unit["variant"], unit["trained"])) for unit in units]

    def _train_or_load(self, name: str, seed: int) -> Model:
        """Return the trained model of a variant. A finished run is loaded; otherwise it is trained or
        resumed.
        """
        config, out = self.config(name, seed), self.folder / f"{self.name}-{name}-{seed}"
        resume = (out / "config.json").is_file()
        if resume and run_config(out) != config:
            raise ValueError(
                f"{out}: expected a run of this recipe, got another run; choose another --json name, or remove it"
            )
        if not (out / "model" / "config.json").is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            tokens, steps = config.batch * config.data.length, [0]

            def log(line: Mapping[str, Any]) -> None:
                self.subject.on_tokens((line["step"] - steps[-1]) * tokens)
                steps.append(line["step"])

            fit(None if resume else config, out, resume=resume, log=log)
            if not (out / "model" / "config.json").is_file():
                raise ValueError(f"{out}: training was stopped and saved; run the same command to resume")
        return Model.load(out / "model", device=self.subject.device).eval()

    def _held_out_batch(self, length: int, number: int) -> Batch:
        """Return a held-out batch, generated with another seed or read from the held-out shards.

        It is the same for every variant. Shards are always read packed: each row starts with an empty memory,
        so its context is at most its length.
        """
        data = self.recipe.data
        if data.kind in SHARDS:
            data = PackedData(path=self.settings.data, length=length)
        elif isinstance(data, CorpusData):
            data = replace(data, path=self.settings.data, length=length)
        else:
            data = replace(data, length=length)
        config = replace(self.recipe, data=data, seed=self.subject.seed + HELD_OUT, carry=False)
        return SOURCES[data.kind](config, self.recipe.batch // self.recipe.accumulate, 0, 1).step(number)

    @torch.no_grad()
    def _measure(self, model: Model) -> Result:
        """Return the mean loss in nats, the accuracy and the number of targets, for each length."""
        found = {}
        for length in self.lengths:
            loss, right, count = 0.0, 0, 0
            for number in range(self.settings.batches):
                for logits, targets in self._logits_and_targets(model, self._held_out_batch(length, number)):
                    loss += float(F.cross_entropy(logits, targets, reduction="sum"))
                    right, count = right + int((logits.argmax(-1) == targets).sum()), count + targets.numel()
            found[str(length)] = {"loss": loss / count, "right": right / count, "count": count}
        return found

    def _logits_and_targets(self, model: Model, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits ``[n vocabulary]`` and targets ``[n]`` of the positions that have a target, at most
        `LOGITS` logits at a time.
        """
        device = self.subject.device
        tokens, wanted = batch.tokens.to(device), batch.targets.to(device)
        mask = None if batch.mask is None else batch.mask.to(device)
        step = max(1, LOGITS // model.config.vocab_size)
        for part, trace in traces(
            model, tokens, mask=mask, offsets=batch.offsets, memory_mode=self.subject.memory_mode
        ):
            chosen = wanted[:, part] >= 0
            hidden, targets = trace.hidden[chosen], wanted[:, part][chosen]
            for at in range(0, len(targets), step):
                yield model.logits(hidden[at : at + step]).float(), targets[at : at + step]

    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        rows = []
        for metric in ("perplexity", "accuracy"):
            for length in self.lengths:
                for name in self.variants:
                    own = [(unit, result) for unit, result in results if unit["variant"] == name]
                    by_seed = {unit["trained"]: result[str(length)] for unit, result in own}
                    rows += self._variant_rows(metric, length, name, by_seed)
        return rows

    def _variant_rows(self, metric: str, length: int, name: str, by_seed: Mapping[int, Result]) -> list[Row]:
        """Return the rows of one variant: mean and deviation over seeds, then each seed as a detail row."""
        setting: Setting = {"variant": name, "length": length}
        perplexities = metric == "perplexity"
        values = [perplexity(each["loss"]) if perplexities else each["right"] for each in by_seed.values()]
        counts = [each["count"] for each in by_seed.values()]
        shown = (
            perplexities and name in self.published and self.recipe.data.kind in SHARDS
        )  # text data, as in the paper
        paper = {PAPER_NOTE: self.published[name]} if shown else {}
        spread = stdev(values) if len(values) > 1 and all(map(isfinite, values)) else None
        summary = {**setting, "seeds": len(values), **paper}
        return [
            self.row(metric, mean(values), summary, count=counts[0], deviation=spread),
            *(
                self.row(metric, value, {**setting, "trained": seed}, count=count, detail=True)
                for seed, value, count in zip(by_seed, values, counts, strict=True)
            ),
        ]

    def plots(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        if len(self.lengths) < 2:
            return []
        drawn = []
        for metric in ("perplexity", "accuracy"):
            lines: dict[str, list[tuple[float, float]]] = {}
            styles = {}
            for pattern, (mode, own) in enumerate(rows.items()):
                for row in [row for row in own if row.metric == metric and not row.detail]:
                    variant = row.setting["variant"]
                    label = f"{self.name} {variant}" if variant.isdecimal() else variant
                    name = label if len(rows) == 1 else f"{label}, memory {mode}"
                    lines.setdefault(name, []).append((row.setting["length"], row.value))
                    styles[name] = (self.variants.index(variant), pattern)
            path = stem.with_name(f"{stem.name}.{self.name}-{metric}.png")
            theirs = self.published_lines(metric)
            lengths = sorted(
                {*self.lengths, *(int(length) for line in theirs.values() for length, _ in line)}
            )
            ticks = {float(length): format_length(length) for length in lengths}
            title = f"{self.subject.source.stem}: held-out {metric} by length"
            x = "tokens per row"
            drawn.append(
                curves(path, lines, title=title, x=x, y=metric, published=theirs, ticks=ticks, styles=styles)
            )
        return drawn

    def published_lines(self, metric: str) -> Mapping[str, Points]:
        """Return published results by length, to plot next to ours. Empty by default."""
        return {}


class Ablate(Grid):
    """Ablations of the memory, as in Table 5 of the Titans paper."""

    name = "ablate"
    changes = ABLATIONS
    published = published.TABLE5  # an LMM with 400M parameters: compare the order, not the numbers


class Depth(Grid):
    """Memories of depth 1 to 4, as in Figure 7 of the Titans paper."""

    name = "depth"
    changes = DEPTHS

    def published_lines(self, metric: str) -> Mapping[str, Points]:
        """Return the lines of Figure 7 at the nearest model size, or nothing if the data is not text.

        Compare the order of the lines, not the numbers.
        """
        if metric != "perplexity" or self.recipe.data.kind not in SHARDS:
            return {}
        size = published.nearest_figure7(parameters(self.recipe.model))
        lines = published.figure7(size)
        return {
            f"{name}, {size}": line
            for name, line in lines.items()
            if name.removeprefix("depth ") in self.variants
        }
