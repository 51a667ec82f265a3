"""Associative recall: accuracy by number of key-value pairs and by distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from remanence.evaluate.plots import curves
from remanence.evaluate.subject import Subject
from remanence.evaluate.task import Result, Row, Setting, Task, check_minimum, share
from remanence.runtime.overrides import format_length
from remanence.tasks.recall import held_out, score, vocabulary


@dataclass(frozen=True, kw_only=True)
class RecallSettings:
    """Settings of associative recall, for models trained with recipes/recall.py or a similar recipe.

    Attributes:
        keys, noise: numbers of different keys (and values) and of noise tokens. Use the same as in training.
        distances: numbers of tokens between a pair and its query, for the curve over distances.
        pairs: number of key-value pairs in the curve over distances.
        capacities: numbers of key-value pairs, for the curve over capacities.
        distance: number of tokens between a pair and its query in the curve over capacities (at least 2 per
            pair).
        texts: number of texts per point of a curve, read as one batch.
    """

    keys: int = 32
    noise: int = 16
    distances: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    pairs: int = 8
    capacities: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    distance: int = 64
    texts: int = 32

    def __post_init__(self) -> None:
        check_minimum(1, **vars(self))
        for name, pairs in (("pairs", self.pairs), ("capacities", max(self.capacities))):
            if pairs > self.keys:
                raise ValueError(
                    f"{name}: expected at most {self.keys} pairs, as many as there are keys, got {pairs}"
                )


class Recall(Task):
    """Associative recall, measured in two forms that query the same memory.

    "mqar" (multi-query associative recall): all keys are queried one after another, each followed by its
    value. "lookup": each key is queried alone. The accuracy of guessing is 1 / `keys`.
    """

    name = "recall"
    Settings = RecallSettings

    def __init__(self, subject: Subject, settings: RecallSettings) -> None:
        super().__init__(subject, settings)
        needed, present = vocabulary(settings.keys, settings.noise), subject.model.config.vocab_size
        if present < needed:
            kinds = f"{needed} tokens with keys={settings.keys} and noise={settings.noise}"
            raise ValueError(
                f"recall.keys: expected at most the model's vocabulary of {present}, got {kinds}"
            )

    @property
    def identity(self) -> Setting:
        return {
            **super().identity,
            "keys": self.settings.keys,
            "noise": self.settings.noise,
            "texts": self.settings.texts,
        }

    def _points(self) -> dict[str, list[Setting]]:
        """Return the settings of all points of each curve, "distance" and "capacity"."""
        s = self.settings
        return {
            "distance": [
                {"pairs": s.pairs, "distance": max(distance, 2 * s.pairs)} for distance in s.distances
            ],
            "capacity": [{"pairs": pairs, "distance": max(s.distance, 2 * pairs)} for pairs in s.capacities],
        }

    def units(self) -> list[list[Setting]]:
        points = [point for curve in self._points().values() for point in curve]
        return [[point] for index, point in enumerate(points) if point not in points[:index]]

    def cost(self, unit: Setting) -> int:
        return int(self.settings.texts * (unit["distance"] + 2 * unit["pairs"]))

    def measure(self, units: list[Setting]) -> list[Result]:
        return [self._measure(**unit) for unit in units]

    def _measure(self, pairs: int, distance: int) -> Result:
        """Count the right answers in texts with this number of pairs and this distance."""
        s = self.settings
        questions = held_out(pairs, distance, s.texts, self.subject.seed, keys=s.keys, noise=s.noise)
        state = self.subject.read(list(questions.text_tokens.numpy().astype(np.int32)))
        all_answers = self.subject.likeliest(questions.pairs, state)
        columns = questions.keys.split(1, dim=1)
        single_answers = [
            self.subject.likeliest(column, state) for column in columns
        ]  # every query reads the same state
        return score(questions, all_answers, single_answers)

    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        found = {(unit["pairs"], unit["distance"]): result for unit, result in results}
        return [
            self.row(metric, **share(result[key], result["count"]), setting={"curve": curve, **point})
            for curve, points in self._points().items()
            for metric, key in (("mqar", "all"), ("lookup", "one"))
            for point in points
            for result in [found[point["pairs"], point["distance"]]]
        ]

    def plots(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        drawn = []
        for curve, axis, name in (
            ("distance", "tokens between a pair and its query", "distance"),
            ("capacity", "pairs", "pairs"),
        ):
            lines, styles = {}, {}
            for colour, (mode, own) in enumerate(rows.items()):
                for pattern, metric in enumerate(("mqar", "lookup")):
                    here = [row for row in own if row.metric == metric and row.setting["curve"] == curve]
                    lines[f"memory {mode}, {metric}"] = [(row.setting[name], 100 * row.value) for row in here]
                    styles[f"memory {mode}, {metric}"] = (colour, pattern)
            fixed = (
                f"{self.settings.pairs} pairs"
                if curve == "distance"
                else f"queried {self.settings.distance} tokens later"
            )
            ticks = {float(x): format_length(int(x)) for line in lines.values() for x, _ in line}
            path = stem.with_name(f"{stem.name}.recall-{curve}.png")
            title = f"Pairs recalled, {fixed}"
            drawn.append(
                curves(
                    path,
                    lines,
                    title=title,
                    x=axis,
                    y="accuracy, %",
                    percent=True,
                    ticks=ticks,
                    styles=styles,
                )
            )
        return drawn
