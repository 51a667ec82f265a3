"""Ablations of the memory, and memories of other depths: a grid of models trained from one recipe, and compared."""

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
"""Kinds of data that lie in files: held-out ones are other files."""
NOTE = "table 5, 400M on text: for the order alone"
"""What stands above the paper's perplexities, whose models and texts are others."""

PARTS: dict[str, dict[str, Any]] = {
    "base": {},
    "linear": {"memory": {"net": "linear", "depth": None}},
    "no_conv": {"memory": {"conv": 0}},
    "no_momentum": {"memory": {"rule": "no_momentum"}},
    "no_forget": {"memory": {"rule": "no_forget"}},
    "no_persistent": {"persistent": 0},
}
"""Table 5's rows, as changes to the recipe's model."""
DEEP_ABLATIONS: dict[str, dict[str, Any]] = {"linear": {"depth": 1}, "no_forget": {"rule": "delta"}}
"""The same of a memory of the net "deep"."""
DEPTHS: dict[str, dict[str, Any]] = {str(depth): {"memory": {"depth": depth}} for depth in range(1, 5)}


@dataclass(frozen=True, kw_only=True)
class GridSettings:
    """
    Attributes:
        variants: which of the grid's models. Default: all that differ from the first.
        seeds: each model is trained with every one of them.
        lengths: tokens of the held-out rows. Default: the recipe's own length.
        batches: of held-out rows, each as large as in training.
        data: held-out shards, where the recipe reads shards (`remanence data prepare`).
        steps: of training, instead of the recipe's.
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
    """Perplexity and accuracy on held-out rows, mean and deviation over seeds. Runs stay, and go on if interrupted."""

    Settings = GridSettings
    needs = "recipe"
    changes: ClassVar[dict[str, dict[str, Any]]]
    published: ClassVar[dict[str, float]] = {}

    def __init__(self, subject: Subject, settings: GridSettings) -> None:
        super().__init__(subject, settings)
        if subject.recipe is None or subject.folder is None:
            raise ValueError(
                f"{self.name}: expected --json OUT, beside which the trained models are kept, got none"
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
        for length in self.lengths:  # a length that the task cannot have is known now
            self._rows(length, 0)

    def _differs(self, name: str) -> bool:
        """Taking away persistent tokens, or momentum, that a model has not is no variant."""
        if name == "no_momentum":
            return RULES[self.recipe.model.memory.rule].momentum
        return name != "no_persistent" or parameters(self._model(name)) != parameters(self.recipe.model)

    def _model(self, name: str) -> ModelConfig:
        """The recipe's model with a variant's changes and no other: not those that another net would bring along."""
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
        """A variant's run."""
        config = replace(self.recipe, model=self._model(name), seed=seed, device=self.subject.device.type)
        data = config.data
        if isinstance(data, CorpusData) and data.path is not None:
            config = replace(config, data=replace(data, path=str(Path(data.path).resolve())))
        return replace(config, steps=self.settings.steps or config.steps)

    def measure(self, units: list[Setting]) -> list[Result]:
        return [self._measured(self._trained(unit["variant"], unit["trained"])) for unit in units]

    def _trained(self, name: str, seed: int) -> Model:
        """A variant's model, trained now, or on from where an earlier evaluation left it, or ready."""
        config, out = self.config(name, seed), self.folder / f"{self.name}-{name}-{seed}"
        begun = (out / "config.json").is_file()
        if begun and run_config(out) != config:
            raise ValueError(
                f"{out}: expected a run of this recipe, got another's; give --json another name, or remove it"
            )
        if not (out / "model" / "config.json").is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            tokens, steps = config.batch * config.data.length, [0]

            def log(line: Mapping[str, Any]) -> None:
                self.subject.on_tokens((line["step"] - steps[-1]) * tokens)
                steps.append(line["step"])

            fit(None if begun else config, out, resume=begun, log=log)
            if not (out / "model" / "config.json").is_file():
                raise ValueError(f"{out}: its training was stopped and saved; the same command goes on")
        return Model.load(out / "model", device=self.subject.device).eval()

    def _rows(self, length: int, number: int) -> Any:
        """Held-out rows: generated with another seed, or from other shards; the same for every variant.

        Shards are always read packed: each row begins with an empty memory, and can look back at most its length.
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
    def _measured(self, model: Model) -> Result:
        found = {}
        for length in self.lengths:
            loss, right, count = 0.0, 0, 0
            for number in range(self.settings.batches):
                for logits, targets in self._logits(model, self._rows(length, number)):
                    loss += float(F.cross_entropy(logits, targets, reduction="sum"))
                    right, count = right + int((logits.argmax(-1) == targets).sum()), count + targets.numel()
            found[str(length)] = {"loss": loss / count, "right": right / count, "count": count}
        return found

    def _logits(self, model: Model, batch: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and targets of all positions that have one, some at a time; rows are read in pieces."""
        device = self.subject.device
        tokens, wanted = batch.tokens.to(device), batch.targets.to(device)
        mask = None if batch.mask is None else batch.mask.to(device)
        step = max(1, LOGITS // model.config.vocab_size)
        for part, trace in traces(
            model, tokens, mask=mask, offsets=batch.offsets, memory_mode=self.subject.mode
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
        """The mean and the deviation over seeds, then each seed as a detail."""
        setting: Setting = {"variant": name, "length": length}
        perplexities = metric == "perplexity"
        values = [perplexity(each["loss"]) if perplexities else each["right"] for each in by_seed.values()]
        counts = [each["count"] for each in by_seed.values()]
        shown = (
            perplexities and name in self.published and self.recipe.data.kind in SHARDS
        )  # texts, as the paper's
        paper = {NOTE: self.published[name]} if shown else {}
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
            looks = {}
            for pattern, (mode, own) in enumerate(rows.items()):
                for row in [row for row in own if row.metric == metric and not row.detail]:
                    variant = row.setting["variant"]
                    called = f"{self.name} {variant}" if variant.isdecimal() else variant
                    name = called if len(rows) == 1 else f"{called}, memory {mode}"
                    lines.setdefault(name, []).append((row.setting["length"], row.value))
                    looks[name] = (self.variants.index(variant), pattern)
            path = stem.with_name(f"{stem.name}.{self.name}-{metric}.png")
            theirs = self.beside(metric)
            lengths = sorted(
                {*self.lengths, *(int(length) for line in theirs.values() for length, _ in line)}
            )
            ticks = {float(length): format_length(length) for length in lengths}
            title = f"{self.subject.source.stem}: held-out {metric} by length"
            x = "tokens of a row"
            drawn.append(
                curves(path, lines, title=title, x=x, y=metric, published=theirs, ticks=ticks, looks=looks)
            )
        return drawn

    def beside(self, metric: str) -> Mapping[str, Points]:
        """The paper's lines over lengths, if it has them."""
        return {}


class Ablate(Grid):
    name = "ablate"
    changes = PARTS
    published = published.TABLE5  # of an LMM with 400M parameters: for the order, not for the numbers


class Depth(Grid):
    name = "depth"
    changes = DEPTHS

    def beside(self, metric: str) -> Mapping[str, Points]:
        """Figure 7 at the size nearest to ours, for the order. It is of texts: generated tasks are drawn without it."""
        if metric != "perplexity" or self.recipe.data.kind not in SHARDS:
            return {}
        size = published.nearest_figure7(parameters(self.recipe.model))
        lines = published.figure7(size)
        return {
            f"{name}, {size}": line
            for name, line in lines.items()
            if name.removeprefix("depth ") in self.variants
        }
