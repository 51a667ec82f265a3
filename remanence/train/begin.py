"""What a memory holds where a document begins: the learned start, what another row's memory held, or noise of that size.

A memory trained from its learned start alone knows only what one training length can make of it, and is lost in the states that
longer texts lead to. Rows that begin elsewhere show it such states at no cost in length. Only weights and momentum are taken
over: positions are 0, convolutions and windows empty, as at any document's start, so that nothing of another text can be read but
through the memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from remanence.data import Batch
from remanence.mixers import MACState
from remanence.model import State, memories
from remanence.ops import MemoryState
from remanence.ops.state import Weights
from remanence.train.config import TrainConfig
from remanence.train.distributed import World

SPAN = 100
"""Steps over which the size of memories is averaged: long enough to be steady, short enough to follow training."""


class Begin(Protocol):
    """One way to begin. What it has to know of earlier steps goes into checkpoints: `tensors`, and back by `load`."""

    kind: str

    def begun(self, fresh: State, batch: Batch, number: int, carried: State | None = None) -> State:
        """The state of documents that begin now, some of which begin elsewhere than `fresh` does. `number` is the batch's;
        `carried` what rows that go on from step to step carry into it.
        """
        ...

    def ended(self, state: State, batch: Batch) -> None:
        """Look at the state that a step has left."""
        ...

    def tensors(self) -> dict[str, Tensor]: ...

    def load(self, parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
        """Take up what all processes' `tensors` were, in their order."""
        ...


def begin_of(config: TrainConfig, world: World) -> Begin | None:
    """A config's, for one of its processes; None if every document begins afresh."""
    if config.begin == "fresh":
        return None
    return (Passed if config.begin == "passed" else Noise)(config, world)


class Place(NamedTuple):
    """Of a document in a batch: its row, and whether the row ends with it."""

    row: int
    last: bool


class _Drawn:
    """What both ways share: which documents begin elsewhere."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        self.rows = config.batch // (config.accumulate * world.size)

    def places(self, batch: Batch) -> list[Place]:
        """Of packed rows, several documents may lie in one."""
        if batch.offsets is None:
            return [Place(row, True) for row in range(self.rows)]
        length = batch.tokens.shape[1] // self.rows
        return [Place(start // length, end % length == 0) for start, end in itertools.pairwise(batch.offsets)]

    def ends(self, batch: Batch) -> list[int]:
        """The documents that a row ends with, one for each."""
        return [index for index, place in enumerate(self.places(batch)) if place.last]

    def seeds(self, batch: Batch, number: int) -> list[int | None]:
        """For each document a number if it is to begin elsewhere. As a batch is, they are a function of the seed, the batch's
        number and the row among all processes' rows; drawn beside what the sources draw by the same key.
        """
        found: list[int | None] = []
        for row, inside in itertools.groupby(self.places(batch), lambda place: place.row):
            key, counter = [self.config.seed, number], [0, 0, self.world.rank * self.rows + row, 1]
            chance = np.random.Generator(np.random.Philox(key=key, counter=counter))
            for _ in inside:
                elsewhere, seed = chance.random() < self.config.begin_share, int(chance.integers(2**63))
                found.append(seed if elsewhere else None)
        return found


class Passed(_Drawn):
    """From what the row beside held at the end of the step before: rows 0 and 1 pass their memories to each other, so do 2 and
    3, and so on, and processes have nothing to send. A memory that has diverged is not passed.
    """

    kind = "passed"

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        if self.rows % 2:
            shares = f"batch / (accumulate x processes) = {self.rows}"
            raise ValueError(f"begin: expected an even number of rows, as two pass their memories to each other, got {shares}")
        self.held: list[Weights] = []
        self.diverged = torch.zeros(0, dtype=torch.bool)

    def begun(self, fresh: State, batch: Batch, number: int, carried: State | None = None) -> State:
        held, diverged = self.held, self.diverged
        if carried is not None:
            held, diverged = [memory.layers for memory in memories(carried)], carried.diverged
        if not held:
            return fresh
        device = fresh.position.device
        index = torch.tensor([place.row ^ 1 for place in self.places(batch)], device=device)
        chosen = torch.tensor([seed is not None for seed in self.seeds(batch, number)], device=device) & ~diverged[index]
        return _with(fresh, [tuple(layer[index] for layer in layers) for layers in held], chosen)

    def ended(self, state: State, batch: Batch) -> None:
        if self.config.carry:
            return  # what is carried is what is passed
        ends = self.ends(batch)
        self.held = [tuple(layer.detach()[ends] for layer in memory.layers) for memory in memories(state)]
        self.diverged = state.diverged[ends]

    def tensors(self) -> dict[str, Tensor]:
        named = {f"{i}.{j}": layer for i, layers in enumerate(self.held) for j, layer in enumerate(layers)}
        return {**named, "diverged": self.diverged} if named else {}

    def load(self, parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
        own = slice(self.world.rank * self.rows, (self.world.rank + 1) * self.rows)
        whole = {name: torch.cat([part[name] for part in parts])[own].to(device) for name in parts[0]}
        self.diverged = whole.pop("diverged")
        count = 1 + max(int(name.split(".")[0]) for name in whole)
        self.held = [tuple(whole[f"{i}.{j}"] for j in range(sum(n.startswith(f"{i}.") for n in whole))) for i in range(count)]


class Noise(_Drawn):
    """From normal numbers, whose mean square is, for every weight and momentum of each head, what it was of the memories that the
    last steps have left.
    """

    kind = "noise"

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        self.squares, self.steps = torch.zeros(0, dtype=torch.float64), 0

    def begun(self, fresh: State, batch: Batch, number: int, carried: State | None = None) -> State:
        if not self.steps:
            return fresh
        seeds, device = self.seeds(batch, number), fresh.position.device
        chances = [None if seed is None else torch.Generator(device).manual_seed(seed) for seed in seeds]
        squares = iter(self.squares.split([layer.shape[1] * layer.shape[2] for layer in _layers(fresh)]))
        made: list[Weights] = []
        for memory in memories(fresh):
            layers = []
            for layer in memory.layers:
                scale = next(squares).sqrt().to(device, layer.dtype).view(*layer.shape[1:3], *[1] * (layer.dim() - 3))
                drawn = torch.zeros_like(layer)
                for row, chance in enumerate(chances):
                    if chance is not None:
                        drawn[row] = scale * torch.randn(layer.shape[1:], generator=chance, dtype=layer.dtype, device=device)
                layers.append(drawn)
            made.append(tuple(layers))
        return _with(fresh, made, torch.tensor([seed is not None for seed in seeds], device=device))

    @torch.no_grad()
    def ended(self, state: State, batch: Batch) -> None:
        ends = self.ends(batch)
        good = ~state.diverged[ends]
        sums = [good.sum().float().view(1)]
        for layer in _layers(state):
            squares = layer[ends].float().square().reshape(len(ends), layer.shape[1] * layer.shape[2], -1).mean(-1)
            sums.append(squares.where(good.unsqueeze(-1), 0.0).sum(0))
        rows, *total = self.world.total(*torch.cat(sums).tolist())
        if not rows or not all(map(isfinite, total)):
            return
        self.steps += 1
        now = torch.tensor(total, dtype=torch.float64) / rows
        before = self.squares if self.steps > 1 else now
        self.squares = before + (now - before) / min(self.steps, SPAN)

    def tensors(self) -> dict[str, Tensor]:
        return {"squares": self.squares, "steps": torch.tensor(self.steps)} if self.steps else {}

    def load(self, parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
        self.squares, self.steps = parts[0]["squares"], int(parts[0]["steps"])  # all processes have the same


def _layers(state: State) -> list[Tensor]:
    return [layer for memory in memories(state) for layer in memory.layers]


def _with(fresh: State, held: Sequence[Weights], chosen: Tensor) -> State:
    """A state whose memories hold something else in the chosen rows, and are otherwise as they were."""
    others = iter(held)

    def changed(node: Any) -> Any:
        if isinstance(node, MemoryState):
            pairs = zip(next(others), node.layers, strict=True)
            return node._replace(layers=tuple(_rows(chosen, new, old) for new, old in pairs))
        if not isinstance(node, tuple):
            return node
        children: Iterator[Any] = map(changed, node)
        made = type(node)(*children) if hasattr(node, "_fields") else tuple(children)
        # MAC asks the memory as it was when the open segment began, which is now.
        return made._replace(weights=made.memory.memory.weights) if isinstance(made, MACState) else made

    return changed(fresh)


def _rows(chosen: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(chosen.view(-1, *[1] * (old.dim() - 1)), new.to(old.dtype), old)
