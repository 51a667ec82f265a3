"""A memory's state where a document begins: the learned start, another row's memory, or noise of that size.

A memory trained from its learned start alone knows only the states that one training length leads to, and fails in
those of longer texts. Rows that begin elsewhere show it such states at no cost in length. Only weights and momentum are
taken over: positions are 0, convolutions and windows are empty, as at any document's start, so that another text can
only be read through the memory.
"""

from __future__ import annotations

import itertools
from collections import Counter
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
"""The window, in steps, of the running mean of memory magnitudes."""


class InitialState(Protocol):
    """Chooses the state in which documents begin. What it keeps from earlier steps is saved by `tensors` and restored
    by `load`, in files of a checkpoint whose names start with `file_prefix`.
    """

    file_prefix: str

    def start(self, fresh: State, batch: Batch, number: int, carried: State | None = None) -> State:
        """The state of documents that begin now: `fresh`, or for some of them another one.

        `number` is the batch's, and `carried` what rows carry into it from the step before.
        """
        ...

    def after_step(self, state: State, batch: Batch) -> None:
        """Called with the state after a step."""
        ...

    def tensors(self) -> dict[str, Tensor]: ...

    def load(self, parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
        """Restore from the `tensors` of all processes, in their order."""
        ...


def make_initial_state(config: TrainConfig, world: World) -> InitialState | None:
    """What ``initial_state`` of the config names, for one of the processes; None if every document begins fresh."""
    if config.initial_state == "fresh":
        return None
    return (NeighborMemory if config.initial_state == "neighbor" else NoiseMemory)(config, world)


class Document(NamedTuple):
    """A document in a batch: its row, and whether the row ends with it."""

    row: int
    last: bool


class _Drawn:
    """The base class: draws the documents that do not start in the learned initial state."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        self.rows = config.batch // (config.accumulate * world.size)

    def documents(self, batch: Batch) -> list[Document]:
        """A packed row may have several."""
        if batch.offsets is None:
            return [Document(row, True) for row in range(self.rows)]
        length = batch.tokens.shape[1] // self.rows
        return [
            Document(start // length, end % length == 0) for start, end in itertools.pairwise(batch.offsets)
        ]

    def last_documents(self, batch: Batch) -> list[int]:
        """The index of each row's last document."""
        return [index for index, document in enumerate(self.documents(batch)) if document.last]

    def seeds(self, batch: Batch, number: int) -> list[int | None]:
        """For each document a seed, or None if it begins fresh.

        Like the batch, they are a function of the run's seed, the batch's number and the row among all processes' rows.
        The counter keeps them apart from what the sources draw with the same key.
        """
        found: list[int | None] = []
        for row, inside in itertools.groupby(self.documents(batch), lambda document: document.row):
            key, counter = [self.config.seed, number], [0, 0, self.world.rank * self.rows + row, 1]
            rng = np.random.Generator(np.random.Philox(key=key, counter=counter))
            for _ in inside:
                chosen, seed = rng.random() < self.config.initial_state_share, int(rng.integers(2**63))
                found.append(seed if chosen else None)
        return found


class NeighborMemory(_Drawn):
    """From the memory of the neighbouring row at the end of the step before.

    Rows 0 and 1 pass their memories to each other, so do 2 and 3, and so on: processes exchange nothing. A memory that
    has diverged is not passed.
    """

    file_prefix = "passed"

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        if self.rows % 2:
            wanted = "an even number of rows, as two pass their memories to each other"
            raise ValueError(
                f"initial_state: expected {wanted}, got batch / (accumulate x processes) = {self.rows}"
            )
        self.held: list[Weights] = []
        self.diverged = torch.zeros(0, dtype=torch.bool)

    def start(self, fresh: State, batch: Batch, number: int, carried: State | None = None) -> State:
        held, diverged = self.held, self.diverged
        if carried is not None:
            held, diverged = [memory.layers for memory in memories(carried)], carried.diverged
        if not held:
            return fresh
        device = fresh.position.device
        index = torch.tensor([document.row ^ 1 for document in self.documents(batch)], device=device)
        chosen = torch.tensor([seed is not None for seed in self.seeds(batch, number)], device=device)
        passed = [tuple(layer[index] for layer in layers) for layers in held]
        return _with(fresh, passed, chosen & ~diverged[index])

    def after_step(self, state: State, batch: Batch) -> None:
        if self.config.carry:
            return  # what is carried is what is passed
        ends = self.last_documents(batch)
        self.held = [tuple(layer.detach()[ends] for layer in memory.layers) for memory in memories(state)]
        self.diverged = state.diverged[ends]

    def tensors(self) -> dict[str, Tensor]:
        named = {f"{i}.{j}": layer for i, layers in enumerate(self.held) for j, layer in enumerate(layers)}
        return {**named, "diverged": self.diverged} if named else {}

    def load(self, parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
        own = slice(self.world.rank * self.rows, (self.world.rank + 1) * self.rows)
        named = {name: torch.cat([part[name] for part in parts])[own].to(device) for name in parts[0]}
        self.diverged = named.pop("diverged")
        depths = Counter(int(name.split(".")[0]) for name in named)
        self.held = [tuple(named[f"{i}.{j}"] for j in range(depths[i])) for i in range(len(depths))]


class NoiseMemory(_Drawn):
    """From normal random numbers with the mean square that memories had after the last steps.

    The mean square is one number for every weight and momentum of each head.
    """

    file_prefix = "noise"

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        self.squares, self.steps = torch.zeros(0, dtype=torch.float64), 0

    def start(self, fresh: State, batch: Batch, number: int, carried: State | None = None) -> State:
        if not self.steps:
            return fresh
        seeds, device = self.seeds(batch, number), fresh.position.device
        generators = [None if seed is None else torch.Generator(device).manual_seed(seed) for seed in seeds]
        squares = iter(self.squares.split([layer.shape[1] * layer.shape[2] for layer in _layers(fresh)]))
        made: list[Weights] = []
        for memory in memories(fresh):
            layers = []
            for layer in memory.layers:
                scale = next(squares).sqrt().to(device, layer.dtype)
                scale = scale.view(*layer.shape[1:3], *[1] * (layer.dim() - 3))
                drawn, shape = torch.zeros_like(layer), layer.shape[1:]
                for row, generator in enumerate(generators):
                    if generator is not None:
                        drawn[row] = scale * torch.randn(
                            shape, generator=generator, dtype=layer.dtype, device=device
                        )
                layers.append(drawn)
            made.append(tuple(layers))
        return _with(fresh, made, torch.tensor([seed is not None for seed in seeds], device=device))

    @torch.no_grad()
    def after_step(self, state: State, batch: Batch) -> None:
        ends = self.last_documents(batch)
        good = ~state.diverged[ends]
        sums = [good.sum().float().view(1)]
        for layer in _layers(state):
            squares = (
                layer[ends].float().square().reshape(len(ends), layer.shape[1] * layer.shape[2], -1).mean(-1)
            )
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
    """A state whose memories are replaced in the chosen rows."""
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
