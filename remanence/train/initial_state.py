"""The state of a memory at the start of a document: the learned state, another row's memory, or noise.

A memory that always starts from its learned state only sees the states that are reached within one training
length, and fails on longer texts. Rows that start from another state train it on such states without longer
rows. Only the weights and the momentum of the memory are replaced. Positions are 0 and convolutions and
windows are empty, as at the start of any document, so the model can see the other text only through its
memory.
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
from remanence.train.distributed import ProcessGroup

SPAN = 100
"""The number of steps over which the mean square of memories is averaged."""


class InitialState(Protocol):
    """Chooses the state in which documents begin.

    Data that it keeps from earlier steps is saved by `tensors` and restored by `load`, in files of a
    checkpoint whose names start with `file_prefix`.
    """

    file_prefix: str

    def start(self, fresh: State, batch: Batch, number: int, carried: State | None = None) -> State:
        """Return the state of the documents that begin in a batch: `fresh`, with some of its rows replaced.

        `number` is the number of the batch, and `carried` the state that rows carry from the previous step
        (or None).
        """
        ...

    def after_step(self, state: State, batch: Batch) -> None:
        """Update the data kept for later steps, from the state after a step."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the data of this process to store in a checkpoint, by name. Empty if there is none."""
        ...

    def load(self, parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
        """Restore the data from the `tensors` of all processes, in the order of their ranks."""
        ...


def make_initial_state(config: TrainConfig, process_group: ProcessGroup) -> InitialState | None:
    """Create the object for ``config.initial_state`` in one process. None if every document begins fresh."""
    if config.initial_state == "fresh":
        return None
    return (NeighborMemory if config.initial_state == "neighbor" else NoiseMemory)(config, process_group)


class Document(NamedTuple):
    """A document in a batch: the index of its row, and whether it is the last document of the row."""

    row: int
    last: bool


class _RandomInitialState:
    """The base class, which randomly chooses the documents that do not start in the learned initial state."""

    def __init__(self, config: TrainConfig, process_group: ProcessGroup) -> None:
        self.config, self.process_group = config, process_group
        self.rows = config.batch // (config.accumulate * process_group.size)

    def documents(self, batch: Batch) -> list[Document]:
        """Return the documents of a batch in order. A packed row may have several, any other row has one."""
        if batch.offsets is None:
            return [Document(row, True) for row in range(self.rows)]
        length = batch.tokens.shape[1] // self.rows
        return [
            Document(start // length, end % length == 0) for start, end in itertools.pairwise(batch.offsets)
        ]

    def last_documents(self, batch: Batch) -> list[int]:
        """Return the index of the last document of each row."""
        return [index for index, document in enumerate(self.documents(batch)) if document.last]

    def seeds(self, batch: Batch, number: int) -> list[int | None]:
        """Return a seed for each document, or None for a document that begins fresh.

        Like the batch, the seeds depend only on the run's seed, the batch number and the row among the rows
        of all processes. The counter makes them independent of the numbers that the sources draw with the
        same key.
        """
        found: list[int | None] = []
        for row, documents in itertools.groupby(self.documents(batch), lambda document: document.row):
            key, counter = [self.config.seed, number], [0, 0, self.process_group.rank * self.rows + row, 1]
            rng = np.random.Generator(np.random.Philox(key=key, counter=counter))
            for _ in documents:
                chosen, seed = rng.random() < self.config.initial_state_share, int(rng.integers(2**63))
                found.append(seed if chosen else None)
        return found


class NeighborMemory(_RandomInitialState):
    """Documents begin with the memory that the neighbouring row had at the end of the previous step.

    Rows 0 and 1 exchange their memories, rows 2 and 3 do, and so on, so that processes need not communicate.
    A memory that has diverged is not passed on.
    """

    file_prefix = "passed"

    def __init__(self, config: TrainConfig, process_group: ProcessGroup) -> None:
        super().__init__(config, process_group)
        if self.rows % 2:
            wanted = "an even number of rows, as two pass their memories to each other"
            raise ValueError(
                f"initial_state: expected {wanted}, got batch / (accumulate x processes) = {self.rows}"
            )
        self.held: list[Weights] = []
        self.diverged = torch.zeros(0, dtype=torch.bool)

    def start(self, fresh: State, batch: Batch, number: int, carried: State | None = None) -> State:
        memory_weights, diverged = self.held, self.diverged
        if carried is not None:
            memory_weights, diverged = [memory.layers for memory in memories(carried)], carried.diverged
        if not memory_weights:
            return fresh
        device = fresh.position.device
        index = torch.tensor([document.row ^ 1 for document in self.documents(batch)], device=device)
        chosen = torch.tensor([seed is not None for seed in self.seeds(batch, number)], device=device)
        passed = [tuple(layer[index] for layer in layers) for layers in memory_weights]
        return _replace_memories(fresh, passed, chosen & ~diverged[index])

    def after_step(self, state: State, batch: Batch) -> None:
        if self.config.carry:
            return  # `start` uses the carried memories
        ends = self.last_documents(batch)
        self.held = [tuple(layer.detach()[ends] for layer in memory.layers) for memory in memories(state)]
        self.diverged = state.diverged[ends]

    def tensors(self) -> dict[str, Tensor]:
        named = {f"{i}.{j}": layer for i, layers in enumerate(self.held) for j, layer in enumerate(layers)}
        return {**named, "diverged": self.diverged} if named else {}

    def load(self, parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
        own = slice(self.process_group.rank * self.rows, (self.process_group.rank + 1) * self.rows)
        named = {name: torch.cat([part[name] for part in parts])[own].to(device) for name in parts[0]}
        self.diverged = named.pop("diverged")
        depths = Counter(int(name.split(".")[0]) for name in named)
        self.held = [tuple(named[f"{i}.{j}"] for j in range(depths[i])) for i in range(len(depths))]


class NoiseMemory(_RandomInitialState):
    """Documents begin with normal random numbers of the same mean square as memories had after the last
    steps.

    There is one mean square for each weight matrix and each momentum matrix of each head.
    """

    file_prefix = "noise"

    def __init__(self, config: TrainConfig, process_group: ProcessGroup) -> None:
        super().__init__(config, process_group)
        self.squares, self.steps = torch.zeros(0, dtype=torch.float64), 0

    def start(self, fresh: State, batch: Batch, number: int, carried: State | None = None) -> State:
        if not self.steps:
            return fresh
        seeds, device = self.seeds(batch, number), fresh.position.device
        generators = [None if seed is None else torch.Generator(device).manual_seed(seed) for seed in seeds]
        squares = iter(self.squares.split([layer.shape[1] * layer.shape[2] for layer in _layers(fresh)]))
        drawn_memories: list[Weights] = []
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
            drawn_memories.append(tuple(layers))
        return _replace_memories(
            fresh, drawn_memories, torch.tensor([seed is not None for seed in seeds], device=device)
        )

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
        rows, *total = self.process_group.sum_over_processes(*torch.cat(sums).tolist())
        if not rows or not all(map(isfinite, total)):
            return
        self.steps += 1
        current = torch.tensor(total, dtype=torch.float64) / rows
        previous = self.squares if self.steps > 1 else current
        self.squares = previous + (current - previous) / min(self.steps, SPAN)

    def tensors(self) -> dict[str, Tensor]:
        return {"squares": self.squares, "steps": torch.tensor(self.steps)} if self.steps else {}

    def load(self, parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
        self.squares, self.steps = parts[0]["squares"], int(parts[0]["steps"])  # equal in all processes


def _layers(state: State) -> list[Tensor]:
    """Return the weight tensors (with momentum) of all memories of a state."""
    return [layer for memory in memories(state) for layer in memory.layers]


def _replace_memories(fresh: State, weights: Sequence[Weights], chosen: Tensor) -> State:
    """Return `fresh` with its memories replaced by `weights` in the rows where `chosen` [b] is true."""
    replacements = iter(weights)

    def replace_in(node: Any) -> Any:
        """Return a part of the state with all memories in it replaced."""
        if isinstance(node, MemoryState):
            pairs = zip(next(replacements), node.layers, strict=True)
            return node._replace(layers=tuple(_select_rows(chosen, new, old) for new, old in pairs))
        if not isinstance(node, tuple):
            return node
        children: Iterator[Any] = map(replace_in, node)
        rebuilt = type(node)(*children) if hasattr(node, "_fields") else tuple(children)
        # MAC queries the memory as it was at the start of the current segment, which begins here.
        return (
            rebuilt._replace(weights=rebuilt.memory.memory.weights)
            if isinstance(rebuilt, MACState)
            else rebuilt
        )

    return replace_in(fresh)


def _select_rows(chosen: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` in the rows where `chosen` [b] is true, and `old` elsewhere."""
    return torch.where(chosen.view(-1, *[1] * (old.dim() - 1)), new.to(old.dtype), old)
